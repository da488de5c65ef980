"""Mux peers that take nothing, flood, or fill memory: what ends, what goes on, and who is told."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import Cancelled, Disconnected, DynamoException, Overloaded
from dynamo_trio.plane.mux.allowance import BURST, RATE, REQUEST_RATE, Allowance
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.plane.mux.starving import LOOKS, MAX_STARVED, Starving
from dynamo_trio.plane.mux.unread import SMALL, Share, Unread
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import GoAwayCode, encode
from dynamo_trio.wire.mux.limits import MAX_PIECE
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from tests.plane.mux_peer import HEAD as REQUEST
from tests.plane.mux_peer import PATH, PLACE, Pair, Sink, Valve, open_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.wire.mux.events import MuxEvent

STALL = 300.0
#: By when a stream that starves is ended at the latest, and not before ``STALL``.
LATEST = STALL * (1 + 2 / LOOKS)


@attrs.define(eq=False)
class Raw:
    """A client that does what it is told, answers PINGs, and keeps what it hears."""

    stream: trio.abc.Stream
    wire: ClientConnection = attrs.field(factory=ClientConnection)
    heard: list[MuxEvent] = attrs.field(factory=list)
    hears: bool = True
    _hearing: trio.Event = attrs.field(factory=trio.Event)

    async def run(self) -> None:
        await self.flush()
        async with self.stream:
            while self.hears and (data := await self.stream.receive_some()):
                self.wire.receive_data(data)
                while (event := self.wire.next_event()) is not None:
                    self.heard.append(event)
                    self._hearing.set()
                await self.flush()
            await self._hearing.wait()

    async def flush(self) -> None:
        if data := self.wire.data_to_send():
            await self.stream.send_all(data)

    async def open(self, credit: int, *, streams_in: bool = False, payload: bytes = b"") -> int:
        sid = self.wire.open(
            PATH, "r", payload, codec=MSGPACK, credit=credit, streams_in=streams_in
        )
        await self.flush()
        await wait_all_tasks_blocked()
        return sid

    def of(self, kind: type[MuxEvent]) -> list[MuxEvent]:
        return [event for event in self.heard if isinstance(event, kind)]

    def end_of(self, sid: int) -> DynamoException | None:
        for event in self.heard:
            if isinstance(event, events.StreamFinished) and event.sid == sid:
                return event.error
        return None

    @property
    def goodbye(self) -> events.GoneAway | None:
        return next((e for e in self.heard if isinstance(e, events.GoneAway)), None)


async def connect(pair: Pair) -> Raw:
    """A raw client of the worker, greeted."""
    raw = Raw(await pair.dial(PLACE))
    pair.nursery.start_soon(raw.run)
    await wait_all_tasks_blocked()
    assert raw.of(events.Established)
    return raw


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- streams that get no credit ---------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
async def test_a_stream_that_is_never_granted_anything_is_ended_and_the_others_go_on(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, *, waits: bool
) -> None:
    """Whether somebody waits for its credit, or tokens are held; the peer answers PINGs."""
    async with open_pair() as pair:
        raw = await connect(pair)
        other = await raw.open(64)
        good = pair.call
        starved = await raw.open(2)
        call = pair.call
        call.outbox.put_tokens([1, 2])
        if waits:
            pair.nursery.start_soon(call.outbox.wait_credit)
        else:
            call.outbox.put_tokens([3] * 1000)
        await trio.sleep(STALL)
        assert raw.end_of(starved) is None
        assert call.cancels == 0
        await trio.sleep(LATEST - STALL)
        error = raw.end_of(starved)
        assert isinstance(error, Cancelled)
        assert error.message == "nothing of the answer was taken for 300 s"
        assert (call.cancels, good.cancels) == (1, 0)
        assert pair.server._links
        good.outbox.put_tokens([7])
        good.outbox.finish(None)
        await wait_all_tasks_blocked()
        assert raw.of(events.TokensReceived)[-1] == events.TokensReceived({other: [7]}, [other])
        (link,) = pair.server._links
        assert link.wire.streams == 0
        assert link.wire.backlog == 0
    (line,) = warnings(caplog)
    assert "a request between here and the client is given up: nothing of" in line


async def test_what_a_call_has_left_behind_is_not_held_for_ever(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        sid = await raw.open(2)
        pair.call.outbox.put_tokens([1, 2, 3])
        pair.call.outbox.finish(None)
        await trio.sleep(LATEST)
        assert isinstance(raw.end_of(sid), Cancelled)
        (link,) = pair.server._links
        assert link.wire.streams == 0


async def test_a_stream_that_is_granted_something_now_and_then_goes_on(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        sid = await raw.open(1)
        pair.call.outbox.put_tokens(range(10))
        for _ in range(9):
            await trio.sleep(STALL - 1)
            raw.wire.grant(sid, 1)
            await raw.flush()
        await wait_all_tasks_blocked()
        assert raw.end_of(sid) is None
        tokens = [e.tokens[sid] for e in raw.heard if isinstance(e, events.TokensReceived)]
        assert [token for some in tokens for token in some] == list(range(10))


async def test_a_stream_with_nothing_to_send_waits_without_credit(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        sid = await raw.open(0)
        await trio.sleep(10 * STALL)
        assert raw.end_of(sid) is None
        assert pair.call.cancels == 0


async def test_a_call_that_was_given_up_counts_until_it_ends(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        await raw.open(0)
        call = pair.call
        call.cancel = lambda: None  # type: ignore[method-assign]  # it takes its time
        call.outbox.put_tokens([1])
        await trio.sleep(LATEST)
        (link,) = pair.server._links
        assert link.wire.streams == 1
        call.outbox.finish(None)
        assert link.wire.streams == 0


@pytest.mark.parametrize("grants", [False, True])
async def test_a_peer_that_starves_many_streams_is_cut(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, *, grants: bool
) -> None:
    """Unless it grants to others meanwhile: then only some of its readers are slow."""
    async with open_pair() as pair:
        raw = await connect(pair)
        flowing = await raw.open(2)
        good = pair.call
        for _ in range(MAX_STARVED):
            await raw.open(1)
            pair.call.outbox.put_tokens([1, 2])
        if grants:
            await trio.sleep(STALL / 2)
            good.outbox.put_tokens([1])
            await wait_all_tasks_blocked()
            raw.wire.grant(flowing, 1)
            await raw.flush()
        await trio.sleep(LATEST)
        if grants:
            assert len(raw.of(events.StreamFinished)) == MAX_STARVED
            assert raw.goodbye is None
            assert good.cancels == 0
        else:
            assert raw.goodbye == events.GoneAway(
                GoAwayCode.STALLED, "it takes nothing of 16 answers in a row"
            )
            assert not pair.server._links
            assert all(call.finished for call in pair.endpoint.calls)


def test_looks_are_counted_for_what_lacks_credit_all_the_time() -> None:
    starving = Starving()
    for _ in range(LOOKS):
        assert starving.look({1: 5, 2: 5, 3: 5}, 0) == []
    assert starving.look({1: 5, 2: 6}, 0) == [1]
    assert starving.starved == 1
    for _ in range(LOOKS):
        assert starving.look({3: 5}, 1) == []
    assert starving.look({3: 5}, 2) == [3]
    assert starving.starved == 0


# --- floods -----------------------------------------------------------------------------------


def pings(raw: Raw) -> bytes:
    first = raw.wire._pinged + 1
    raw.wire._pinged += 1000
    return b"".join(encode(frames.Ping(n)) for n in range(first, first + 1000))


def unknown(raw: Raw) -> bytes:
    return frames.HEAD.pack(1, frames.OPTIONAL) * 1000


def grants_for_nothing(raw: Raw) -> bytes:
    return encode(frames.Credit([1, 1])) * 1000


def late_grants(raw: Raw) -> bytes:
    return encode(frames.Credit([2, 1] * 1000))


def wishes(raw: Raw) -> bytes:
    return encode(frames.Stop(1)) * 1000


def crumbs(raw: Raw) -> bytes:
    return encode(frames.Part(1000, b"x")) * 1000


def abandoned(raw: Raw) -> bytes:
    data = bytearray()
    for _ in range(1000):
        sid = raw.wire.open(PATH, "r", b"", codec=MSGPACK, credit=1)
        data += raw.wire.data_to_send()
        raw.wire.cancel(sid)
        data += raw.wire.data_to_send()
    return bytes(data)


def refused(raw: Raw) -> bytes:
    data = bytearray()
    for _ in range(1000):
        sid = raw.wire.open("nobody", "r", b"", codec=MSGPACK, credit=1)
        data += raw.wire.data_to_send()
        del raw.wire._streams[sid]
    return bytes(data)


FLOODS = [pings, unknown, grants_for_nothing, late_grants, wishes, crumbs, abandoned, refused]


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_is_cut_with_a_reason(
    flood: Callable[[Raw], bytes], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        await raw.open(1)
        await raw.open(1)
        raw.wire.cancel(2)
        await raw.flush()
        rounds = 0
        while raw.goodbye is None and rounds < 100:
            rounds += 1
            await raw.stream.send_all(flood(raw))
            await wait_all_tasks_blocked()
        assert 0.8 * BURST / 1000 < rounds < 1.2 * BURST / 1000 + 2
        assert raw.goodbye == events.GoneAway(
            GoAwayCode.FLOOD, "it sends too much that leads to nothing"
        )
        assert all(call.finished for call in pair.endpoint.calls)
    (line,) = warnings(caplog)
    assert line.startswith("the connection to the client is closed: it sends too much")


@pytest.mark.parametrize("flood", [pings, wishes, abandoned])
async def test_what_comes_at_leisure_is_no_flood(
    flood: Callable[[Raw], bytes], autojump_clock: MockClock
) -> None:
    async with open_pair() as pair:
        raw = await connect(pair)
        await raw.open(1)
        for _ in range(3 * BURST // 1000):
            await raw.stream.send_all(flood(raw))
            await trio.sleep(1000 / RATE)
        assert raw.goodbye is None


@pytest.mark.parametrize("fruitless", [abandoned, refused])
async def test_a_worker_that_is_full_does_not_cut_who_asks_it(
    fruitless: Callable[[Raw], bytes], autojump_clock: MockClock
) -> None:
    """An honest frontend passes on what its clients send, and other streams run beside it."""
    async with open_pair() as pair:
        raw = await connect(pair)
        await raw.open(1)
        for _ in range(2 * BURST // 1000):
            await raw.stream.send_all(fruitless(raw))
            await trio.sleep(1000 / (REQUEST_RATE - 500))
        assert raw.goodbye is None
        assert pair.server._links


async def test_others_run_while_a_flood_is_read(autojump_clock: MockClock) -> None:
    """Even if a whole read holds nothing that is an event."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with open_pair() as pair:
        raw = await connect(pair)
        (link,) = pair.server._links
        pair.nursery.start_soon(other)
        await raw.stream.send_all(unknown(raw) * 10)
        while link.wire.trifles < 10_000:
            await trio.lowlevel.checkpoint()
        assert turns > 10_000 / 64
        pair.nursery.cancel_scope.cancel()


