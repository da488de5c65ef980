"""WebSockets pass through our server as hypercorn speaks them; one of them hurts nobody else."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
import trio_websocket

from dynamo_trio.http.exchange import exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.websocket import FrameRoom, watched, weight
from tests.http.harness import PATIENCE, in_memory, running

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.http.websocket import WebSocketWatch

LIMITS = HttpLimits(idle_time=0.3, head_time=0.2, write_time=5)


@attrs.define(eq=False)
class Echo:
    """Sends back each text; ``bye`` closes."""

    left: list[int] = attrs.field(factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            if message["text"] == "bye":
                await send({"type": "websocket.close", "code": 1012, "reason": "bye"})
            else:
                await send({"type": "websocket.send", "text": message["text"]})
        self.left.append(message["code"])


async def test_a_websocket_is_no_idle_connection_however_quiet_it_is() -> None:
    app = Echo()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            client = await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            with trio.fail_after(PATIENCE):
                for pause in (0, 0.5, 0):
                    await trio.sleep(pause)
                    await client.send_message("x" * 100_000)
                    assert await client.get_message() == "x" * 100_000
                assert await server.server.close_idle() == 0
                await client.send_message("bye")
                with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                    await client.get_message()
            assert closed.value.reason is not None
            assert closed.value.reason.code == 1012
        await server.wait_until(lambda: not server.server.connections)
    assert app.left == [1000]


async def test_a_websocket_client_that_vanishes_is_noticed() -> None:
    app = Echo()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            await server.wait_until(lambda: server.server.statistics().busy == 1)
        await server.wait_until(lambda: app.left == [1006])
        await server.wait_until(lambda: not server.server.connections)


async def test_a_websocket_does_not_outlive_the_server() -> None:
    app = Echo()
    async with AsyncExitStack() as clients:
        async with running(app, LIMITS) as server:
            stream = await clients.enter_async_context(await server.connect())
            client = await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            await client.send_message("x")
            assert await client.get_message() == "x"
    assert not server.server.connections


# --- what a client may hold, and for how long ------------------------------------------------

UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(payload: bytes, opcode: int = 1, *, whole: bool = True) -> bytes:
    """A masked frame; the mask is zero."""
    size = len(payload)
    long = b"" if size < 126 else size.to_bytes(2, "big")
    head = bytes([(0x80 if whole else 0) | opcode, 0xFE if long else 0x80 | size])
    return head + long + bytes(4) + payload


@attrs.define(eq=False)
class Watched:
    """Takes every message, unless it is deaf; remembers how each client has left."""

    room: FrameRoom = attrs.field(factory=FrameRoom)
    deaf: bool = False
    codes: list[int | None] = attrs.field(factory=list)
    taken: list[int] = attrs.field(factory=list)
    #: What a crowd of newcomers asks for.
    farewell: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with watched(scope, self.room) as watch:
            assert watch is not None
            await receive()
            await send({"type": "websocket.accept"})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.keep_asking)
                if self.farewell:
                    self._offer(scope, nursery)
                await self._read(receive, watch)
                nursery.cancel_scope.cancel()
            self.codes.append(watch.code)

    def _offer(self, scope: Scope, nursery: trio.Nursery) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchange.idle_since, exchange.on_crowd = trio.current_time(), nursery.cancel_scope.cancel

    async def _read(self, receive: Receive, watch: WebSocketWatch) -> None:
        if self.deaf:
            await trio.sleep_forever()
        while (message := await receive())["type"] == "websocket.receive":
            text = message["text"]
            watch.message_taken(weight(text))
            self.taken.append(len(text))


async def upgraded(stream: trio.abc.Stream) -> None:
    await stream.send_all(UPGRADE)
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 Switching Protocols\r\n")


async def test_a_session_that_works_is_not_taken_for_an_upload(
    autojump_clock: MockClock,
) -> None:
    app = Watched()
    async with in_memory(app, HttpLimits(max_connections=1)) as server:
        await upgraded(server.connect())
        await trio.sleep(20)
        assert not server.server._evict()
        assert server.server.statistics().busy == 1


async def test_an_idle_session_makes_room_in_good_order(autojump_clock: MockClock) -> None:
    app = Watched(farewell=True)
    async with in_memory(app, HttpLimits(quiet_time=5)) as server:
        one, other = server.connect(), server.connect()
        await upgraded(one)
        await trio.sleep(1)
        await upgraded(other)
        assert not server.server._evict()
        await trio.sleep(4)
        assert not server.server._evict()  # it says farewell first
        assert not server.server._evict()
        assert (await one.receive_some())[:1] == b"\x88"
        await trio.testing.wait_all_tasks_blocked()
        assert server.server.statistics().busy == 1


async def test_a_client_that_answers_no_ping_is_gone(autojump_clock: MockClock) -> None:
    app = Watched()
    limits = HttpLimits(ping_time=30, write_time=10)
    async with in_memory(app, limits) as server:
        stream = server.connect()
        await upgraded(stream)
        began = trio.current_time()
        for _ in range(3):
            assert await stream.receive_some() == b"\x89\x00"
            await stream.send_all(frame(b"", 10))
        assert trio.current_time() == pytest.approx(began + 90)
        assert await stream.receive_some() == b"\x89\x00"
        assert await stream.receive_some() == b""
        assert trio.current_time() == pytest.approx(began + 130)
        await trio.testing.wait_all_tasks_blocked()
        assert app.codes == [None]


async def test_who_is_not_listened_to_need_not_answer(autojump_clock: MockClock) -> None:
    app = Watched(deaf=True)
    async with in_memory(app, HttpLimits(ping_time=30, write_time=10)) as server:
        stream = server.connect()
        await upgraded(stream)
        await stream.send_all(frame(b"x" * 200))
        await trio.sleep(1000)
        assert server.server.statistics().busy == 1


async def test_half_messages_of_all_clients_are_bounded_together(
    autojump_clock: MockClock,
) -> None:
    app = Watched(FrameRoom(most=50_000, free=10_000))
    async with in_memory(app) as server:
        one, other = server.connect(), server.connect()
        await upgraded(one)
        await upgraded(other)
        await one.send_all(frame(b"x" * 55_000, whole=False))
        await trio.testing.wait_all_tasks_blocked()
        assert app.room.taken == 45_000
        await other.send_all(frame(b"y" * 9_000))  # so much is free
        await trio.testing.wait_all_tasks_blocked()
        assert app.taken == [9_000]
        await other.send_all(frame(b"y" * 60_000))
        assert (await other.receive_some())[:4] == b"\x88\x02" + (1009).to_bytes(2, "big")
        await one.send_all(frame(b"x" * 1000, 0))
        await trio.testing.wait_all_tasks_blocked()
        assert (app.taken, app.room.taken) == ([9_000, 56_000], 0)
        await one.send_all(frame(b"x" * 55_000, whole=False))
        await one.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert app.room.taken == 0


@pytest.mark.parametrize(
    ("sent", "close"),
    [
        (b"\x81\x02hi", 1002),  # not masked
        (frame(b"\xff\xff"), 1007),
        (frame(b"x", 3), 1002),
        (frame(b"\x03\xe9", 8), 1001),
    ],
)
async def test_how_it_ends_is_said_and_heard(
    sent: bytes, close: int, autojump_clock: MockClock
) -> None:
    app = Watched()
    async with in_memory(app) as server:
        stream = server.connect()
        await upgraded(stream)
        await stream.send_all(sent)
        answer = await stream.receive_some()
        assert (answer[0], int.from_bytes(answer[2:4], "big")) == (0x88, close)
        await trio.testing.wait_all_tasks_blocked()
        assert app.codes == [close if sent[0] == 0x88 else None]


async def test_the_kernel_asks_a_client_that_says_nothing() -> None:
    async with running(Echo()) as server:
        async with await server.connect():
            await server.wait_until(lambda: bool(server.server.connections))
            [connection] = server.server.connections
            sock = connection.guard.socket
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
