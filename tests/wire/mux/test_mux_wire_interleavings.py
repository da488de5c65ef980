"""Two ends of a mux connection in any order of events, any split of bytes, and any garbage.

Invariants tested: every stream ends exactly once at each end; what arrives is a beginning of
what was sent, and all of it if the stream ended well; nothing is sent without credit, and both
ends count credit alike; at the end both tables are empty and nothing waits; garbage is a
RemoteProtocolError and costs no more memory than a message may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import LocalProtocolError, Overloaded, RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.mux import events
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import FrameType, encode
from dynamo_trio.wire.mux.limits import MAX_FRAME, MAX_PIECE, MuxLimits
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from tests.wire.mux.mux_pair import ANY_FRAME, Pair, all_bytes, frames_in, greeting, take_events

if TYPE_CHECKING:
    from dynamo_trio.wire.mux.connection import MuxConnection
    from dynamo_trio.wire.mux.frames import Frame

    Said = tuple[str, int | bytes]

LIMITS = MuxLimits(max_streams=4)
SIZES = (0, 1, MAX_PIECE, MAX_PIECE + 1, 3 * MAX_PIECE)


@define(eq=False)
class Seen:
    """One stream as the test follows it."""

    payload: bytes
    streams_in: bool
    answered: list[Said] = field(factory=list)  # by the worker, and what came of it
    answers: list[Said] = field(factory=list)
    put: list[Said] = field(factory=list)  # by the client, and what came of it
    items: list[Said] = field(factory=list)
    accepted: bool = False
    opened: bool = False
    ended: str = ""  # at the client
    cancelled: bool = False  # by the client
    over: str = ""  # at the worker: how its call ended
    whole: bool = False  # the client has ended its input
    input_ended: bool = False


class World:
    """Two ends, two pipes, and a model of every stream."""

    def __init__(self) -> None:
        self.client, self.worker = ClientConnection(LIMITS), WorkerConnection(LIMITS)
        self.to_worker, self.to_client = bytearray(), bytearray()
        self.streams: dict[int, Seen] = {}
        self.serial = 0
        self.notice = 0
        self.settle()

    # --- operations: each takes a number that chooses the stream, and one that chooses more -

    def open(self, _: int, more: int) -> None:
        """The client opens a stream."""
        payload, streams_in = self.content(more), more % 2 == 0
        try:
            sid = self.client.open("p", "r", payload, codec=MSGPACK, credit=more % 4,
                                   streams_in=streams_in)  # fmt: skip
        except Overloaded:
            assert self.client.streams == LIMITS.max_streams
            return
        assert sid not in self.streams
        self.streams[sid] = Seen(payload, streams_in, whole=not streams_in)

    def cancel(self, sid: int, _: int) -> None:
        """The client leaves."""
        seen = self.streams[sid]
        self.client.cancel(sid)
        if not seen.ended:
            seen.cancelled, seen.ended = True, "cancelled"

    def stop(self, sid: int, _: int) -> None:
        """The client asks for an end."""
        self.client.stop(sid)

    def client_grants(self, sid: int, more: int) -> None:
        """The client has consumed something."""
        self.client.grant(sid, more % 4)

    def client_puts(self, sid: int, more: int) -> None:
        """The client sends an item if it may."""
        if self.client.has_credit(sid):
            item = self.content(more)
            self.client.send_item(sid, item)
            self.streams[sid].put.append(("item", item))

    def finish_input(self, sid: int, _: int) -> None:
        """The client's input is whole."""
        if self.client.is_open(sid):
            self.client.finish_input(sid)
            self.streams[sid].whole = True

    def accept(self, sid: int, more: int) -> None:
        """The worker takes a request on, or refuses it."""
        seen = self.streams[sid]
        if not seen.opened or seen.accepted or seen.over:
            return
        if more % 5 == 0:
            self.worker.fail(sid, Overloaded("no"))
            seen.over = "error"
        else:
            self.worker.accept(sid, more % 3)
            seen.accepted = True

    def tokens(self, sid: int, more: int) -> None:
        """A step of the engine: tokens, whether there is credit or not."""
        seen = self.streams[sid]
        if seen.accepted and not seen.over:
            tokens = [self.next() for _ in range(more % 4)]
            self.worker.send_tokens(sid, tokens)
            seen.answered += [("token", token) for token in tokens]

    def worker_puts(self, sid: int, more: int) -> None:
        """The worker sends an item, whether there is credit or not."""
        seen = self.streams[sid]
        if seen.accepted and not seen.over:
            item = self.content(more)
            self.worker.send_item(sid, item)
            seen.answered.append(("item", item))

    def worker_ends(self, sid: int, more: int) -> None:
        """The worker's call ends, well or not."""
        seen = self.streams[sid]
        if seen.accepted and not seen.over:
            seen.over = "well" if more % 3 else "error"
            self.worker.finish(sid) if more % 3 else self.worker.fail(sid, ValueError("oh"))

    def worker_grants(self, sid: int, more: int) -> None:
        """The worker has consumed something."""
        if self.streams[sid].opened:
            self.worker.grant(sid, more % 4)

    def talk(self, sid: int, more: int) -> None:
        """Pings and drains."""
        self.client.ping()
        self.worker.ping()
        if more % 3 == 0:
            self.notice += 1
            self.worker.drain(self.notice, ["p"])

    def client_writes(self, sid: int, more: int) -> None:
        """Some bytes leave the client, and some arrive."""
        self.to_worker += self.client.data_to_send(1 + more * 100)
        self.deliver(self.worker, self.to_worker, more * 999)

    def worker_writes(self, sid: int, more: int) -> None:
        """Some bytes leave the worker, and some arrive."""
        self.to_client += self.worker.data_to_send(1 + more * 100)
        self.deliver(self.client, self.to_client, more * 999)

    # --- what happens ---------------------------------------------------------------------

    def next(self) -> int:
        """A number that was never used."""
        self.serial += 1
        return self.serial

    def content(self, more: int) -> bytes:
        """An item that is like no other."""
        return self.next().to_bytes(8, "big") + bytes(SIZES[more % len(SIZES)])

    def deliver(self, end: MuxConnection, pipe: bytearray, count: int) -> None:
        """Some bytes arrive at an end."""
        arrived = bytes(pipe[: min(count, 60_000)])
        del pipe[: len(arrived)]
        if arrived:
            end.receive_data(arrived)
        for event in take_events(end):
            self.happened(event)

    def happened(self, event: events.MuxEvent) -> None:
        """Compare an event with the model."""
        match event:
            case events.StreamOpened(sid=sid, payload=payload):
                seen = self.streams[sid]
                assert not seen.opened
                assert payload == seen.payload
                seen.opened = True
            case events.StreamAccepted(sid=sid):
                assert self.streams[sid].accepted
                assert not self.streams[sid].ended
            case events.TokensReceived(tokens=groups, finished=finished):
                for sid, tokens in groups.items():
                    self.answer(sid, [("token", token) for token in tokens])
                for sid in finished:
                    self.ends(sid, "well")
            case events.StreamFinished(sid=sid):
                self.ends(sid, "error")
            case events.StreamCancelled(sid=sid):
                assert self.streams[sid].cancelled
                assert not self.streams[sid].over or self.streams[sid].opened
            case events.InputFinished(sid=sid):
                assert self.streams[sid].whole
                assert not self.streams[sid].input_ended
                self.streams[sid].input_ended = True
            case events.ItemReceived(sid=sid, payload=payload):
                self.item(sid, payload)
            case events.PathsDraining(notice=notice):
                self.client.acknowledge(notice)

    def answer(self, sid: int, said: list[Said]) -> None:
        """Something of an answer came."""
        seen = self.streams[sid]
        assert not seen.ended
        seen.answers += said
        assert seen.answers == seen.answered[: len(seen.answers)]

    def item(self, sid: int, payload: bytes) -> None:
        """An item came, at the end at which no answer is expected or at the other."""
        seen = self.streams[sid]
        said: Said = ("item", payload)
        if said in seen.answered:
            self.answer(sid, [said])
        else:
            assert not seen.input_ended
            seen.items.append(said)
            assert seen.items == seen.put[: len(seen.items)]

    def ends(self, sid: int, how: str) -> None:
        """A stream ended at the client, by what the worker sent."""
        seen = self.streams[sid]
        assert not seen.ended
        assert how == seen.over or (how == "error" and not seen.opened)
        seen.ended = how
        if seen.accepted and how == "well":
            assert seen.answers == seen.answered  # an error drops what had no credit

    def settle(self) -> None:
        """Carry everything back and forth until both are silent."""
        ends = (self.client, self.worker)
        while any(end.wants_to_send for end in ends) or self.to_worker or self.to_client:
            self.to_worker += self.client.data_to_send()
            self.to_client += self.worker.data_to_send()
            self.deliver(self.worker, self.to_worker, 60_000)
            self.deliver(self.client, self.to_client, 60_000)

    def check_credit(self) -> None:
        """With nothing under way, both ends count alike."""
        for sid, ours in self.client._streams.items():
            theirs = self.worker._streams.get(sid)
            assert theirs is not None
            assert theirs.credit == ours.allowed
            if self.streams[sid].accepted:
                assert ours.credit == theirs.allowed or not self.streams[sid].streams_in
            assert not theirs.held or theirs.credit <= 0

    def end_all(self) -> None:
        """Bring every stream to its end, some in each way."""
        for sid, seen in self.streams.items():
            self.accept(sid, 1)
            self.worker_ends(sid, sid)
            assert seen.over or not seen.opened or seen.cancelled
        for _ in range(500):
            self.settle()
            if not self.client.streams:
                break
            for sid in self.streams:
                self.client.grant(sid, 3)
        for sid, seen in self.streams.items():
            if seen.opened and not seen.over:
                self.worker.fail(sid, ValueError("cancelled"))

    def check_end(self) -> None:
        """Nothing is left, and every stream has ended."""
        assert all(seen.ended for seen in self.streams.values())
        assert self.client.streams == self.worker.streams == 0
        for end in (self.client, self.worker):
            assert not end.wants_to_send
            assert end.backlog == 0
            assert not end.receiving