async def test_a_peer_that_does_not_take_answers_is_cut_soon(autojump_clock: MockClock) -> None:
    """Its requests are refused, and it reads nothing of that."""
    async with open_pair() as pair:
        raw = await connect(pair)
        (link,) = pair.server._links
        pair.to_worker.stuck = True
        for _ in range(4):
            await raw.stream.send_all(refused(raw))
            await wait_all_tasks_blocked()
        link._wire._out.control(b"x" * link._wire._limits.max_control)
        await raw.stream.send_all(encode(frames.Ping(1)))
        await trio.sleep(pair.settings.frame_time - 1)
        assert pair.server._links
        await trio.sleep(1 + 2)  # and some for the last words, which nobody takes
        assert not pair.server._links
        assert link.reason == "it has not taken the answers to what it sends for 60 s"


def test_an_allowance_grows_again_up_to_a_bound() -> None:
    allowance = Allowance(0.0)
    assert allowance.spend(BURST, 0.0)
    assert allowance.spend(BURST + RATE, 1.0)
    assert not allowance.spend(BURST + RATE + 1, 1.0)
    allowance = Allowance(0.0)
    assert not allowance.spend(BURST + 1, math.inf)


# --- memory -----------------------------------------------------------------------------------

LARGE = b"x" * MAX_PIECE


