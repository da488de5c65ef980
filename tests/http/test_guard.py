"""What one client can hold of the server, and for how long. Virtual time, memory streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h2.connection
import pytest
import trio
import trio.testing

from dynamo_trio.errors import ClientTooSlow
from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, send_json, stream_response, watch_disconnect
from dynamo_trio.http.sinks import open_sink
from dynamo_trio.lifecycle.admission import Gate
from tests.http.harness import Http1Client, in_memory, read_to_end

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send

LIMITS = HttpLimits(
    head_time=10, body_time=60, idle_time=75, write_time=30, linger_time=1, read_ahead=1000
)
GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(scope, send, 200, b'"hello"')


class Waiting:
    """An app that waits until its client leaves, and notes when that was."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.left_at: list[float] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        left = trio.Event()
        async with watch_disconnect(scope, receive, left.set):
            self.begun.set()
            await left.wait()
        self.left_at.append(trio.current_time())


async def test_a_head_must_be_complete_in_time(autojump_clock: MockClock) -> None:
    async with in_memory(hello, LIMITS) as memory:
        client = memory.connect()
        await trio.sleep(50)  # idle for long: that is another limit
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, client, GET[:-2] + b"a: " + b"x" * 1000)
            assert await client.receive_some() == b""
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began == pytest.approx(10, abs=1)


async def trickle(client: trio.abc.SendStream, data: bytes) -> None:
    for at in range(len(data)):
        try:
            await client.send_all(data[at : at + 1])
        except trio.BrokenResourceError:
            return
        await trio.sleep(1)


async def test_a_head_that_trickles_in_just_in_time_is_answered(autojump_clock: MockClock) -> None:
    async with in_memory(hello, LIMITS) as memory:
        client = Http1Client(memory.connect())
        for _ in range(3):  # the clock starts anew for each request
            await client.stream.send_all(GET[:9])
            await trio.sleep(9)
            await client.stream.send_all(GET[9:])
            assert b'"hello"' in await client.stream.receive_some(4096) + (
                await client.stream.receive_some(4096)
            )