Operation = Callable[[World, int, int], None]

#: Operations, and how often each is drawn: streams should live long enough to say something.
OPERATIONS: dict[Operation, int] = {
    World.open: 2,
    World.cancel: 1,
    World.stop: 1,
    World.client_grants: 3,
    World.client_puts: 4,
    World.finish_input: 1,
    World.accept: 3,
    World.tokens: 4,
    World.worker_puts: 2,
    World.worker_ends: 1,
    World.worker_grants: 3,
    World.talk: 1,
    World.client_writes: 5,
    World.worker_writes: 5,
}
operations = st.lists(
    st.tuples(
        st.sampled_from([op for op, weight in OPERATIONS.items() for _ in range(weight)]),
        st.integers(0, 9),
        st.integers(0, 300),
    ),
    max_size=150,
)


@given(st.lists(st.integers(0, 9), max_size=3), operations)
def test_every_stream_ends_exactly_once(
    begin: list[int], steps: list[tuple[Operation, int, int]]
) -> None:
    world = World()
    for more in begin:
        world.open(0, more)
    world.settle()
    for sid in sorted(world.streams):
        world.accept(sid, sid + 1)
    world.open(0, 3)
    for operation, which, more in steps:
        sids = sorted(world.streams)[-6:]
        operation(world, sids[which % len(sids)], more)
    world.settle()
    world.check_credit()
    world.end_all()
    world.check_end()