FEW = MuxSettings(max_unread=10 * MAX_PIECE)


async def test_what_nobody_reads_is_bounded_at_a_client(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream that goes above it ends; what was read makes room again."""
    async with open_pair(FEW) as pair:
        sinks = [Sink(), Sink(), Sink()]
        async with (
            pair.ask(sinks[0]) as first,
            pair.ask(sinks[1]),
            pair.ask(sinks[2]),
        ):
            one, two, three = pair.endpoint.calls
            for _ in range(6):
                one.outbox.put(LARGE)
            one.outbox.finish(None)
            await wait_all_tasks_blocked()
            first.grant(3)  # it has ended, and is still read
            for _ in range(7):
                two.outbox.put(LARGE)
            await wait_all_tasks_blocked()
            assert (len(sinks[0].items), len(sinks[1].items)) == (6, 7)
            three.outbox.put(b"small")
            three.outbox.put(LARGE)
            await wait_all_tasks_blocked()
            assert sinks[2].items == [b"small"]
            (end,) = sinks[2].ends
            assert isinstance(end, Disconnected)
            assert three.cancels == 1
            assert sinks[1].ends == []
        (way,) = pair.client._ways.values()
        assert way._link is not None
        assert way._link.unread.size == 0
    (line,) = warnings(caplog)
    assert "is given up: the answers of the worker that nobody has read" in line


async def test_requests_of_one_peer_are_bounded_at_a_worker(autojump_clock: MockClock) -> None:
    async with open_pair(FEW) as pair:
        raw = await connect(pair)
        for _ in range(10):
            await raw.open(1, payload=LARGE)
        refused = await raw.open(1, payload=LARGE)
        small = await raw.open(1, payload=b"x" * (SMALL - 1))
        assert isinstance(raw.end_of(refused), Overloaded)
        assert raw.end_of(small) is None
        pair.endpoint.calls[0].outbox.finish(None)
        again = await raw.open(1, payload=LARGE)
        assert raw.end_of(again) is None


async def test_what_streams_in_is_bounded_at_a_worker(autojump_clock: MockClock) -> None:
    async with open_pair(FEW) as pair:
        raw = await connect(pair)
        sids = [await raw.open(1, streams_in=True) for _ in range(2)]
        one, two = pair.endpoint.calls
        for number in range(8):
            raw.wire.send_item(sids[0], LARGE)
            await raw.flush()
            await wait_all_tasks_blocked()
            if number < 4:
                one.outbox.grant(1)
        for _ in range(7):
            raw.wire.send_item(sids[1], LARGE)
            await raw.flush()
            await wait_all_tasks_blocked()
        assert (len(one.fed), len(two.fed)) == (8, 6)
        assert (one.cancels, two.cancels) == (0, 1)
        assert isinstance(raw.end_of(sids[1]), Overloaded)


def test_a_share_is_given_back_item_by_item() -> None:
    unread = Unread(limit=3 * SMALL)
    share = Share(unread)
    share.came += 5
    assert share.item(SMALL)
    assert share.item(SMALL - 1)
    assert share.item(2 * SMALL)
    assert unread.size == 3 * SMALL
    assert not Share(unread).item(SMALL)
    share.consume(5)
    assert unread.size == 4 * SMALL
    share.consume(1)
    assert unread.size == 3 * SMALL
    share.clear()
    assert unread.size == SMALL


# --- what a peer says of itself ---------------------------------------------------------------


async def test_no_peer_writes_lines_into_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What it calls itself, and its last words, are one line, and steer no terminal."""
    caplog.set_level(logging.DEBUG)
    evil = "a\nERROR forged\r\x1b[2J\u2028b"

    async def dial(address: object) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        worker = WorkerConnection(software=evil, process=evil)
        worker.receive_data(ClientConnection().data_to_send())
        assert worker.next_event() is not None
        await theirs.send_all(worker.data_to_send() + encode(frames.GoAway("od\nd", evil * 9)))
        return Valve(ours)

    async with open_pair() as pair:
        raw = Raw(await pair.dial(PLACE), ClientConnection(software=evil, process=evil))
        pair.nursery.start_soon(raw.run)
        pair.client._dial = dial
        pair.client.instance_found(f"{PLACE}/{PATH}")
        await trio.sleep(0.1)
        await raw.open(1)
        raw.wire.go_away("bye\nbye", evil)
        await raw.flush()
        await trio.sleep(0.1)
    said = "".join(r.getMessage() for r in caplog.records)
    assert "ERROR forged" in said
    assert said.isprintable()
    assert max(len(r.getMessage()) for r in caplog.records) < 2000


# --- a worker that floods ---------------------------------------------------------------------

OF_WORKERS: dict[str, Callable[[int], bytes]] = {
    "notices": lambda n: encode(frames.Draining(n, ["1/x"])),
    "places taken back": lambda n: encode(frames.Serving(["1/x"])),
    "tokens of nobody": lambda n: encode(frames.Tokens([1, 5], [])),
    "nothing at all": lambda n: encode(frames.Tokens([], [])),
    "pings": lambda n: encode(frames.Ping(n)),
}


@pytest.mark.parametrize("what", OF_WORKERS)
async def test_a_worker_that_floods_is_cut(
    what: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    frame = OF_WORKERS[what]

    async def serve(stream: trio.abc.Stream) -> None:
        worker = WorkerConnection()
        while not worker.streams:
            worker.receive_data(await stream.receive_some(65536))
            while worker.next_event() is not None:
                pass
            await stream.send_all(worker.data_to_send())
        await stream.send_all(encode(frames.Opened(1, 0)) + encode(frames.Done([1])))
        for start in range(1, 2 * BURST, 1000):
            await stream.send_all(b"".join(frame(n) for n in range(start, start + 1000)))
            await wait_all_tasks_blocked()
        await trio.sleep_forever()

    async def dial(address: object) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        pair.nursery.start_soon(serve, theirs)
        return Valve(ours)

    async with open_pair() as pair:
        pair.client._dial = dial
        sink = Sink()
        async with pair.client.open_stream(f"{PLACE}/{PATH}", REQUEST, b"x", sink):
            assert await sink.end() is None
        await trio.sleep(0.5)
    (line,) = warnings(caplog)
    assert "it sends too much that leads to nothing" in line
