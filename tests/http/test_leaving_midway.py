"""Clients that leave in the middle of their request while an answer is on its way to them."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.http.respond import send_json
from dynamo_trio.http.sinks import open_sink
from tests.http.harness import client_of, running
from tests.http.routes import LIMITS
from tests.http.test_https import Ends, shake_hands
from tests.http.test_https import ends as ends

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send

QUICK = attrs.evolve(LIMITS, write_time=5, linger_time=0.05)
HALF = b"POST %s HTTP/1.1\r\nhost: t\r\ncontent-length: 100000\r\n\r\nhalf"
CHUNKED = b"POST %s HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n5\r\nha"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    match scope["path"]:
        case "/whole":
            await send_json(scope, send, 413, b"x" * 1_000_000)
        case "/stream":
            sink = open_sink(scope, send)
            await sink.start(200, [])
            sink.feed(b"x" * 1_000_000)
            await sink.serve()
            await sink.end()
        case _:
            await send_json(scope, send, 200, b"1")


def leave(sock: trio.socket.SocketType, how: str) -> None:
    if how == "fin":
        sock.shutdown(socket.SHUT_WR)
        return
    if how == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("path", [b"/whole", b"/stream"])
@pytest.mark.parametrize("request_", [HALF, CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("how", ["fin", "rst", "close"])
async def test_no_word_of_it_is_a_mistake_of_ours(
    secret: bool,
    path: bytes,
    request_: bytes,
    how: str,
    ends: Ends,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    tls = ends.server if secret else None
    async with running(app, QUICK, send_buffer=4608, tls=tls) as server:
        stream = await server.connect(receive_buffer=4608)
        way = await shake_hands(stream, ends) if secret else stream
        await way.send_all(request_ % path)
        await server.wait_until(
            lambda: any(c.stalled_since < trio.current_time() for c in server.server.connections)
        )
        await trio.sleep(0.1)  # past the lingering, until the answer is stuck
        leave(stream.socket, how)
        await server.wait_until(lambda: not server.server.connections)
        stream.socket.close()
        if not secret:
            async with client_of(server) as other:
                assert (await other.ask("GET", "/")).status == 200
        assert server.server.failed == 0
    assert [r.getMessage() for r in caplog.records if r.exc_info or r.levelno > logging.INFO] == []


@pytest.mark.parametrize("said", [b"", b"P", b"PRI * HTT"])
@pytest.mark.parametrize("how", ["fin", "rst", "close"])
async def test_nor_of_one_who_leaves_before_it_is_known_what_is_spoken(
    said: bytes, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(app, QUICK) as server:
        for _ in range(20):
            stream = await server.connect()
            await stream.send_all(said)
            leave(stream.socket, how)
            stream.socket.close()
        async with client_of(server) as client:
            assert (await client.ask("GET", "/")).status == 200
        await server.wait_until(lambda: not server.server.connections)
        assert server.server.failed == 0
    assert caplog.records == []


async def test_nor_of_one_who_says_nothing_until_its_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(app, attrs.evolve(QUICK, idle_time=0.05)) as server:
        stream = await server.connect()
        assert await stream.receive_some() == b""
        await server.wait_until(lambda: not server.server.connections)
        assert server.server.failed == 0
        stream.socket.close()
    assert caplog.records == []
