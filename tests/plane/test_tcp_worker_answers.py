"""A worker calls home: what it sends, and what each way of the client's leaving does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing

from dynamo_trio.errors import EngineShutdown, InvalidArgument, LocalProtocolError
from dynamo_trio.plane.tcp.call_home import CallHome
from dynamo_trio.plane.tcp.settings import TcpSettings
from dynamo_trio.wire.dynamo.ack import ACCEPTED
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.annotated import read_item
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.dynamo.control import ReplyTo
from dynamo_trio.wire.dynamo.receiver import Closed
from tests.plane.tcp_peer import FakeCall, Home, open_bench, reset

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BEGIN = "begin"


def value_of(event: object, codec: Codec = MSGPACK) -> bytes | None:
    assert isinstance(event, Item), event
    return read_item(codec, event.data)


# --- over sockets: what is said -------------------------------------------------------------


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
async def test_an_answer_from_handshake_to_sentinel(codec: Codec) -> None:
    async with open_bench() as bench:
        bench.peer.codec = codec
        assert await bench.peer.ask(bench.peer.frame()) == ACCEPTED
        home = await bench.peer.next_home()
        assert await home.next_event() == Handshake("subject-0")
        outbox = bench.call.outbox
        outbox.begin()
        outbox.put(codec.encode([1, 2]))
        outbox.put(codec.encode("x"))
        outbox.finish(None)
        first, *items, final, sentinel = await home.events(5)
        assert (first, final, sentinel) == (Accepted(), CompleteFinal(), Sentinel())
        assert [value_of(i, codec) for i in items] == [codec.encode([1, 2]), codec.encode("x")]
        assert bench.call.cancels == 0


async def test_what_is_said_before_the_connection_stands_is_not_lost() -> None:
    async with open_bench() as bench:
        await bench.peer.send(bench.peer.frame())
        while not bench.endpoint.calls:
            await trio.lowlevel.checkpoint()
        outbox = bench.call.outbox
        outbox.begin()
        outbox.put(b"\x01")
        outbox.finish(None)
        home = await bench.peer.next_home()
        kinds = [type(event) for event in await home.events(5)]
        assert kinds == [Handshake, Accepted, Item, CompleteFinal, Sentinel]


async def test_an_error_of_the_worker_before_the_beginning_is_the_prologue() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.finish(EngineShutdown("the worker stopped"))
        event = await home.next_event()
        assert isinstance(event, Refused)
        assert event.error is not None
        assert (event.error.name, event.error.message) == ("EngineShutdown", "the worker stopped")


async def test_an_error_of_the_request_before_the_beginning_is_its_only_item() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.finish(InvalidArgument("no such token"))
        first, error, final, sentinel = await home.events(4)
        assert (first, final, sentinel) == (Accepted(), CompleteFinal(), Sentinel())
        with pytest.raises(InvalidArgument, match="no such token"):
            value_of(error)


async def test_an_error_after_the_beginning_is_an_item_and_a_whole_end() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.begin()
        bench.call.outbox.finish(EngineShutdown("the worker is shutting down"))
        first, error, final, sentinel = await home.events(4)
        assert (first, final, sentinel) == (Accepted(), CompleteFinal(), Sentinel())
        with pytest.raises(EngineShutdown, match="shutting down"):
            value_of(error)


async def test_an_end_without_a_beginning_is_an_empty_answer() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.finish(None)
        assert await home.events(3) == [Accepted(), CompleteFinal(), Sentinel()]


async def test_the_first_end_wins_and_nothing_follows_it() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox = bench.call.outbox
        outbox.begin()
        outbox.finish(None)
        outbox.finish(EngineShutdown("late"))
        outbox.put(b"late")
        outbox.begin()
        assert await home.events(3) == [Accepted(), CompleteFinal(), Sentinel()]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert home.end.buffered == 0


async def test_an_item_that_is_too_large_is_the_callers_mistake() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.begin()
        with pytest.raises(LocalProtocolError):
            bench.call.outbox.put(bytes(33 * 2**20))
        bench.call.outbox.put(b"\x01")  # nothing of it was sent
        assert value_of((await home.events(2))[1]) == b"\x01"


async def test_an_item_is_sent_in_its_callers_task() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox = bench.call.outbox
        outbox.begin()
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics()
        for number in range(100):
            outbox.put(bytes([number]))
        after = trio.lowlevel.current_statistics()
        assert (after.tasks_living, after.tasks_runnable) == (
            before.tasks_living,
            before.tasks_runnable,
        )
        values = [value_of(event) for event in (await home.events(101))[1:]]
        assert values == [bytes([number]) for number in range(100)]


# --- over sockets: the client leaves --------------------------------------------------------


async def kill(home: Home) -> None:
    await home.send(Kill())


async def fin(home: Home) -> None:
    await home.stream.aclose()


async def rst(home: Home) -> None:
    reset(home.stream)


async def half_a_wish(home: Home) -> None:
    await home.stream.send_all(home.end.send(Kill())[:-1])
    await home.stream.aclose()


async def nonsense(home: Home) -> None:
    await home.stream.send_all(b"\xff" * 64)


LEAVINGS = [kill, fin, rst, half_a_wish, nonsense]


@pytest.mark.parametrize("leave", LEAVINGS)
@pytest.mark.parametrize("said", ["nothing", "begin", "items"])
async def test_a_client_that_leaves_cancels_the_call(
    leave: Callable[[Home], Awaitable[None]], said: str
) -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox = bench.call.outbox
        if said != "nothing":
            outbox.begin()
        if said == "items":
            outbox.put(b"\x01")
        await leave(home)
        await bench.call.told.wait()
        assert (bench.call.cancels, bench.call.stops) == (1, 0)
        outbox.put(b"late")
        outbox.finish(None)  # as a cancelled call does
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert bench.call.cancels == 1


async def test_a_killed_answer_is_closed_without_last_words() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.begin()
        assert await home.next_event() == Accepted()
        await home.send(Kill())
        assert await home.until_closed() == [Closed()]


async def test_stop_asks_the_call_and_then_closes_without_last_words() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox = bench.call.outbox
        outbox.begin()
        await home.send(Stop())
        await bench.call.told.wait()
        assert (bench.call.cancels, bench.call.stops) == (0, 1)
        outbox.put(b"\x07")  # what the call still says is delivered
        outbox.finish(None)
        first, item, closed = await home.until_closed()
        assert (first, value_of(item), closed) == (Accepted(), b"\x07", Closed())
        assert bench.call.cancels == 0


async def test_kill_after_stop_cancels() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        await home.send(Stop())
        await home.send(Kill())
        while not bench.call.cancels:
            await trio.lowlevel.checkpoint()
        assert bench.call.stops == 1


async def test_a_reset_can_first_be_seen_by_sending() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.begin()
        home.reset()
        for _ in range(10_000):  # no other task runs meanwhile
            bench.call.outbox.put(b"\x01")
            if bench.call.cancels:
                break
        assert bench.call.cancels == 1
        assert bench.call.outbox.has_credit
        bench.call.outbox.put(b"late")
        bench.call.outbox.finish(None)
        await bench.plane.server.say_farewell()
        assert bench.call.cancels == 1


@pytest.mark.parametrize("leave", LEAVINGS)
async def test_leaving_behind_the_end_is_the_normal_end(
    leave: Callable[[Home], Awaitable[None]],
) -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        await home.events(3)
        await leave(home)
        await bench.plane.server.say_farewell()  # returns as soon as the answer is closed
        assert bench.call.cancels == 0


async def test_a_client_that_refuses_the_call_cancels_it() -> None:
    async with open_bench() as bench:
        frame = bench.peer.frame()
        await bench.peer.listener.aclose()
        assert await bench.peer.ask(frame) == ACCEPTED
        await bench.call.told.wait()
        assert bench.call.cancels == 1


async def test_a_client_that_never_reads_holds_only_its_own_call() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox, item = bench.call.outbox, MSGPACK.encode(bytes(1024))
        outbox.begin()
        sent = 0
        while outbox.has_credit:
            outbox.put(item)
            sent += 1
            await trio.lowlevel.checkpoint()
        other = await bench.peer.call()
        bench.call.outbox.begin()
        assert await other.next_event() == Accepted()
        granted = trio.Event()

        async def wait_for_credit() -> None:
            while not outbox.has_credit:
                await outbox.wait_credit()
            granted.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_credit)
            await trio.testing.wait_all_tasks_blocked()
            assert not granted.is_set()
            events = await home.events(1 + sent)  # it reads after all
        assert [value_of(event) for event in events[1:]] == [item] * sent


async def test_a_cut_wakes_a_call_that_is_held_back() -> None:
    async with open_bench() as bench:
        await bench.peer.call()
        outbox = bench.call.outbox
        outbox.begin()
        while outbox.has_credit:
            outbox.put(bytes(4096))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.wait_credit)
            await trio.testing.wait_all_tasks_blocked()
            outbox.wake()
        assert not outbox.has_credit


@pytest.mark.parametrize("leave", LEAVINGS)
async def test_a_client_that_leaves_wakes_a_call_that_is_held_back(
    leave: Callable[[Home], Awaitable[None]],
) -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        outbox = bench.call.outbox
        outbox.begin()
        while outbox.has_credit:
            outbox.put(bytes(4096))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.wait_credit)
            await trio.testing.wait_all_tasks_blocked()
            await leave(home)
        assert bench.call.cancels == 1


# --- the plane's own ways -------------------------------------------------------------------


async def test_settle_waits_for_every_answer_to_begin_or_end() -> None:
    async with open_bench() as bench:
        homes = [await bench.peer.call() for _ in range(3)]
        settled = trio.Event()

        async def settle() -> None:
            await bench.plane.settle()
            settled.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle)
            first, second, third = bench.endpoint.calls
            first.outbox.begin()
            second.outbox.finish(InvalidArgument("no"))
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not settled.is_set()
            await bench.peer.call()  # one that came later is not waited for
            homes[2].reset()
        assert third.cancels == 1


async def test_leaving_the_plane_lets_what_is_finished_leave_and_closes_the_rest() -> None:
    async with trio.open_nursery() as nursery:
        # What runs is not waited for: that would take for ever.
        endless = TcpSettings(rpc_host="127.0.0.1", farewell_time=1e6)
        async with open_bench(endless) as bench:
            finished, running = await bench.peer.call(), await bench.peer.call()
            for call in bench.endpoint.calls:
                call.outbox.begin()
            call = bench.endpoint.calls[0]
            payload = MSGPACK.encode(bytes(3 * 2**20))
            call.outbox.put(payload)
            call.outbox.finish(None)
            bench.peer.homes.clear()  # the test closes them
            nursery.start_soon(_check_whole, finished, payload)
        assert await running.until_closed() == [Accepted(), Closed()]
        await trio.aclose_forcefully(running.stream)
        assert [c.cancels for c in bench.endpoint.calls] == [0, 1]


async def _check_whole(home: Home, payload: bytes) -> None:
    first, item, final, sentinel = await home.events(4)
    assert (first, final, sentinel) == (Accepted(), CompleteFinal(), Sentinel())
    assert value_of(item) == payload
    await home.stream.aclose()


async def test_leaving_the_plane_does_not_wait_for_ever() -> None:
    async with trio.open_nursery():
        async with open_bench(TcpSettings(rpc_host="127.0.0.1", farewell_time=0.01)) as bench:
            await bench.peer.call()
            bench.call.outbox.begin()
            bench.call.outbox.finish(None)
    assert bench.call.cancels == 0


# --- in virtual time, over memory streams -----------------------------------------------------

REPLY_TO = ReplyTo(HostPort("10.0.0.1", 7000), "subject-1", "id-1")


@attrs.define(eq=False)
class Line:
    """One answer over a pair of streams; ``client`` is the other end."""

    answer: CallHome
    call: FakeCall
    client: trio.abc.Stream
    end: ClientEnd = attrs.field(factory=ClientEnd)
    ended_at: float | None = None

    async def run(self) -> None:
        await self.answer.run()
        self.ended_at = trio.current_time()


def line_with(settings: TcpSettings, *, lockstep: bool = False, dial_time: float = 0) -> Line:
    make = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
    client, worker = make()

    async def dial(address: HostPort) -> trio.abc.Stream:
        assert address == REPLY_TO.address
        await trio.sleep(dial_time)
        return worker

    answer = CallHome(REPLY_TO, MSGPACK, dial, settings)
    call = FakeCall(None, b"", answer)  # type: ignore[arg-type]  # nobody looks at its head
    answer.call = call
    return Line(answer, call, client)


async def test_a_worker_waits_for_its_client_to_close_and_then_closes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = line_with(TcpSettings(linger_time=10.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        await trio.sleep(100)
        line.answer.begin()
        line.answer.finish(None)
        await trio.sleep(9)
        assert line.ended_at is None
    assert line.ended_at == pytest.approx(110.0)
    assert line.call.cancels == 0


async def test_a_client_that_takes_nothing_counts_as_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = line_with(TcpSettings(stall_time=300.0), lockstep=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        line.answer.begin()
    assert line.ended_at == pytest.approx(300.0)
    assert line.call.cancels == 1


async def test_a_slow_client_is_judged_by_each_piece(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = line_with(TcpSettings(stall_time=300.0), lockstep=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        line.answer.begin()
        line.answer.put(bytes(200 * 1024))
        line.answer.finish(None)
        for _ in range(40):
            await trio.sleep(200)
            with trio.move_on_after(1):
                await line.client.receive_some(16 * 1024)
        await line.client.aclose()
    assert line.call.cancels == 0


async def test_credit_comes_back_before_all_is_sent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = line_with(TcpSettings(high_water=64 * 1024, low_water=16 * 1024), lockstep=True)
    line.answer.begin()
    line.answer.put(bytes(64 * 1024))
    taken = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        while not line.answer.has_credit:
            assert taken < 64 * 1024
            taken += len(await line.client.receive_some(16 * 1024))
            await trio.testing.wait_all_tasks_blocked()
        assert taken >= 48 * 1024
        await line.client.aclose()


async def test_a_call_is_held_back_while_the_connection_does_not_stand(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = line_with(TcpSettings(), dial_time=4.0)
    settled: list[CallHome] = []
    line.answer._on_settled = settled.append
    line.answer.begin()
    line.answer.put(bytes(64 * 1024))
    assert not line.answer.has_credit
    assert not settled
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        await line.answer.wait_credit()
        assert trio.current_time() == pytest.approx(4.0)
        await trio.testing.wait_all_tasks_blocked()
        assert settled == [line.answer]
        await line.client.aclose()


async def test_a_wish_that_comes_in_single_bytes(autojump_clock: trio.testing.MockClock) -> None:
    line = line_with(TcpSettings())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        for byte in line.end.send(Stop()) + line.end.send(Kill()):
            assert line.call.cancels == 0
            await line.client.send_all(bytes([byte]))
            await trio.sleep(1)
    assert (line.call.stops, line.call.cancels) == (1, 1)
    assert line.ended_at is not None


async def test_a_client_that_cannot_be_called_is_gone() -> None:
    async def dial(_: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise ConnectionError("not connected within 5 s")

    line = line_with(TcpSettings())
    settled: list[CallHome] = []
    line.answer = CallHome(REPLY_TO, MSGPACK, dial, TcpSettings(), settled.append, line.call)
    line.answer.begin()
    await line.run()
    assert line.call.cancels == 1
    assert settled == [line.answer]
    assert line.answer.has_credit