async def test_a_head_read_ahead_of_a_response_has_its_time_from_the_responses_end(
    autojump_clock: MockClock,
) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        await trio.sleep(100)
        await send_json(scope, send, 200, b"1")

    async with in_memory(slow, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await trio.sleep(1)
        await client.send_all(GET[:10])
        data, _ = await read_to_end_at_leisure(client)
        assert data.count(b"200") == 1
        assert trio.current_time() == pytest.approx(100 + LIMITS.head_time, abs=1)


async def read_to_end_at_leisure(stream: trio.abc.ReceiveStream) -> tuple[bytes, bool]:
    data = bytearray()
    try:
        while part := await stream.receive_some():
            data += part
    except trio.BrokenResourceError:
        return bytes(data), True
    return bytes(data), False


async def test_a_silent_connection_is_closed_after_its_idle_time(
    autojump_clock: MockClock,
) -> None:
    async with in_memory(hello, LIMITS) as memory:
        assert await memory.connect().receive_some() == b""
        assert trio.current_time() == pytest.approx(LIMITS.idle_time, abs=1)
        assert not memory.ends[0].was_reset


async def test_a_client_that_takes_nothing_is_reset_at_the_write_limit(
    autojump_clock: MockClock,
) -> None:
    ended = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        assert not await send_json(scope, send, 200, b"x" * 100_000)
        ended.set()

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await ended.wait()
        assert trio.current_time() == pytest.approx(LIMITS.write_time, abs=1)
        assert memory.ends[0].was_reset
        await trio.sleep(1)
        assert not memory.server.connections


async def test_a_slow_client_that_goes_on_reading_is_served_to_the_end(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await send_json(scope, send, 200, b"x" * 100_000)

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        body = b""
        while len(body) < 100_000:
            await trio.sleep(5)
            body += await client.receive_some(4096)
        assert trio.current_time() > 2 * LIMITS.write_time


async def test_a_stuck_client_does_not_outlive_the_server(autojump_clock: MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await trio.sleep(1)
    assert trio.current_time() == 1  # hypercorn's shield did not hold it
    assert memory.ends[0].was_reset


@pytest.mark.parametrize("ahead", [b"", b"x", GET, GET * 2 + b"GET"])
async def test_a_client_that_leaves_is_noticed_at_once_whatever_it_sent_before(
    ahead: bytes, autojump_clock: MockClock
) -> None:
    app = Waiting()
    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET + ahead)  # in one segment: hypercorn parks behind it
        await app.begun.wait()
        await trio.sleep(3)
        await client.send_eof()
        await trio.sleep(1)
        assert app.left_at == [3]
        assert not memory.server.connections


async def test_a_byte_that_comes_while_the_response_runs_hides_no_fin(
    autojump_clock: MockClock,
) -> None:
    app = Waiting()
    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await app.begun.wait()
        await client.send_all(b"\r")
        await trio.sleep(3)
        await client.aclose()
        await trio.sleep(1)
        assert app.left_at == [3]


async def test_a_client_that_left_before_the_response_began_is_noticed(
    autojump_clock: MockClock,
) -> None:
    calls: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(5)
        async with watch_disconnect(scope, receive, lambda: calls.append("left")):
            await trio.sleep(5)

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await client.aclose()
        await trio.sleep(6)
        assert calls == ["left"]


async def test_a_client_that_sends_too_far_ahead_is_reset(autojump_clock: MockClock) -> None:
    app = Waiting()
    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        await app.begun.wait()
        await client.send_all(b"x" * LIMITS.read_ahead)
        assert not app.left_at
        await client.send_all(b"x")
        await trio.sleep(1)
        assert app.left_at == [0]
        assert memory.ends[0].was_reset


async def test_a_client_that_sent_too_far_ahead_before_the_response_began_is_reset(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(1)
        await read_body(scope, receive, LIMITS)

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET + b"x")  # hypercorn parks behind the x
        await client.send_all(b"x" * 2 * LIMITS.read_ahead)
        await trio.sleep(2)
        assert memory.ends[0].was_reset
        assert memory.server.statistics().reset == 1


async def test_pipelined_requests_are_answered_in_order(autojump_clock: MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        await trio.sleep(1)
        await send_json(scope, send, 200, scope["path"].encode())

    async with in_memory(app, LIMITS) as memory:
        stream = memory.connect()
        requests = [b"GET /%d HTTP/1.1\r\nhost: t\r\n\r\n" % number for number in range(4)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, b"".join(requests[:3]))
            answers = b""
            while b"/2" not in answers:
                answers += await stream.receive_some()
        await stream.send_all(requests[3])
        while b"/3" not in answers:
            answers += await stream.receive_some()
        assert answers.count(b"HTTP/1.1 200") == 4
        assert trio.current_time() == 4


async def test_a_body_must_be_complete_in_time(autojump_clock: MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_body(scope, receive, LIMITS)
        except ClientTooSlow as exc:
            await send_json(scope, send, exc.status, exc.message.encode(), close=True)

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, client, b"x" * 99)
            answer, was_reset = await read_to_end_at_leisure(client)
            nursery.cancel_scope.cancel()
        assert b"408" in answer
        assert not was_reset
        assert trio.current_time() == pytest.approx(LIMITS.body_time + LIMITS.linger_time, abs=2)


async def test_http2_pings_of_an_idle_connection_are_no_half_sent_head(
    autojump_clock: MockClock,
) -> None:
    h2c = h2.connection.H2Connection()
    h2c.initiate_connection()
    async with in_memory(hello, LIMITS) as memory:
        client = memory.connect()

        async def listen() -> None:
            while data := await client.receive_some():
                h2c.receive_data(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            for _ in range(7):
                await client.send_all(h2c.data_to_send())
                await trio.sleep(10)
                h2c.ping(b"12345678")
            assert memory.server.connections
        # listen() ended by itself: the idle time still holds for it.
        assert trio.current_time() == pytest.approx(LIMITS.idle_time, abs=1)


async def test_closing_and_aborting_twice_is_harmless(autojump_clock: MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchange.abort("first")
        exchange.abort("second")
        exchange.connection.close()
        await exchange.connection.guard.send_eof()
        await exchange.connection.guard.aclose()
        assert exchange.connection.guard.why_lost == "first"
        assert exchange.raw_socket() is None

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET)
        assert await client.receive_some() == b""
        await trio.sleep(1)
        assert not memory.server.connections
        assert memory.server.failed == 0


async def test_reading_ends_with_the_connection(autojump_clock: MockClock) -> None:
    data, was_reset = b"", True
    async with in_memory(hello, LIMITS) as memory:
        client = memory.connect()
        await client.send_all(GET.replace(b"host", b"connection: close\r\nhost"))
        data, was_reset = await read_to_end(client)
    assert data.endswith(b'"hello"')
    assert not was_reset


# --- the end of a request, and a client that takes nothing ---------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_does_not_outlive_its_requests_deadline(
    streamed: bool, autojump_clock: MockClock
) -> None:
    """By more than a farewell, though a client may take nothing for far longer."""
    gate, over = Gate("http"), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        with gate.admit("a test") as admission:
            admission.end_at(trio.current_time() + 10)
            if not streamed:
                await send_json(scope, send, 200, b"x" * 100_000, admission=admission)
            else:
                sink = open_sink(scope, send)

                async def work() -> None:
                    await sink.start(200, [])
                    sink.feed(b"x" * 100_000)
                    await sink.serve()

                await stream_response(sink, admission, work, farewell=lambda: b"bye")
            over.append(trio.current_time())

    async with in_memory(app, LIMITS) as memory:
        client = memory.connect()
        began = trio.current_time()
        await client.send_all(GET)
        await trio.sleep(100)
        assert over == [pytest.approx(began + 10 + LIMITS.farewell_time, abs=0.1)]
        assert memory.ends[0].was_reset
