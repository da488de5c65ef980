"""What is no request is answered in the words in which the app answers errors."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
import pytest
import trio

from tests.http.harness import PATIENCE, Http1Client, in_memory, read_to_end, running
from tests.http.routes import LIMITS, App

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send

HEAD = b"GET / HTTP/1.1\r\nhost: t\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: t\r\n"
UPGRADE = HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n"

BAD: dict[str, tuple[bytes, int, str]] = {
    "garbage": (b"hello there\r\n\r\n", 400, "invalid_request"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    "two hosts": (HEAD + b"host: u\r\n\r\n", 400, "invalid_request"),
    "a bad length": (POST + b"content-length: x\r\n\r\n", 400, "invalid_request"),
    "two lengths": (
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        *(400, "invalid_request"),
    ),
    "a NUL": (HEAD + b"a: b\0c\r\n\r\n", 400, "invalid_request"),
    "a raw path": ("GET /ü HTTP/1.1\r\nhost: t\r\n\r\n".encode(), 400, "invalid_request"),
    "a bad chunk": (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request"),
    "a coding": (POST + b"transfer-encoding: gzip\r\n\r\n", 501, "not_implemented"),
    "a version": (b"GET / HTTP/9.9\r\nhost: t\r\n\r\n", 505, "http_version_not_supported"),
    "an old version": (b"GET / HTTP/0.9\r\nhost: t\r\n\r\n", 505, "http_version_not_supported"),
    "no key": (UPGRADE + b"sec-websocket-version: 13\r\n\r\n", 400, "invalid_request"),
    "an old WebSocket": (
        UPGRADE + b"sec-websocket-version: 8\r\nsec-websocket-key: AAAA\r\n\r\n",
        *(400, "invalid_request"),
    ),
}  # fmt: skip


async def answer_to(stream: trio.abc.HalfCloseableStream, said: bytes) -> Any:
    """Status, headers and error of the answer, behind which the connection ends in good order."""
    await stream.send_all(said)
    answer, was_reset = await read_to_end(stream)
    assert not was_reset
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "t")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(answer)
    response, body = parser.next_event(), parser.next_event()
    assert isinstance(response, h11.Response)
    assert response.reason.decode() == HTTPStatus(response.status_code).phrase
    assert isinstance(body, h11.Data)
    assert isinstance(parser.next_event(), h11.EndOfMessage)
    return response.status_code, dict(response.headers), json.loads(body.data)["error"]


@pytest.mark.parametrize(("said", "status", "reason"), BAD.values(), ids=BAD)
async def test_what_is_no_request_is_told_so(
    autojump_clock: MockClock, said: bytes, status: int, reason: str
) -> None:
    async with in_memory(App(), LIMITS) as memory:
        found, headers, error = await answer_to(memory.connect(), said)
        assert (found, error["code"], error["type"]) == (status, reason, "invalid_request_error")
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"x-dynamo-reason"] == reason.encode()
        assert headers[b"connection"] == b"close"
        assert (headers.get(b"sec-websocket-version") == b"13") == (b"upgrade" in said)
        assert len(error["message"]) > 20
        await trio.sleep(LIMITS.linger_time + 0.1)
        assert not memory.server.connections


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 431)])
async def test_the_limit_of_a_head_holds_to_the_byte(
    autojump_clock: MockClock, more: int, status: int, pieces: int
) -> None:
    head = HEAD + b"a: \r\n\r\n"
    head = HEAD + b"a: " + b"x" * (LIMITS.head_bytes + more - len(head)) + b"\r\n\r\n"
    async with in_memory(App(), LIMITS) as memory:
        stream = memory.connect()
        size = -(-len(head) // pieces)
        for at in range(0, size * (pieces - 1), size):
            await stream.send_all(head[at : at + size])
        if status == 431:
            found, headers, error = await answer_to(stream, head[size * (pieces - 1) :])
            assert (found, error["code"]) == (431, "head_too_large")
            assert headers[b"x-dynamo-reason"] == b"head_too_large"
        else:
            await stream.send_all(head[size * (pieces - 1) :])
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_so_is_the_client_of_an_app_that_fails(autojump_clock: MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """One that says nothing at all."""

    async with in_memory(app, LIMITS) as memory:
        status, headers, error = await answer_to(memory.connect(), HEAD + b"\r\n")
        assert (status, error["code"]) == (500, "internal")
        assert headers[b"x-should-retry"] == b"false"
        stream = memory.connect()
        await stream.send_all(b"HEAD / HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await read_to_end(stream))[0].endswith(b"\r\n\r\n")


@pytest.mark.parametrize("empty", [b"\r\n", b"\n", b"\r\n\r\n"])
async def test_empty_lines_before_a_request_are_skipped(
    autojump_clock: MockClock, empty: bytes
) -> None:
    """Wherever they come: before the first, and behind a body (RFC 9112, 2.2)."""
    async with in_memory(App(), LIMITS) as memory:
        client = Http1Client(memory.connect())
        for byte in empty:
            await client.stream.send_all(bytes([byte]))
        assert (await client.ask("GET", "/")).status == 200
        await client.stream.send_all(POST + b"content-length: 1\r\n\r\nx" + empty)
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 200")

        await trio.sleep(1)
        assert (await client.ask("GET", "/")).status == 200


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        ("http://a.example/live", b"a.example", "/live", b""),
        ("https://u:p@b.example:8/live?x=1", b"b.example:8", "/live", b"x=1"),
        ("http://c.example?x", b"c.example", "/", b"x"),
        ("http://d.example", b"d.example", "/", b""),
    ],
)
async def test_a_target_may_be_a_whole_url(
    autojump_clock: MockClock, target: str, host: bytes, path: str, query: bytes
) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await App()(scope, receive, send)

    async with in_memory(app, LIMITS) as memory:
        client = Http1Client(memory.connect())
        with trio.fail_after(PATIENCE):
            assert (await client.ask("GET", target)).status == 200
    assert (scopes[0]["path"], scopes[0]["query_string"]) == (path, query)
    assert [value for name, value in scopes[0]["headers"] if name == b"host"] == [host]


async def test_a_newer_version_of_http1_is_read_as_ours(autojump_clock: MockClock) -> None:
    async with in_memory(App(), LIMITS) as memory:
        stream = memory.connect()
        await stream.send_all(b"GET / HTTP/1.2\r\nhost: t\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def read_on(stream: trio.SocketStream) -> None:
    with suppress(trio.ClosedResourceError):
        await read_to_end(stream)


async def test_who_goes_on_too_far_ahead_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(App(), LIMITS) as server, trio.open_nursery() as nursery:

        async def flood() -> None:
            async with await server.connect() as stream:
                nursery.start_soon(read_on, stream)
                with suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all((HEAD + b"\r\n") * 2000)

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as floods:
                for _ in range(6):
                    floods.start_soon(flood)
        nursery.cancel_scope.cancel()
        await server.wait_until(lambda: server.server.reset == 6)
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert 1 <= len(caplog.records) <= 5
