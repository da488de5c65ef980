"""Answers that leave before the request was read to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import h2.connection
import h2.errors
import h2.events
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dynamo_trio.http.early import SOON
from tests.http.harness import Http1Client, in_memory, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import http2

if TYPE_CHECKING:
    from trio.testing import MockClock

HALF = b"POST %s HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999\r\n\r\nx"
ON_HTTP2 = [(":method", "POST"), (":scheme", "http"), (":authority", "t")]


async def read_head(stream: trio.abc.ReceiveStream) -> bytes:
    said = b""
    while b"\r\n\r\n" not in said:
        part = await stream.receive_some()
        assert part, "the server closed the connection"
        said += part
    return said


@pytest.mark.parametrize(("path", "after"), [(b"/early", SOON), (b"/early-close", 0)])
async def test_it_does_not_wait_for_a_client_that_still_sends(
    autojump_clock: MockClock, path: bytes, after: float
) -> None:
    async with in_memory(App()) as memory:
        stream = memory.connect()
        await stream.send_all(HALF % path)
        begun = trio.current_time()
        head = await read_head(stream)
        assert trio.current_time() == pytest.approx(begun + after)
        assert head.startswith(b"HTTP/1.1 503")
        assert head.count(b"connection: close") == 1
        assert (await read_to_end(stream))[0] == b'"early"'
        await trio.sleep(2)
        assert not memory.server.connections


async def test_a_body_that_comes_soon_keeps_its_connection(autojump_clock: MockClock) -> None:
    async with in_memory(App()) as memory:
        client = Http1Client(memory.connect())
        await client.stream.send_all(
            b"POST /early HTTP/1.1\r\nhost: t\r\ncontent-length: 4\r\n\r\n"
        )
        await trio.sleep(SOON / 2)
        await client.stream.send_all(b"soon")
        assert b"connection" not in await read_head(client.stream)
        await client.stream.receive_some()
        assert (await client.ask("POST", "/echo", b"1")).body == b"1"


async def test_a_client_that_goes_on_sending_gets_its_answer(autojump_clock: MockClock) -> None:
    """It is read away for a moment, or a reset would overtake the answer."""
    async with in_memory(App()) as memory, trio.open_nursery() as nursery:
        stream = memory.connect()
        await stream.send_all(HALF % b"/early-close")

        async def go_on() -> None:
            while True:
                try:
                    await stream.send_all(b"x" * 50_000)
                except trio.BrokenResourceError:
                    return
                await trio.sleep(0.01)

        nursery.start_soon(go_on)
        answer, was_reset = await read_to_end(stream)
        assert answer.endswith(b'"early"')
        assert not was_reset


@attrs.define(eq=False)
class Upload:
    """A half-sent request on HTTP/2, over a memory stream."""

    stream: trio.abc.HalfCloseableStream
    parser: h2.connection.H2Connection = attrs.field(factory=h2.connection.H2Connection)
    #: Of the first stream, with the time of each.
    events: list[tuple[float, h2.events.Event]] = attrs.field(factory=list)

    async def begin(self, path: str) -> None:
        self.parser.initiate_connection()
        self.parser.send_headers(1, [*ON_HTTP2, (":path", path)])
        self.parser.send_data(1, b"x")
        await self.stream.send_all(self.parser.data_to_send())

    async def listen(self) -> None:
        while data := await self.stream.receive_some():
            for event in self.parser.receive_data(bytes(data)):
                self.events.append((trio.current_time(), event))
            if said := self.parser.data_to_send():
                await self.stream.send_all(said)

    def of(self, kind: type[Any]) -> tuple[float, Any]:
        """The only one of this kind, and when it came."""
        [found] = [(when, event) for when, event in self.events if isinstance(event, kind)]
        return found

    def body(self) -> bytes:
        parts = [e.data for _, e in self.events if isinstance(e, h2.events.DataReceived)]
        return b"".join(filter(None, parts))


@pytest.mark.parametrize(("path", "after"), [("/early", SOON), ("/early-close", 0)])
async def test_on_http2_it_is_whole_and_then_the_upload_is_stopped(
    autojump_clock: MockClock, path: str, after: float
) -> None:
    async with in_memory(App()) as memory, trio.open_nursery() as nursery:
        upload = Upload(memory.connect())
        await upload.begin(path)
        begun = trio.current_time()
        nursery.start_soon(upload.listen)
        await trio.sleep(1)
        assert upload.of(h2.events.ResponseReceived)[0] == pytest.approx(begun + after)
        assert upload.body() == b'"early"'
        ended, _ = upload.of(h2.events.StreamEnded)
        stopped, reset = upload.of(h2.events.StreamReset)
        assert ended == pytest.approx(begun + after)
        assert stopped == pytest.approx(begun + SOON)
        assert reset.error_code is h2.errors.ErrorCodes.NO_ERROR
        kinds = [type(event) for _, event in upload.events]
        assert kinds.index(h2.events.StreamEnded) < kinds.index(h2.events.StreamReset)
        nursery.cancel_scope.cancel()


async def test_a_request_that_is_whole_is_not_reset(autojump_clock: MockClock) -> None:
    async with in_memory(App()) as memory, trio.open_nursery() as nursery:
        upload = Upload(memory.connect())
        upload.parser.initiate_connection()
        upload.parser.send_headers(1, [*ON_HTTP2, (":path", "/early-close")])
        upload.parser.end_stream(1)
        await upload.stream.send_all(upload.parser.data_to_send())
        nursery.start_soon(upload.listen)
        await trio.sleep(1)
        upload.of(h2.events.StreamEnded)
        assert not [event for _, event in upload.events if type(event) is h2.events.StreamReset]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", ["/early", "/early-close", "/raise"])
async def test_data_that_is_on_its_way_harms_no_other_stream(path: str) -> None:
    """hypercorn alone would end the connection with a KeyError at the first DATA frame."""
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        other = await client.begin("GET", "/stream")
        early = await client.begin("POST", path, end=False)
        await server.wait_until(lambda: server.server.statistics().busy == 1)
        await wait_all_tasks_blocked(0.01)
        while client.parser.local_flow_control_window(early) >= 1000:  # it has read nothing
            await client.send_data(early, b"x" * 1000)
        await finish_stream(server)
        assert await client.read_until_ended(other) == b"data"
        echo = await client.begin("POST", "/echo", end=False)
        await client.send_data(echo, b"y" * 16_000, end=True)
        assert await client.read_until_ended(echo) == b"y" * 16_000
        assert server.server.failed == 0