# --- any split ---------------------------------------------------------------------------


def conversation() -> tuple[bytes, bytes]:
    """What each end of a busy connection has received."""
    pair = Pair(greeted=False)
    heard: dict[MuxConnection, bytearray] = {pair.client: bytearray(), pair.worker: bytearray()}

    def run() -> None:
        while pair.client.wants_to_send or pair.worker.wants_to_send:
            for end, other in ((pair.client, pair.worker), (pair.worker, pair.client)):
                if data := all_bytes(end):
                    heard[other] += data
                    other.receive_data(data)
                    take_events(other)

    run()
    sids = [
        pair.client.open("p", "r", bytes(n), codec=MSGPACK, credit=3, streams_in=True)
        for n in (0, 40_000, 1)
    ]
    run()
    for sid in sids:
        pair.worker.accept(sid, 5)
        pair.worker.send_tokens(sid, [1, 2, 3, 4])
        pair.worker.send_item(sid, bytes(40_000))
    run()
    for sid in sids:
        pair.client.grant(sid, 3)
        pair.client.send_item(sid, bytes(70_000))
        pair.client.finish_input(sid)
        pair.client.ping()
    run()
    pair.worker.drain(1, ["p"])
    pair.worker.finish(sids[0])
    pair.worker.fail(sids[1], ValueError("oh"))
    pair.client.cancel(sids[2])
    run()
    pair.client.acknowledge(1)
    pair.client.go_away()
    run()
    return bytes(heard[pair.client]), bytes(heard[pair.worker])


