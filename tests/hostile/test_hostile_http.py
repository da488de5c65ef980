"""Clients of the HTTP port in bad faith: floods, trickles and nonsense, clear and in TLS."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import h2.connection
import pytest
import trio

from dynamo_trio.errors import Cancelled
from tests.http.harness import PATIENCE, Http1Client, in_memory, read_to_end, running
from tests.http.routes import LIMITS, App
from tests.http.test_http2 import Http2Client, http2
from tests.http.test_https import Ends, shake_hands
from tests.http.test_https import ends as ends

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send
    from tests.http.harness import Running

HEAD = [(":method", "POST"), (":path", "/wait"), (":scheme", "http"), (":authority", "t")]


class Patient(App):
    """An app that knows that clients leave."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Cancelled):
            await super().__call__(scope, receive, send)


@asynccontextmanager
async def connected(server: Running, ends: Ends | None, *protocols: str) -> AsyncIterator[Any]:
    """A connection in clear text, or one in TLS."""
    async with await server.connect() as stream:
        yield stream if ends is None else await shake_hands(stream, ends, *protocols)


async def answers(server: Running, ends: Ends | None) -> bool:
    """Is somebody who keeps to the rules still answered?"""
    async with connected(server, ends) as stream:
        with trio.fail_after(PATIENCE):
            return (await Http1Client(stream).ask("GET", "/")).status == 200


@pytest.fixture(params=[False, True], ids=["clear", "tls"])
def way(request: pytest.FixtureRequest, ends: Ends) -> Ends | None:
    return ends if request.param else None


async def test_streams_that_are_reset_as_fast_as_they_are_opened(way: Ends | None) -> None:
    """CVE-2023-44487: each costs a task for a moment, and nobody else anything."""
    app = Patient()
    async with running(app, LIMITS, tls=way.server if way else None) as server:
        async with connected(server, way, "h2") as stream:
            client = await http2(stream)
            with suppress(trio.BrokenResourceError):
                for _ in range(20):
                    for _ in range(50):
                        number = client.parser.get_next_available_stream_id()
                        client.parser.send_headers(number, HEAD, end_stream=True)
                        client.parser.reset_stream(number)
                    await client.flush()
                    assert await answers(server, way)
        await server.wait_until(lambda: not server.server.connections and app.gate.count == 0)
        assert server.server.failed == 0


FLOODS = {
    "pings": b"\0\0\x08\x06\0\0\0\0\0" + bytes(8),
    "settings": b"\0\0\0\x04\0\0\0\0\0",
    "priorities": b"\0\0\x05\x02\0\0\0\0\x09\0\0\0\0\0",
    "unknown frames": b"\0\0\x04\xbb\0\0\0\0\0abcd",
    "window updates": b"\0\0\x04\x08\0\0\0\0\0\0\0\0\1",
    "empty data": b"\0\0\0\0\0\0\0\0\x01",
    "continuations": b"\0\0\x01\x09\0\0\0\0\x01a",
    "goaways": b"\0\0\x08\x07\0\0\0\0\0" + bytes(8),
}


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS)
async def test_frames_without_end(
    frame: bytes, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a client that takes no answers to them, either."""
    limits = attrs.evolve(LIMITS, write_time=0.5, idle_time=1)
    async with running(Patient(), limits, send_buffer=4608, tls=ends.server) as server:
        async with await server.connect(receive_buffer=4608) as raw:
            stream = await shake_hands(raw, ends, "h2")
            client: Http2Client = await http2(stream)  # type: ignore[arg-type]  # like any stream
            client.parser.send_headers(1, HEAD)
            await client.flush()
            with suppress(trio.BrokenResourceError), trio.move_on_after(1):
                for _ in range(1000):
                    await stream.send_all(frame * 200)
            assert await answers(server, ends)
        await server.wait_until(lambda: not server.server.connections)
    assert [record for record in caplog.records if record.exc_info] == []
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 1


async def test_a_head_too_long_for_http2(way: Ends | None) -> None:
    async with running(Patient(), LIMITS, tls=way.server if way else None) as server:
        async with connected(server, way, "h2") as stream:
            client = await http2(stream)
            value = "x" * (3 * LIMITS.head_bytes)  # in several frames
            client.parser.send_headers(1, [*HEAD, ("x-long", value)], end_stream=True)
            with suppress(trio.BrokenResourceError):
                await client.flush()
            await read_to_end(stream)
        assert await answers(server, way)


async def read_away(stream: trio.abc.ReceiveStream) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def test_an_http2_head_that_trickles_in_ends_with_the_idle_time(
    autojump_clock: MockClock,
) -> None:
    limits = attrs.evolve(LIMITS, idle_time=75)
    async with in_memory(Patient(), limits) as memory:
        client, parser = memory.connect(), h2.connection.H2Connection()
        memory.nursery.start_soon(read_away, client)
        parser.initiate_connection()
        parser.send_headers(1, HEAD, end_stream=True)
        said = parser.data_to_send()
        await client.send_all(said[:24])  # the preface; one in pieces has the time of a head
        with suppress(trio.BrokenResourceError):
            for byte in said[24:] + bytes(1000):
                await client.send_all(bytes([byte]))
                await trio.sleep(1)
                if not memory.server.connections:
                    break
        assert 74 <= trio.current_time() <= 82  # and a moment to close


async def test_a_body_that_trickles_in_over_http2_ends_at_its_limit(
    autojump_clock: MockClock,
) -> None:
    """And its connection serves others meanwhile."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with suppress(Exception):
            if scope["path"] == "/wait":
                await App()({**scope, "path": "/echo"}, receive, send)
        statuses.append(int(trio.current_time()))

    limits = attrs.evolve(LIMITS, body_time=60)
    async with in_memory(app, limits) as memory:
        client: Http2Client = await http2(memory.connect())  # type: ignore[arg-type]  # in memory
        memory.nursery.start_soon(read_away, client.stream)
        client.parser.send_headers(1, HEAD)
        await client.flush()
        for _ in range(80):
            await trio.sleep(1)
            if statuses:
                break
            await client.send_data(1, b"x")
        assert statuses == [pytest.approx(60, abs=2)]


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nhost: t\r\n" + b"a: b\r\n" * 20_000,
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 100_000,
        b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: -1\r\n\r\n",
        b"\x00" * 100_000,
    ],
    ids=["fields", "path", "chunk size", "length", "zeros"],
)
async def test_what_is_too_long_or_no_http(said: bytes, way: Ends | None) -> None:
    async with running(Patient(), LIMITS, tls=way.server if way else None) as server:
        async with connected(server, way) as stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(said)
            heard, _ = await read_to_end(stream)
            assert heard[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 200", b"")
        assert await answers(server, way)
        assert server.server.failed == 0
