"""A client's requests on their way to a worker, and their acknowledgements."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    Draining,
    DynamoException,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.plane.abc import RequestHead
from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.plane.tcp.pipeline import CROWDED, Pipeline
from dynamo_trio.plane.tcp.pool import RequestPool
from dynamo_trio.wire.dynamo.ack import ACCEPTED, Ack
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from tests.plane.fake_worker import (
    LOOPBACK,
    PATH,
    PATIENCE,
    Asked,
    Bench,
    Collector,
    RequestEnd,
    open_bench,
    reset,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = HostPort("worker", 1)
BUSY = Ack("Server overloaded: full")


# --- over sockets ----------------------------------------------------------------------------


async def test_a_request_has_the_form_of_dynamos() -> None:
    async with open_bench() as bench:
        asked = Asked(bench, Collector(JSON), RequestHead("id-7", {"a": "b"}, JSON), b'{"q":1}')
        bench.nursery.start_soon(asked.run)
        request = await bench.next_request()
        assert request.frame.path == PATH
        headers = dict(request.frame.headers)
        assert headers.pop("x-frontend-send-ts-ns").isdigit()
        assert headers == {"request-id": "id-7", "x-endpoint-path": PATH}
        control = request.control
        assert (control.id, control.request_type, control.response_type) == (
            "id-7",
            "single_in",
            "many_out",
        )
        assert (control.payload_codec, control.metadata) == ("json", {"a": "b"})
        info = json.loads(control.connection_info.info)
        assert info.keys() == {"address", "subject", "context", "stream_type"}
        assert (info["context"], info["stream_type"]) == ("id-7", "response")
        assert info["address"].startswith("127.0.0.1:")
        assert request.body == b'{"q":1}'


async def test_requests_are_pipelined_on_one_connection() -> None:
    async with open_bench() as bench:
        asked = [bench.ask() for _ in range(40)]
        connection = await bench.next_connection()
        requests = [await connection.next_request() for _ in range(40)]
        assert len({request.subject for request in requests}) == 40
        assert not any(one.opened.is_set() for one in asked)
        await connection.acknowledge(*[ACCEPTED] * 40)
        for one in asked:
            await one.open()


async def test_an_acknowledgement_belongs_to_its_request_though_another_was_cancelled() -> None:
    async with open_bench() as bench:
        first = bench.ask()
        connection = await bench.next_connection()
        await connection.next_request()
        second = bench.ask()
        await connection.next_request()
        third = bench.ask()
        await connection.next_request()
        await second.leave()
        await connection.acknowledge(ACCEPTED, BUSY, ACCEPTED)
        await first.open()
        await third.open()
        assert second.error is None
        assert not second.opened.is_set()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Server overloaded: full", Overloaded),
        ("Server overloaded: draining", Draining),
        ("Server unavailable: broken", NoWorker),
        ("Unknown endpoint: 1f/generate", CannotConnect),
        ("Server overloaded: Unknown endpoint: 1f/generate", CannotConnect),
        ("Read error: message too large: 9 bytes (max: 8 bytes)", PayloadTooLarge),
        ("something new", CannotConnect),
    ],
)
async def test_a_refusal_is_the_error_that_it_means(
    text: str, error: type[DynamoException]
) -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge(Ack(text))
        assert type(await asked.failure()) is error
        assert not asked.opened.is_set()
        assert len(bench.plane.client.streams) == 0
        again = bench.ask()  # on the same connection
        request = await bench.next_request()
        await request.connection.acknowledge()
        await again.open()


@pytest.mark.parametrize("close", [trio.aclose_forcefully, reset], ids=["fin", "reset"])
async def test_a_connection_that_is_new_and_closes_is_cannot_connect(
    close: Callable[[trio.abc.Stream], object],
) -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        close_now(request.connection, close)
        assert type(await asked.failure()) is CannotConnect


def close_now(connection: RequestEnd, close: Callable[[trio.abc.Stream], object]) -> None:
    stream = connection.stream
    assert isinstance(stream, trio.SocketStream)
    if close is reset:
        reset(stream)
    else:
        stream.socket.close()


async def warmed(bench: Bench) -> RequestEnd:
    """A connection on which one request was acknowledged."""
    asked = bench.ask()
    request = await bench.next_request()
    await request.connection.acknowledge()
    await asked.open()
    await asked.leave()
    return request.connection


@pytest.mark.parametrize("close", [trio.aclose_forcefully, reset], ids=["fin", "reset"])
async def test_a_stale_connection_is_not_an_attempt(
    close: Callable[[trio.abc.Stream], object],
) -> None:
    async with open_bench() as bench:
        connection = await warmed(bench)
        asked = bench.ask()
        first = await connection.next_request()
        close_now(connection, close)
        await bench.next_connection()
        second = await bench.next_request()
        assert second.frame == first.frame
        await second.connection.acknowledge()
        await asked.open()


async def test_a_stale_connection_is_retried_once() -> None:
    async with open_bench() as bench:
        connection = await warmed(bench)
        asked = bench.ask()
        await connection.next_request()
        close_now(connection, trio.aclose_forcefully)
        fresh = await bench.next_connection()
        await fresh.next_request()
        close_now(fresh, trio.aclose_forcefully)
        assert type(await asked.failure()) is CannotConnect


async def test_a_worker_that_has_acknowledged_since_was_there_so_nothing_is_sent_twice() -> None:
    async with open_bench() as bench:
        connection = await warmed(bench)
        first = bench.ask()
        await connection.next_request()
        second = bench.ask()
        await connection.next_request()
        await connection.acknowledge()
        await first.open()
        close_now(connection, trio.aclose_forcefully)
        assert type(await second.failure()) is CannotConnect


async def test_an_idle_connection_that_the_worker_closes_costs_nothing() -> None:
    async with open_bench() as bench:
        connection = await warmed(bench)
        await connection.stream.aclose()
        await trio.sleep(0.05)
        asked = bench.ask()
        await bench.next_connection()
        request = await bench.next_request()
        await request.connection.acknowledge()
        await asked.open()


async def test_nobody_there_is_cannot_connect() -> None:
    async with open_bench() as bench:
        bench.listener.socket.close()
        with pytest.raises(CannotConnect, match="cannot be reached"):
            async with bench.plane.open_stream(
                "127.0.0.1:1/1f/generate", RequestHead("1"), b"", Collector()
            ):
                raise AssertionError("a stream to nobody must not open")


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "nowhere/1f/generate", "h:0/x"])
async def test_an_address_that_is_none_is_cannot_connect(address: str) -> None:
    async with open_bench() as bench:
        with pytest.raises(CannotConnect, match="no usable address"):
            async with bench.plane.open_stream(address, RequestHead("1"), b"", Collector()):
                raise AssertionError("a stream to nowhere must not open")
        bench.plane.instance_gone(address)


async def test_a_plane_that_is_closed_opens_nothing() -> None:
    async with open_bench() as bench:
        plane = bench.plane
    with pytest.raises(CannotConnect, match="closed"):
        async with plane.open_stream("127.0.0.1:1/1f/g", RequestHead("1"), b"", Collector()):
            raise AssertionError("a stream of a closed plane must not open")


async def test_a_request_above_the_limit_is_told_so_and_harms_no_other() -> None:
    settings = attrs.evolve(LOOPBACK, max_message=10_000)
    async with open_bench(settings) as bench:
        await warmed(bench)
        large = Asked(bench, Collector(), RequestHead("1"), b"x" * 10_000)
        bench.nursery.start_soon(large.run)
        assert type(await large.failure()) is PayloadTooLarge
        await warmed(bench)


async def test_a_request_above_what_the_wire_takes_is_told_so() -> None:
    async with open_bench() as bench:
        large = Asked(bench, Collector(), RequestHead("1"), bytes(32 * 2**20))
        bench.nursery.start_soon(large.run)
        assert type(await large.failure()) is PayloadTooLarge


async def test_a_refusal_in_the_middle_of_an_upload_is_heard() -> None:
    """As the real worker does: it says why, and closes what is still being sent."""
    text = "Read error: message too large: 9 bytes (max: 8 bytes)"
    async with open_bench() as bench:
        large = Asked(bench, Collector(), RequestHead("1"), bytes(20_000_000))
        bench.nursery.start_soon(large.run)
        connection = await bench.next_connection()
        await connection.stream.receive_some(1000)
        connection.server.outstanding += 1
        await connection.acknowledge(Ack(text))
        assert type(await large.failure()) is PayloadTooLarge


async def test_who_gives_up_in_the_middle_of_an_upload_leaves_no_half_frame() -> None:
    async with open_bench() as bench:
        large = Asked(bench, Collector(), RequestHead("large"), bytes(20_000_000))
        bench.nursery.start_soon(large.run)
        connection = await bench.next_connection()
        connection.server.receive_data(await connection.stream.receive_some(1000))
        await large.leave()
        small = bench.ask()  # the first one is crowded, so this goes elsewhere
        request = await (await bench.next_connection()).next_request()
        await request.connection.acknowledge()
        await small.open()
        assert (await connection.next_request()).control.id == "large"


# --- over memory, in virtual time ------------------------------------------------------------


@attrs.define(eq=False)
class Net:
    """Makes connections in memory; the test has the other ends."""

    ends: list[RequestEnd] = attrs.field(factory=list)
    refuses: bool = False
    #: Unset: connecting takes its time.
    open: trio.Event | None = None

    async def dial(self, address: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self.open is not None:
            await self.open.wait()
        if self.refuses:
            raise ConnectionRefusedError("nobody there")
        client, worker = trio.testing.memory_stream_pair()
        self.ends.append(RequestEnd(worker))
        return client


def frame(size: int = 1, path: str = PATH) -> RequestFrame:
    return RequestFrame(path, bytes(size))


@attrs.define(eq=False)
class Sends:
    """What became of one request."""

    ack: Ack | None = None
    error: DynamoException | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, pool: RequestPool, request: RequestFrame) -> None:
        with self.scope:
            try:
                self.ack = await pool.send(HERE, request)
            except DynamoException as exc:
                self.error = exc


@attrs.define(eq=False)
class Desk:
    """A pool over memory streams."""

    net: Net
    pool: RequestPool
    nursery: trio.Nursery

    def send(self, request: RequestFrame | None = None) -> Sends:
        sends = Sends()
        self.nursery.start_soon(sends.run, self.pool, request or frame())
        return sends


@pytest.fixture
def settings() -> TcpSettings:
    return TcpSettings()


@pytest.fixture
async def desk(nursery: trio.Nursery, settings: TcpSettings) -> Desk:
    net = Net()
    return Desk(net, RequestPool(settings, net.dial, nursery), nursery)


async def test_a_request_that_is_not_acknowledged_in_time_fails(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    first, began = desk.send(), trio.current_time()
    await trio.sleep(3)
    second = desk.send()
    await trio.sleep(2.5)
    assert isinstance(first.error, ConnectionTimeout)
    # Acknowledgements come in order, so the second's could only come behind.
    assert isinstance(second.error, ConnectionTimeout)
    assert trio.current_time() - began == pytest.approx(5.5)
    (end,) = desk.net.ends
    assert isinstance(await end.next_event(), RequestFrame)
    assert isinstance(await end.next_event(), RequestFrame)
    assert isinstance(await end.next_event(), Closed)  # the connection is of no more use
    third = desk.send()
    await trio.testing.wait_all_tasks_blocked()
    await desk.net.ends[1].next_event()
    await desk.net.ends[1].acknowledge()
    await trio.testing.wait_all_tasks_blocked()
    assert third.ack == ACCEPTED


async def test_each_acknowledgement_gives_the_next_its_own_time(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    sends: list[Sends] = []
    for number in range(4):
        sends.append(desk.send())
        if number > 0:
            await desk.net.ends[0].next_event()
            await desk.net.ends[0].acknowledge()  # the one before
        await trio.sleep(3)
    assert [one.ack for one in sends] == [ACCEPTED] * 3 + [None]
    await trio.sleep(1.9)
    assert sends[-1].error is None
    await trio.sleep(0.2)
    assert isinstance(sends[-1].error, ConnectionTimeout)


async def test_a_large_frame_has_more_time(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    sends = desk.send(frame(10 * 2**20))
    await trio.sleep(14.9)
    assert sends.error is None
    await trio.sleep(0.2)
    assert isinstance(sends.error, ConnectionTimeout)


async def test_an_idle_connection_is_closed(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    sends = desk.send()
    await trio.sleep(1)
    (end,) = desk.net.ends
    await end.next_event()
    await end.acknowledge()
    began = trio.current_time()
    with trio.fail_after(1000):
        while not isinstance(await _patiently(end), Closed):
            pass
    assert sends.ack == ACCEPTED
    assert trio.current_time() - began == pytest.approx(300.0)
    await trio.testing.wait_all_tasks_blocked()
    assert desk.pool._connections == {}


async def _patiently(end: RequestEnd) -> RequestFrame | Closed:
    while (event := end.server.next_event()) is None:
        end.server.receive_data(await end.stream.receive_some(1024))
    return event


async def test_nobody_there_fails_all_who_wait_for_the_connection(desk: Desk) -> None:
    desk.net.refuses = True
    sends = [desk.send() for _ in range(3)]
    await trio.testing.wait_all_tasks_blocked()
    assert {type(one.error) for one in sends} == {CannotConnect}


async def test_who_gives_up_before_the_connection_stands_sends_nothing(desk: Desk) -> None:
    desk.net.open = trio.Event()
    given_up, kept = desk.send(frame(path="1f/given-up")), desk.send(frame(path="1f/kept"))
    await trio.testing.wait_all_tasks_blocked()
    given_up.scope.cancel()
    desk.net.open.set()
    await trio.testing.wait_all_tasks_blocked()
    (end,) = desk.net.ends
    event = await end.next_event()
    assert isinstance(event, RequestFrame)
    assert event.path == "1f/kept"
    await end.acknowledge()
    await trio.testing.wait_all_tasks_blocked()
    assert (given_up.ack, kept.ack) == (None, ACCEPTED)


async def test_what_is_no_acknowledgement_ends_the_connection(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    sends = desk.send()
    await trio.testing.wait_all_tasks_blocked()
    await desk.net.ends[0].stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked()
    assert type(sends.error) is RemoteProtocolError
    assert "the worker at worker:1" in caplog.text


async def test_an_acknowledgement_that_nobody_waits_for_ends_the_connection(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    sends = desk.send()
    await trio.testing.wait_all_tasks_blocked()
    await desk.net.ends[0].stream.send_all(bytes(8))
    await trio.testing.wait_all_tasks_blocked()
    assert sends.ack == ACCEPTED
    assert "acknowledged more requests" in caplog.text
    desk.send()
    await trio.testing.wait_all_tasks_blocked()
    assert len(desk.net.ends) == 2


async def test_a_connection_that_is_being_closed_takes_no_request(nursery: trio.Nursery) -> None:
    client, worker = trio.testing.memory_stream_pair()
    late = Sends()

    class SlowToClose(trio.abc.Stream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await client.send_all(data)

        async def wait_send_all_might_not_block(self) -> None:
            raise NotImplementedError

        async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
            return await client.receive_some(max_bytes)

        async def aclose(self) -> None:
            nursery.start_soon(late.run, pool, frame())
            for _ in range(10):
                await trio.lowlevel.cancel_shielded_checkpoint()

    net = Net()

    async def dial(address: HostPort) -> trio.abc.Stream:
        net.ends.append(RequestEnd(worker))
        return SlowToClose() if len(net.ends) == 1 else await net.dial(address)

    pool = RequestPool(TcpSettings(), dial, nursery)
    nursery.start_soon(Sends().run, pool, frame())
    await trio.testing.wait_all_tasks_blocked()
    await worker.send_all(b"\xff" * 4)  # no acknowledgement: it is closed, and nothing sent again
    await trio.testing.wait_all_tasks_blocked()
    await net.ends[-1].next_event()
    await net.ends[-1].acknowledge()
    await trio.testing.wait_all_tasks_blocked()
    assert (late.ack, late.error) == (ACCEPTED, None)


@pytest.mark.parametrize("settings", [TcpSettings(channel_buffer=2, pool_size=2)])
async def test_a_full_connection_gets_a_sister_until_the_pool_is_full(desk: Desk) -> None:
    sends = [desk.send() for _ in range(5)]
    await trio.testing.wait_all_tasks_blocked()
    assert len(desk.net.ends) == 2
    # Tasks start in any order.
    assert sorted(str(type(one.error).__name__) for one in sends) == ["NoneType"] * 4 + [
        "Overloaded"
    ]
    for end in desk.net.ends:
        await end.next_event()
        await end.next_event()
        await end.acknowledge(ACCEPTED, BUSY)
    await trio.testing.wait_all_tasks_blocked()
    acks = [one.ack for one in sends]
    assert [acks.count(ack) for ack in (ACCEPTED, BUSY, None)] == [2, 2, 1]


async def test_a_large_upload_delays_no_other_request(desk: Desk) -> None:
    desk.send(frame(CROWDED + 1))
    await trio.testing.wait_all_tasks_blocked()
    desk.send()
    await trio.testing.wait_all_tasks_blocked()
    # In memory a write is done at once, so only the queue counts: one connection was enough.
    assert len(desk.net.ends) == 1
    for _ in range(3):
        desk.send(frame(CROWDED // 2 + 1))
    await trio.testing.wait_all_tasks_blocked()
    assert len(desk.net.ends) == 2


async def test_a_question_that_is_asked_alone_leaves_no_connection(desk: Desk) -> None:
    acks: list[Ack] = []

    async def ask() -> None:
        acks.append(await desk.pool.ask_alone(HERE, frame()))

    desk.nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    (end,) = desk.net.ends
    await end.next_event()
    await end.acknowledge(BUSY)
    assert isinstance(await _patiently(end), Closed)
    assert acks == [BUSY]


async def test_a_mistake_of_ours_fails_the_requests_of_one_connection(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    async def dial() -> trio.abc.Stream:
        raise ZeroDivisionError

    pipeline = Pipeline(dial, TcpSettings(), "worker:1")
    nursery.start_soon(pipeline.run)
    with trio.fail_after(PATIENCE), pytest.raises(CannotConnect):
        await pipeline.put(frame()).wait()
    await until(lambda: "a mistake of ours" in caplog.text)
    assert pipeline.closed


async def test_many_requests_at_once_arrive_whole(desk: Desk) -> None:
    """Frames of many sizes, queued while the writer waits, are written one behind the other."""
    paths = [f"1f/{number}" for number in range(200)]
    sends = [desk.send(frame(number * 37, path)) for number, path in enumerate(paths)]
    seen: list[tuple[str, int]] = []
    await trio.testing.wait_all_tasks_blocked()

    async def serve(end: RequestEnd) -> None:
        while isinstance(event := await end.next_event(), RequestFrame):
            seen.append((event.path, len(event.payload)))
            await end.acknowledge()

    for end in desk.net.ends:
        desk.nursery.start_soon(serve, end)
    await trio.testing.wait_all_tasks_blocked()
    assert all(one.ack == ACCEPTED for one in sends)
    assert sorted(seen) == sorted((path, n * 37) for n, path in enumerate(paths))