TO_CLIENT, TO_WORKER = conversation()


def replayed(data: bytes, cuts: list[int]) -> list[events.MuxEvent]:
    """What a worker tells of these bytes, cut in these places. It says nothing itself."""
    worker = WorkerConnection()
    told: list[events.MuxEvent] = []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if begin == end:
            continue
        worker.receive_data(data[begin:end])
        while (event := worker.next_event()) is not None:
            told.append(event)
            if isinstance(event, events.StreamOpened):
                worker.accept(event.sid, 5)
            if isinstance(event, events.Established):
                worker.drain(1, ["p"])
    return told


@given(st.lists(st.integers(0, len(TO_WORKER)), max_size=30))
def test_any_split_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    assert replayed(TO_WORKER, sorted(cuts)) == replayed(TO_WORKER, [])


def test_byte_by_byte() -> None:
    begin = TO_WORKER[:2000]
    assert replayed(begin, list(range(1, len(begin)))) == replayed(begin, [])
    assert len(replayed(TO_WORKER, [])) > 10


# --- garbage -----------------------------------------------------------------------------

ENDS = pytest.mark.parametrize("kind", [ClientConnection, WorkerConnection])


def prepared(kind: type[MuxConnection]) -> MuxConnection:
    """An end with streams in several states."""
    pair = Pair(client=MuxLimits(max_message=100_000), worker=MuxLimits(max_message=100_000))
    pair.open(credit=2)
    pair.open(credit=2, streams_in=True, window=2)
    pair.client.open("p", "r", b"", codec=MSGPACK, credit=1)
    pair.client.ping()
    pair.worker.ping()
    pair.worker.drain(1, ["p"])
    pair.run()
    return pair.client if kind is ClientConnection else pair.worker


def survives(end: MuxConnection, data: bytes) -> bool:
    """Feed what a peer sends; True if the end still listens. It holds no more than it may."""
    for begin in range(0, len(data), 5000):
        end.receive_data(data[begin : begin + 5000])
        try:
            take_events(end)
        except RemoteProtocolError:
            with pytest.raises(RemoteProtocolError):
                end.next_event()
            with pytest.raises(LocalProtocolError):
                end.ping()
            all_bytes(end)
            assert end.streams == 0
            assert not end.receiving
            return False
        held = 0 if end._assembly is None else len(end._assembly.data)
        assert end._reader.buffered <= MAX_FRAME + 4
        assert held <= 100_000
    return True


@ENDS
@given(data=st.binary(max_size=300))
def test_garbage_after_the_greeting(kind: type[MuxConnection], data: bytes) -> None:
    end = kind()
    end.receive_data(greeting(kind))
    take_events(end)
    survives(end, data)


@ENDS
@given(data=st.binary(max_size=50))
def test_garbage_from_the_beginning(kind: type[MuxConnection], data: bytes) -> None:
    survives(kind(), data)


@ENDS
@given(frames=st.lists(ANY_FRAME, max_size=12))
def test_frames_in_any_order(kind: type[MuxConnection], frames: list[Frame]) -> None:
    end = prepared(kind)
    if survives(end, b"".join(encode(frame) for frame in frames)):
        all_bytes(end)
        end.go_away()
        last = [frame.type for frame in frames_in(all_bytes(end))][-1:]
        gone = any(frame.type is FrameType.GOAWAY for frame in frames)
        assert last == ([] if gone else [FrameType.GOAWAY])


@ENDS
@given(
    st.data(),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_a_conversation_with_wrong_bytes(
    kind: type[MuxConnection], data: st.DataObject, changes: list[tuple[int, int]]
) -> None:
    heard = bytearray(TO_CLIENT if kind is ClientConnection else TO_WORKER)
    del heard[data.draw(st.integers(0, len(heard))) :]
    for at, value in changes:
        if heard:
            heard[at % len(heard)] = value
    survives(kind(MuxLimits(max_message=100_000)), bytes(heard))
