"""Clients that read, but slowly: they are kept as long as they take anything at all."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

import attrs
import h2.config
import h2.connection
import h2.settings
import pytest
import trio
import trio.lowlevel

from dynamo_trio.http.exchange import exchange_of
from dynamo_trio.http.guard import TAKES_NOTHING
from dynamo_trio.http.patience import Patience, PatientStream, kept_for
from dynamo_trio.http.respond import send_json
from dynamo_trio.http.sinks import SinkOutcome
from tests.http.harness import PATIENCE, Http1Client, in_memory, running
from tests.http.routes import LIMITS, App
from tests.http.test_http2 import Http2Client
from tests.http.test_https import Ends, shake_hands
from tests.http.test_https import ends as ends

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send
    from tests.http.harness import Running

#: In that time the client reads enough for its window to be opened three times, but not enough
#: for the socket to become writable, which takes a third of its buffer.
WRITE_TIME = 2.5
SIP, EVERY, SIPS = 1000, WRITE_TIME / 25, 60
SEND_BUFFER = 400_000
SLOW = attrs.evolve(LIMITS, write_time=WRITE_TIME)


async def sip(stream: trio.abc.ReceiveStream) -> None:
    """Read slowly, for twice as long as a client may take nothing."""
    for _ in range(SIPS):
        assert await stream.receive_some(SIP)
        await trio.sleep(EVERY)


def fill_buffers(sock: trio.socket.SocketType) -> None:
    """Let the kernel take all that its buffer holds; Trio makes it stop far earlier."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 2**31 - 1)


async def start_stream(server: Running, stream: Any) -> None:
    await Http1Client(stream).send("POST", "/stream", b"{}")
    app = server.server.app
    assert isinstance(app, App)
    await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
    for connection in server.server.connections:
        fill_buffers(connection.guard.socket)
    app.streams[0].feed(b"x" * 1_000_000)


async def test_slow_readers_are_kept_and_those_that_stop_are_not(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with trio.open_nursery() as nursery:  # together, for each takes its time
        nursery.start_soon(read_a_stream, None)
        nursery.start_soon(read_a_stream, ends)
        nursery.start_soon(read_a_whole_answer)
    resets = [text for text in caplog.messages if "was reset: " in text]
    assert len(resets) == 3
    assert any(TAKES_NOTHING in text for text in resets)


async def read_a_stream(ends: Ends | None) -> None:
    app, tls = App(), None if ends is None else ends.server
    async with running(app, SLOW, send_buffer=SEND_BUFFER, tls=tls) as server:
        async with await server.connect(receive_buffer=4608) as stream:
            await start_stream(server, stream if ends is None else await shake_hands(stream, ends))
            await sip(stream)
            assert app.outcomes == []
            assert server.server.reset == 0
            await server.wait_until(lambda: server.server.reset == 1)
            await server.wait_until(lambda: app.outcomes == [SinkOutcome.GONE])


async def read_a_whole_answer() -> None:
    results: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        fill_buffers(exchange.connection.guard.socket)
        results.append(await send_json(scope, send, 200, b"x" * 2_000_000))

    async with running(app, SLOW, send_buffer=SEND_BUFFER) as server:
        async with await server.connect(receive_buffer=4608) as stream:
            await Http1Client(stream).send("GET", "/")
            await sip(stream)
            assert results == []
            await server.wait_until(lambda: results == [False])
            await server.wait_until(lambda: not server.server.connections)


async def test_a_window_that_is_opened_by_sips_is_progress_and_a_shut_one_is_not(
    autojump_clock: MockClock,
) -> None:
    """Of two streams on one HTTP/2 connection; each is judged by itself."""
    app = App()
    limits = attrs.evolve(LIMITS, write_time=30)
    async with in_memory(app, limits) as memory:
        client = Http2Client(memory.connect(), small_windows())  # type: ignore[arg-type]  # a stream like any other
        client.parser.initiate_connection()
        memory.nursery.start_soon(read_for, client)
        for _ in range(2):
            number = await client.begin("POST", "/stream", end=False)
            await client.send_data(number, b"{}", end=True)
            await trio.sleep(1)
        slow, shut = app.streams
        for sink in app.streams:
            sink.feed(b"x" * 200_000)
        for _ in range(20):
            await trio.sleep(20)
            client.parser.increment_flow_control_window(50, stream_id=1)
            await client.flush()
        assert slow.outcome is None
        assert shut.outcome is SinkOutcome.GONE
        await trio.sleep(31)
        assert slow.outcome is SinkOutcome.GONE


def small_windows() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(header_encoding=None)
    client = h2.connection.H2Connection(config)
    client.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100}
    )
    return client


async def read_for(client: Http2Client) -> None:
    while data := await client.stream.receive_some(4096):
        client.parser.receive_data(bytes(data))  # and gives no credit


# --- what the kernel says ------------------------------------------------------------------


async def test_what_is_kept_falls_as_the_other_end_reads() -> None:
    ours, theirs = await loopback()
    with ours.socket, theirs.socket:
        await ours.send_all(b"x")
        await theirs.receive_some(1)
        assert kept_for(ours.socket) == 0
        await fill(ours)
        kept = kept_for(ours.socket)
        assert kept
        await theirs.receive_some(1_000_000)
        while (kept_for(ours.socket) or 0) >= kept:
            await trio.lowlevel.checkpoint()
    assert kept_for(ours.socket) is None


async def test_patience_looks_now_and_then_and_ends_when_nothing_was_taken(
    autojump_clock: MockClock,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        patience, looks = Patience(trio.socket.from_stdlib_socket(ours), 30.0), []
        while not patience.is_over:
            assert not patience.look()
            await trio.sleep_until(patience.next_look)
            looks.append(trio.current_time())
        assert looks == [7.5, 15, 22.5, 30]
        patience.sent()
        assert not patience.is_over


async def loopback() -> tuple[trio.SocketStream, trio.SocketStream]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        ours = await trio.open_tcp_stream(*listener.socket.getsockname()[:2])
        return ours, await listener.accept()


async def fill(stream: trio.SocketStream) -> None:
    with trio.move_on_after(0.05):
        while True:
            await stream.send_all(bytes(100_000))


async def test_a_patient_stream_says_in_trios_words_that_nobody_is_there() -> None:
    ours, theirs = await loopback()
    patient = PatientStream(ours, 10.0)
    with trio.fail_after(PATIENCE):
        theirs.socket.close()
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever(patient)
        ours.socket.close()
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await patient.send_all(b"x")


async def send_for_ever(stream: PatientStream) -> None:
    while True:
        await stream.send_all(bytes(1_000_000))
