"""HTTP/2 over real loopback sockets, in clear text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
import trio

from dynamo_trio.http.exchange import exchange_of
from dynamo_trio.http.frames import PREFACE
from dynamo_trio.http.guard import data_frames
from dynamo_trio.http.sinks import SinkOutcome
from tests.http.harness import PATIENCE, client_of, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.http.exchange import Exchange
    from tests.http.harness import Running


@attrs.define(eq=False)
class Http2Client:
    """As much of an HTTP/2 client as the tests need."""

    stream: trio.SocketStream
    parser: h2.connection.H2Connection = attrs.field(factory=h2.connection.H2Connection)
    bodies: dict[int, bytes] = attrs.field(factory=dict)
    statuses: dict[int, bytes] = attrs.field(factory=dict)
    ended: set[int] = attrs.field(factory=set)
    resets: dict[int, int] = attrs.field(factory=dict)

    async def begin(self, method: str, path: str, *, end: bool = True) -> int:
        number: int = self.parser.get_next_available_stream_id()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "t")]
        self.parser.send_headers(number, head, end_stream=end)
        await self.flush()
        return number

    async def flush(self) -> None:
        await self.stream.send_all(self.parser.data_to_send())

    async def send_data(self, number: int, data: bytes, *, end: bool = False) -> None:
        self.parser.send_data(number, data, end_stream=end)
        await self.flush()

    async def read_until_ended(self, number: int) -> bytes:
        with trio.fail_after(PATIENCE):
            while number not in self.ended:
                data = await self.stream.receive_some()
                assert data, "the server closed the connection"
                self.take(self.parser.receive_data(data))
                await self.flush()
        return self.bodies.get(number, b"")

    def take(self, events: list[h2.events.Event], *, credit: bool = True) -> None:
        for event in events:
            if isinstance(event, h2.events.ResponseReceived):
                assert event.stream_id is not None
                self.statuses[event.stream_id] = dict(event.headers or [])[b":status"]
            elif isinstance(event, h2.events.DataReceived):
                assert event.stream_id is not None
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + (
                    event.data or b""
                )
                if credit:
                    self.parser.acknowledge_received_data(
                        event.flow_controlled_length or 0, event.stream_id
                    )
            elif isinstance(event, h2.events.StreamEnded):
                assert event.stream_id is not None
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                assert event.stream_id is not None
                self.resets[event.stream_id] = int(event.error_code or 0)


async def http2(stream: trio.SocketStream) -> Http2Client:
    config = h2.config.H2Configuration(header_encoding=None)
    client = Http2Client(stream, h2.connection.H2Connection(config))
    client.parser.initiate_connection()
    await client.flush()
    return client


async def test_http2_with_prior_knowledge_many_streams_at_once() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        echo = await client.begin("POST", "/echo", end=False)
        streamed = await client.begin("GET", "/stream")
        await finish_stream(server, b"x" * 100_000)  # more than one window
        await client.send_data(echo, b"echo", end=True)
        assert await client.read_until_ended(echo) == b"echo"
        assert await client.read_until_ended(streamed) == b"x" * 100_000


async def test_an_upgrade_to_http2_is_left_alone() -> None:
    """RFC 9113 has made it obsolete; only who begins with HTTP/2 speaks it without TLS."""
    async with running(App(), LIMITS) as server, client_of(server) as client:
        await client.stream.send_all(
            b"GET / HTTP/1.1\r\nhost: t\r\nconnection: upgrade, http2-settings\r\n"
            b"upgrade: h2c\r\nhttp2-settings: AAQAAAAA\r\n\r\n"
        )
        assert b"200" in await client.stream.receive_some()
        await client.stream.send_all(PREFACE)
        assert (await read_to_end(client.stream))[0] == b""


async def test_a_reset_stream_is_noticed_and_spares_the_others() -> None:
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        waiting = await client.begin("POST", "/wait")
        streaming = await client.begin("POST", "/stream")
        await server.wait_until(lambda: len(app.streams) == 1)
        other = await client.begin("POST", "/stream")
        await server.wait_until(lambda: app.gate.count == 3)
        client.parser.reset_stream(waiting)
        client.parser.reset_stream(streaming)
        await client.flush()
        await server.wait_until(lambda: app.gate.count == 1)
        assert app.left == ["client_left"]
        assert app.outcomes == [SinkOutcome.GONE]
        await finish_stream(server)
        assert await client.read_until_ended(other) == b"data"


async def test_a_stalled_http2_window_ends_its_stream_at_the_write_limit_and_no_other() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, write_time=0.3)
    async with running(app, limits) as server, await server.connect() as stream:
        client = await http2(stream)
        client.parser.increment_flow_control_window(1_000_000)  # of the connection
        stalled = await client.begin("POST", "/stream")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        app.streams[0].feed(b"x" * 300_000)  # and its own window is never opened
        other = await client.begin("POST", "/stream")
        await server.wait_until(lambda: len(app.streams) == 2 and app.streams[1].started)
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.GONE])
        with trio.fail_after(PATIENCE):
            while not client.resets:
                client.take(client.parser.receive_data(await stream.receive_some()), credit=False)
        assert client.resets == {stalled: h2.errors.ErrorCodes.INTERNAL_ERROR}
        await finish_stream(server)
        assert await client.read_until_ended(other) == b"data"
        assert await client.read_until_ended(await client.begin("GET", "/")) == b'"hello"'
        assert server.server.reset == 0


async def test_a_stream_that_is_reset_leaves_nothing_in_the_engine() -> None:
    exchanges: list[Exchange] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchanges.append(exchange)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": True})
        exchange.abort("a test")
        await send({"type": "http.response.body", "body": b"late", "more_body": True})

    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        for _ in range(5):
            number = await client.begin("GET", "/")
            with trio.fail_after(PATIENCE):
                while number not in client.resets:
                    client.take(client.parser.receive_data(await stream.receive_some()))
        await server.wait_until(lambda: server.server.statistics().busy == 0)
        engine = cast("Any", exchanges[0]._send).__self__.send.__self__
        await server.wait_until(lambda: not engine.stream_buffers)
        assert not engine.streams
        assert [exchange.lost for exchange in exchanges] == [True] * 5


async def test_a_stalled_http2_window_does_not_outlive_the_server() -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            client = await http2(stream)
            await client.begin("POST", "/stream")
            await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
            app.streams[0].feed(b"x" * 300_000)
            await trio.sleep(0.05)
            server.nursery.cancel_scope.cancel()
    assert app.gate.count == 0


async def test_an_http2_response_that_breaks_off_does_not_hang_its_client() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        number = await client.begin("GET", "/raise-late")
        with trio.fail_after(PATIENCE):
            while number not in client.resets:
                client.take(client.parser.receive_data(await stream.receive_some()))
        assert await client.read_until_ended(await client.begin("GET", "/")) == b'"hello"'


def test_data_frames_are_found_among_others() -> None:
    sender = h2.connection.H2Connection()
    sender.initiate_connection()
    sender.data_to_send()  # the preface is no frame
    head = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "t")]
    sender.send_headers(1, head)
    sender.send_data(1, b"x" * 16_384)
    sender.ping(b"12345678")
    sender.send_data(1, b"", end_stream=True)
    sender.send_headers(3, head)
    sender.send_data(3, b"abc")
    assert list(data_frames(sender.data_to_send())) == [(1, 16_384), (1, 0), (3, 3)]


# --- clients that hold hypercorn for ever --------------------------------------------------


async def unfinished_upload(stream: trio.SocketStream) -> None:
    """Its end never comes."""
    client = await http2(stream)
    number = await client.begin("POST", "/echo", end=False)
    for _ in range(30):
        await client.send_data(number, b"")


async def shut_window(stream: trio.SocketStream, path: str = "/") -> None:
    client = await http2(stream)
    client.parser.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    await client.begin("GET", path)


async def shut_window_of_a_stream(stream: trio.SocketStream) -> None:
    await shut_window(stream, "/stream")


HOLDERS = [
    unfinished_upload,
    shut_window,
    shut_window_of_a_stream,
]
Holder = Callable[[trio.SocketStream], Awaitable[None]]


async def hold(server: Running, holder: Holder, stream: trio.SocketStream) -> None:
    await holder(stream)
    await server.wait_until(lambda: server.server.statistics().busy == 1)
    if holder is shut_window_of_a_stream:
        await finish_stream(server)
    await trio.sleep(0.1)  # until hypercorn waits
    assert server.server.statistics().busy == 1


@pytest.mark.parametrize("holder", HOLDERS)
async def test_nobody_outlives_the_server(holder: Holder) -> None:
    async with AsyncExitStack() as clients:
        with trio.fail_after(3):
            async with running(App(), LIMITS) as server:
                stream = await clients.enter_async_context(await server.connect())
                await hold(server, holder, stream)


@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_client_that_has_gone_holds_no_descriptor(holder: Holder) -> None:
    async with running(App(), LIMITS) as server:
        async with await server.connect() as stream:
            await hold(server, holder, stream)
        with trio.fail_after(3):
            await server.wait_until(lambda: not server.server.connections)
        assert server.server.failed == 0


@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_client_that_goes_with_the_server_holds_neither(holder: Holder) -> None:
    with trio.fail_after(3):
        async with running(App(), LIMITS) as server, await server.connect() as stream:
            await hold(server, holder, stream)
