"""What malformed peers say, from a seed, and how they say it."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.control import ControlMessage, ReplyTo, encode_payload
from dynamo_trio.wire.dynamo.request_frame import RequestFrame, encode_frame

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

#: What must not steer a log or a terminal, nor pass for a line of its own.
NASTY = "a\nERROR fake: b\r\x1b[31m\u202e\x00%s%(x)s{0}"

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(190))


def request(
    path: str, reply: HostPort, *, subject: str = "s", request_id: str = "i", body: bytes = b"\xc0",
    metadata: Mapping[str, str] | None = None,
) -> bytes:  # fmt: skip
    """A whole request frame in good order."""
    control = ControlMessage.for_request(ReplyTo(reply, subject, request_id), MSGPACK)
    if metadata is not None:
        fields = json.loads(JSON.encode(control)) | {"metadata": dict(metadata)}
        payload = two_part.encode(JSON.encode(fields), body)
    else:
        payload = encode_payload(control, body)
    return encode_frame(RequestFrame(path, payload))


def handshake(subject: str) -> bytes:
    """How a worker calls home."""
    return two_part.encode(JSON.encode({"subject": subject, "stream_type": "response"}))


def for_any_port(rng: random.Random) -> list[bytes]:
    """Bytes that are nobody's protocol, or that of another port."""
    noise = [rng.randbytes(rng.choice((1, 2, 7, 8, 23, 24, 25, 64, 1000, 9000))) for _ in range(12)]
    giants = [
        b"\xff" * 64,
        struct.pack(">QQQ", 2**64 - 1, 2**64 - 1, 0),
        struct.pack(">QQQ", 0, 2**63, 0),
        struct.pack(">QQQ", 5, 32 * 2**20 - 24 - 5, 0) + b"12345",
        struct.pack(">HHI", 0, 0, 2**32 - 1),
        struct.pack(">H", 2**16 - 1),
    ]
    others = [
        *(b"\r\n\r\n", b"\0" * 100, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", CLIENT_HELLO),
        H2_PREFACE,
        handshake("nobody"),
        request("1/generate", HostPort("127.0.0.1", 9)),
    ]
    return [*noise, *giants, *others, *map(_cut(rng), others), *map(_bent(rng), others)]


def for_http(rng: random.Random) -> list[bytes]:
    """What is nearly HTTP."""
    bodies = [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"demo","messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model":"\\ud800","messages":[]}',
        b'{"model":"demo","prompt":"\xff"}',
        b'{"model":"demo","max_tokens":' + b"9" * 5000 + b"}",
        b"\0" * 1000,
        rng.randbytes(1000),
    ]
    posts = [post(path, body) for path in _PATHS for body in bodies]
    frames = [H2_PREFACE + _h2_frames(rng) for _ in range(20)]
    return [*_HTTP, *posts, *frames, *map(_bent(rng), _HTTP), *map(_cut(rng), _HTTP)]


def post(path: str, body: bytes) -> bytes:
    """A whole HTTP/1.1 request."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


#: The end of a head line and the host behind it; what asks for chunks; what asks for HTTP/2.
_HOST = b" HTTP/1.1\r\nHost: a\r\n"
_CHUNKED = _HOST + b"Transfer-Encoding: chunked\r\n"
_H2C = _HOST + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: "
_PATHS = ("/v1/chat/completions", "/v1/completions", "/engine/x")
_HTTP = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%0aERROR%20fake HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\xff\xfe\x80 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%ff%fe%00%c3 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /engine/%0a%1b[31m HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/metadata/../../../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://[::1]:99999/live HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET //live?%zz=%00&&& HTTP/1.1\r\nHost: a\r\n\r\n",
    b"* * *\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999999999999999\r\n\r\n",
    b"POST /v1/completions" + _CHUNKED + b"\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"POST /v1/completions" + _CHUNKED + b"\r\n5;" + b"x" * 70_000,
    b"POST /" + _CHUNKED + b"Content-Length: 3\r\n\r\nabc",
    b"GET /" + _H2C + b"!!\r\n\r\n",
    b"GET /" + _H2C + b"AAMAAABkAAQAAP__\r\n\r\ngarbage",
    b"GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n\xff\xff\xff",
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 200,
]  # fmt: skip


def _h2_frames(rng: random.Random) -> bytes:
    """Frames of every kind, their lengths right and their contents wrong."""
    frames = [_h2(4, 0, 0, b"")] if rng.random() < 0.7 else []
    for _ in range(rng.randrange(1, 8)):
        payload = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 30, 300)))
        stream = rng.choice((0, 1, 1, 1, 2, 3, 2**31 - 1))
        frames.append(_h2(rng.randrange(12), rng.randrange(256), stream, payload))
    if rng.random() < 0.5:
        frames.append(_h2(1, 5, 1, H2_GET))
    return b"".join(frames)


#: ``GET /health`` as HPACK: literal header fields, no compression.
H2_GET = b"".join(
    b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v
    for k, v in (
        (b":method", b"GET"),
        (b":path", b"/health"),
        (b":scheme", b"http"),
        (b":authority", b"a"),
    )
)


def _h2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
    return head + payload


class _cut:
    """A beginning of it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(1, max(2, min(len(data), 4000)))]


class _bent(_cut):
    """A few of its bytes are others."""

    def __call__(self, data: bytes) -> bytes:
        bent = bytearray(data)
        for _ in range(self._rng.randrange(1, 4)):
            bent[self._rng.randrange(len(bent))] = self._rng.randrange(256)
        return bytes(bent)


def say(port: int, data: bytes, *, ending: str) -> bytes:
    """Say it, and leave: ``fin`` waits for the other end, ``reset`` and ``close`` do not."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        with suppress(OSError):
            sock.sendall(data)
            if ending == "fin":
                sock.shutdown(socket.SHUT_WR)
                while piece := sock.recv(65536):
                    heard += piece[:4096]
        if ending == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return heard


def say_all(port: int, pieces: Iterable[bytes], rng: random.Random) -> None:
    """One connection for each."""
    for data in pieces:
        say(port, data, ending=rng.choice(("fin", "fin", "reset", "close")))
