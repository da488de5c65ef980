"""Publisher and subscriber of one KV cache agree, whatever is lost on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.block_hash import chain_hashes
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.kv_events import (
    Block,
    Cleared,
    Removed,
    RouterEvent,
    Stored,
    decode_kv_events,
    encode_kv_events,
)
from dynamo_trio.wire.dynamo.kv_log import KvLog
from dynamo_trio.wire.dynamo.kv_query import (
    Error,
    Events,
    InvalidRange,
    KvQuery,
    TooNew,
    TreeDump,
    TreeDumpFailed,
    decode_answer,
    decode_query,
    encode_answer,
)
from dynamo_trio.wire.dynamo.kv_state import KvState
from dynamo_trio.wire.dynamo.kv_view import KvView, Missing

if TYPE_CHECKING:
    from dynamo_trio.wire.dynamo.kv_events import Change
    from dynamo_trio.wire.dynamo.kv_query import Answer

WORKER = 2**64 - 1


def stored(*tokens_hashes: int, parent: int | None = None) -> Stored:
    """Blocks whose hashes are those of the chain."""
    chained = chain_hashes(tokens_hashes, parent)
    return Stored(parent, blocks=tuple(map(Block, chained, tokens_hashes)))


def state_of(*changes: Change, max_blocks: int = 100) -> KvState:
    state = KvState(max_blocks)
    for change in changes:
        state.apply(change)
    return state


def query(start: int | None = None, end: int | None = None, **more: Any) -> KvQuery:
    asked = {"worker_id": WORKER, "dp_rank": 0, "supports_tree_dump_failed": True, **more}
    return KvQuery(start_event_id=start, end_event_id=end, **asked)


# --- states ------------------------------------------------------------------------------

#: Few names, so that blocks meet: any parent, any place, rings too.
few = st.integers(0, 6)
changes = st.one_of(
    st.builds(Stored, few | st.none(), blocks=st.lists(st.builds(Block, few, few)).map(tuple)),
    st.builds(Removed, st.lists(few, max_size=3).map(tuple)),
    st.just(Cleared()),
)


def test_a_prompt_overlaps_from_its_beginning_without_a_gap() -> None:
    state = state_of(stored(1, 2, 3))
    assert state.overlap([1, 2, 3, 4]) == 3
    assert state.overlap([1, 9, 3]) == 1
    assert state.overlap([2, 3]) == 0
    state.apply(Removed((chain_hashes([1, 2])[1],)))
    assert state.overlap([1, 2, 3]) == 1
    assert len(state) == 2
    state.apply(stored(2, parent=1))  # the block behind it is found again
    assert state.overlap([1, 2, 3]) == 3
    state.apply(Cleared())
    assert state.overlap([1, 2, 3]) == len(state) == 0


def test_the_engines_names_need_not_be_the_routers() -> None:
    state = state_of(Stored(None, blocks=(Block(77, 1), Block(78, 2))))
    state.apply(Stored(77, blocks=(Block(99, 3),)))
    assert state.overlap([1, 2]) == 2
    assert state.overlap([1, 3]) == 2


def test_a_block_takes_the_place_of_its_twin() -> None:
    state = state_of(Stored(None, blocks=(Block(1, 5),)), Stored(None, blocks=(Block(2, 5),)))
    assert state.places == {2: (None, 5)}
    state.apply(Removed((1,)))
    assert state.overlap([5]) == 1


def test_a_block_that_moves_leaves_its_old_place() -> None:
    state = state_of(Stored(None, blocks=(Block(1, 5),)), Stored(9, blocks=(Block(1, 6),)))
    assert state.places == {1: (9, 6)}
    assert state.overlap([5]) == 0


def test_a_cache_has_a_largest_size() -> None:
    state = state_of(stored(1, 2, 3), max_blocks=3)
    state.apply(stored(1, 2))  # nothing new
    with pytest.raises(RemoteProtocolError, match="more than 3 blocks"):
        state.apply(stored(4))
    assert len(state) == 3


def test_a_dump_has_one_event_for_each_line_and_parents_first() -> None:
    first, second = chain_hashes([1, 2])
    state = state_of(stored(1, 2), stored(3, 4, parent=second), stored(5, parent=second))
    root, *branches = state.dump()
    assert root == Stored(None, blocks=(Block(first, 1), Block(second, 2)))
    assert {branch.parent_hash for branch in branches} == {second}
    assert sorted(len(branch.blocks) for branch in branches) == [1, 2]


@given(st.lists(changes, max_size=12), st.lists(few, max_size=4))
def test_a_dump_makes_the_same_state(happened: list[Change], prompt: list[int]) -> None:
    state = state_of(*happened)
    again = state_of(*state.dump())
    assert again.places == state.places
    assert again.overlap(prompt) == state.overlap(prompt)
    assert len(set(state.places.values())) == len(state)


@given(st.lists(changes, max_size=12), st.integers(0, 12))
def test_a_dump_may_be_newer_than_it_says(happened: list[Change], said: int) -> None:
    """What follows is then applied to a state that has it already."""
    end = state_of(*happened)
    assert state_of(*end.dump(), *happened[said:]).places == end.places


@given(st.lists(changes, max_size=12))
def test_a_state_is_as_large_as_what_is_there(happened: list[Change]) -> None:
    there = set[int]()
    for change in happened:
        match change:
            case Stored(blocks=blocks):
                there |= {block.block_hash for block in blocks}
            case Removed(block_hashes=gone):
                there -= {*gone}
            case Cleared():
                there.clear()
    assert state_of(*happened).places.keys() <= there


# --- the publisher's answers -------------------------------------------------------------


def log_of(count: int, **settings: Any) -> KvLog:
    log = KvLog(WORKER, **settings)
    for number in range(count):
        log.record(stored(number))
    return log


def ids(answer: Answer) -> list[int]:
    assert isinstance(answer, Events)
    return [event.event_id for event in answer.events]


def test_who_knows_nothing_gets_a_dump() -> None:
    answer = log_of(3).answer(query())
    assert isinstance(answer, TreeDump)
    assert answer.last_event_id == 3
    assert answer.is_whole
    state = state_of(*(event.change for event in answer.events))
    assert state.places == log_of(3).state.places
    assert log_of(0).answer(query(7)) == TreeDump(events=(), last_event_id=0)


def test_who_missed_some_gets_these() -> None:
    log = log_of(5)
    assert ids(log.answer(query(2, 3))) == [2, 3, 4, 5]
    assert ids(log.answer(query(5))) == [5]
    assert log.answer(query(6)) == TooNew(requested_start=6, requested_end=5, newest_available=5)
    assert log.answer(query(6, 9)) == TooNew(requested_start=6, requested_end=9, newest_available=5)
    assert log.answer(query(3, 2)) == InvalidRange(start_id=3, end_id=2)


def test_who_missed_more_than_is_kept_gets_a_dump() -> None:
    log = log_of(10, kept=6)  # each event weighs 2
    assert ids(log.answer(query(8))) == [8, 9, 10]
    assert isinstance(log.answer(query(7)), TreeDump)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"worker_id": 1}, "asked for worker 1, dp_rank 0; this is worker 184467"),
        ({"dp_rank": 1}, "dp_rank 1; this is"),
        ({"kind": "status"}, "not supported by this endpoint"),
    ],
)
def test_questions_that_are_not_for_this_cache(wrong: dict[str, Any], why: str) -> None:
    answer = log_of(1).answer(query(**wrong))
    assert isinstance(answer, Error)
    assert why in answer.message


def test_a_dump_that_no_request_plane_carries_is_not_made() -> None:
    log = log_of(10, max_dump=3000)
    answer = log.answer(query())
    assert isinstance(answer, TreeDumpFailed)
    assert answer.last_event_id == 10
    assert isinstance(log.answer(query(supports_tree_dump_failed=False)), Error)
    assert not KvView(WORKER).repair(answer)


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
def test_the_estimate_of_a_dump_is_not_too_low(codec: Any) -> None:
    log = KvLog(WORKER)
    for number in range(300):
        log.record(stored(2**63 + number))
    log.record(stored(*range(2**63, 2**63 + 500), parent=2**63))
    item = encode_answer(codec, log.answer(query()))
    changes = len(list(log.state.dump()))
    assert len(item) < changes * 224 + len(log.state) * 80 + 100


# --- the subscriber's view ---------------------------------------------------------------


def missing(view: KvView) -> Missing | None:
    """Asked anew each time: a type checker takes a property for a fixed thing."""
    return view.missing


def test_a_view_shows_its_gap_and_asks_for_it() -> None:
    log, view = KvLog(WORKER), KvView(WORKER)
    assert missing(view) == Missing()
    assert view.query() == query()
    assert view.repair(log.answer(view.query()))
    assert missing(view) is None
    events = [log.record(stored(number)) for number in range(1, 7)]
    for event in (events[0], events[0], events[3], events[5]):
        view.receive(event)
    assert view.last_event_id == 1
    assert missing(view) == Missing(2, 3)
    assert [view.overlap([number]) for number in (1, 4)] == [1, 0]
    assert view.repair(log.answer(view.query()))
    assert missing(view) is None
    assert view.state.places == log.state.places


def test_what_was_held_follows_on_a_shorter_answer() -> None:
    log, view = KvLog(WORKER), KvView(WORKER)
    view.repair(log.answer(view.query()))
    one, two, three = (log.record(stored(number)) for number in range(3))
    view.receive(three)
    assert view.repair(Events(events=(one, two), last_event_id=2))
    assert view.last_event_id == 3
    assert missing(view) is None


def test_a_clear_makes_all_before_it_needless() -> None:
    log, view = KvLog(WORKER), KvView(WORKER)
    view.repair(log.answer(view.query()))
    log.record(stored(1))
    log.record(stored(2))
    cleared, after = log.record(Cleared()), log.record(stored(3))
    assert view.repair(Events(events=(cleared, after), last_event_id=4))
    assert view.state.places == log.state.places


def test_a_view_that_knows_more_than_its_publisher_begins_again() -> None:
    log, view = log_of(2), KvView(WORKER)
    view.repair(TreeDump(events=(), last_event_id=50))
    view.receive(RouterEvent.of(WORKER, 60, Cleared()))
    assert view.repair(log.answer(view.query()))
    assert missing(view) == Missing()
    assert view.repair(log.answer(view.query()))
    assert missing(view) is None
    assert view.state.places == log.state.places


def test_what_is_held_is_bounded() -> None:
    view = KvView(WORKER, held=5)
    for number in range(10, 20):
        view.receive(RouterEvent.of(WORKER, number, stored(number)))
    view.repair(TreeDump(events=(), last_event_id=8))
    assert missing(view) == Missing(9, 17)
    view.receive(RouterEvent.of(WORKER, 20, stored(*range(100))))
    assert missing(view) == Missing(9, 20)


@pytest.mark.parametrize(
    "answer",
    [
        Events(events=(RouterEvent.of(WORKER, 5, stored(1)),), last_event_id=5),
        Events(events=(), last_event_id=3),
        Events(events=(RouterEvent.of(1, 3, stored(1)),), last_event_id=3),
        TreeDump(events=(RouterEvent.of(WORKER, 0, Cleared(), dp_rank=1),), last_event_id=3),
        TreeDump(events=(), last_event_id=9, reset_scope="half"),
    ],
)
def test_answers_that_do_not_fit(answer: Answer) -> None:
    view = KvView(WORKER)
    view.repair(TreeDump(events=(), last_event_id=2))
    with pytest.raises(RemoteProtocolError):
        view.repair(answer)
    assert view.last_event_id == 2
    assert len(view.state) == 0


def test_events_do_not_fit_a_view_that_knows_nothing() -> None:
    with pytest.raises(RemoteProtocolError, match="a dump was asked for"):
        KvView(WORKER).repair(
            Events(events=(RouterEvent.of(WORKER, 1, Cleared()),), last_event_id=1)
        )


def test_an_event_of_another_cache_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="dp_rank 1 in the cache of worker"):
        KvView(WORKER).receive(RouterEvent.of(WORKER, 1, Cleared(), dp_rank=1))


class LossyChannel(RuleBasedStateMachine):
    """One publisher and one subscriber, all in bytes; events are lost, doubled and late."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()
        self.codec = MSGPACK

    @rule()
    def restart(self) -> None:
        """The publisher starts again, under another publisher id: another view."""
        self.log, self.view = KvLog(WORKER, kept=8), KvView(WORKER, held=6)
        self.late: list[bytes] = []

    @rule(change=changes, fate=st.sampled_from(["comes", "comes", "lost", "doubled", "late"]))
    def happen(self, change: Any, fate: str) -> None:
        payload = encode_kv_events([self.log.record(change)])
        if fate == "late":
            self.late.append(payload)
        for _ in range({"comes": 1, "doubled": 2}.get(fate, 0)):
            self.deliver(payload)

    @rule()
    def catch_up(self) -> None:
        while self.late:
            self.deliver(self.late.pop())

    def deliver(self, payload: bytes) -> None:
        for event in decode_kv_events(payload):
            self.view.receive(event)

    @rule(codec=st.sampled_from([MSGPACK, JSON]))
    def ask(self, codec: Any) -> None:
        asked = decode_query(codec, codec.encode(self.view.query()))
        answer = decode_answer(codec, encode_answer(codec, self.log.answer(asked)))
        if missing(self.view) is None:
            return
        assert self.view.repair(answer)
        assert missing(self.view) is None
        assert self.view.state.places == self.log.state.places

    @invariant()
    def what_is_not_missing_is_known(self) -> None:
        """A loss that nothing has followed yet cannot be noticed."""
        if missing(self.view) is None and self.view.last_event_id == self.log.last_event_id:
            assert self.view.state.places == self.log.state.places

    @invariant()
    def memory_is_bounded(self) -> None:
        assert sum(event.weight for event in self.view._held.values()) <= 6
        assert sum(event.weight for event in self.log._events) <= 8


TestLossyChannel = LossyChannel.TestCase
