"""The subscriber's side of one KV cache: what its publisher has told, and what was missed.

Theory of operation
-------------------
A view begins with nothing and must first be told everything (a dump). From then on events
are applied in the order of their ids. One that comes too early shows a gap; it and those
behind it are *held*, and :attr:`KvView.missing` says what to ask for. The answer fills the
gap, and what was held follows if it follows on. What is held is bounded: beyond
:data:`HELD` the oldest is dropped, which only makes the gap longer. Until a gap is filled
the view shows the cache as it was before it.

A view belongs to one publisher id. A worker that starts again has another one, and gets a
view of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.kv_events import Cleared
from dynamo_trio.wire.dynamo.kv_query import Events, InvalidRange, KvQuery, TooNew, TreeDump
from dynamo_trio.wire.dynamo.kv_state import KvState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_trio.wire.dynamo.kv_events import RouterEvent
    from dynamo_trio.wire.dynamo.kv_query import Answer

#: How many blocks and events the held events have in all.
HELD = 2**16


@attrs.frozen
class Missing:
    """What a view lacks: the events from ``start`` to ``end``, or all (both None)."""

    start: int | None = None
    end: int | None = None


@attrs.define(eq=False)
class KvView:
    """One cache as one subscriber knows it."""

    worker_id: int
    dp_rank: int = 0
    held: int = HELD
    #: What is known of the cache.
    state: KvState = attrs.field(factory=KvState)
    #: Up to which event; None: nothing is known, or nothing can be relied on.
    last_event_id: int | None = attrs.field(default=None, init=False)
    # The newest event that was seen, held or not.
    _newest: int = attrs.field(default=0, init=False)
    # Invariant: events above last_event_id + 1, by id.
    _held: dict[int, RouterEvent] = attrs.field(factory=dict, init=False)
    # Invariant: their weights.
    _weight: int = attrs.field(default=0, init=False)

    @property
    def missing(self) -> Missing | None:
        """What to ask the publisher for; None: nothing."""
        last = self.last_event_id
        if last is None:
            return Missing()
        if self._newest <= last:
            return None
        first_held = next(iter(self._held), self._newest + 1)
        return Missing(last + 1, first_held - 1)

    def query(self) -> KvQuery:
        """The question for what is missing."""
        missing = self.missing or Missing()
        return KvQuery(
            worker_id=self.worker_id,
            dp_rank=self.dp_rank,
            start_event_id=missing.start,
            end_event_id=missing.end,
            supports_tree_dump_failed=True,
        )

    def overlap(self, tokens_hashes: Iterable[int]) -> int:
        """How many blocks of a prompt the cache held at ``last_event_id``."""
        return self.state.overlap(tokens_hashes)

    # --- live events ---------------------------------------------------------------------

    def receive(self, event: RouterEvent) -> None:
        """An event has come: it is applied, held, or known already.

        Raises:
            RemoteProtocolError: it is about another cache, or makes this one too large.
        """
        self._check(event)
        self._newest = max(self._newest, event.event_id)
        last = self.last_event_id
        if last is None or event.event_id > last + 1:
            self._hold(event)
        elif event.event_id == last + 1:
            self._apply(event)
            self._release()

    def _check(self, event: RouterEvent) -> None:
        if (event.worker_id, event.dp_rank) != (self.worker_id, self.dp_rank):
            raise RemoteProtocolError(
                f"an event of worker {event.worker_id}, dp_rank {event.dp_rank} "
                f"in the cache of worker {self.worker_id}, dp_rank {self.dp_rank}"
            )

    def _apply(self, event: RouterEvent) -> None:
        self.state.apply(event.change)
        self.last_event_id = event.event_id

    def _hold(self, event: RouterEvent) -> None:
        if event.event_id not in self._held:
            self._held[event.event_id] = event
            self._weight += event.weight
        while self._weight > self.held:
            self._drop(next(iter(self._held)))

    def _drop(self, event_id: int) -> RouterEvent:
        event = self._held.pop(event_id)
        self._weight -= event.weight
        return event

    def _release(self) -> None:
        """Apply what follows on."""
        for event_id in sorted(self._held):
            assert self.last_event_id is not None  # only called when it is known
            if event_id > self.last_event_id + 1:
                break
            event = self._drop(event_id)
            if event_id > self.last_event_id:
                self._apply(event)

    # --- answers -------------------------------------------------------------------------

    def repair(self, answer: Answer) -> bool:
        """Take the publisher's answer; False if it was of no help: ask again later.

        Something may be missing afterwards too. Who asks should not ask without a pause.

        Raises:
            RemoteProtocolError: it does not fit what was asked for; all that fitted is kept.
        """
        if isinstance(answer, TreeDump):
            self._replace(answer)
        elif isinstance(answer, Events):
            self._catch_up(answer)
        elif isinstance(answer, TooNew | InvalidRange):
            self._forget()
            return True
        else:
            return False
        self._release()
        return True

    def _replace(self, dump: TreeDump) -> None:
        if not dump.is_whole:
            raise RemoteProtocolError(f"a dump of {dump.reset_scope} where all was asked for")
        state = KvState(self.state.max_blocks)
        for event in dump.events:
            self._check(event)
            state.apply(event.change)
        self.state, self.last_event_id = state, dump.last_event_id
        self._newest = max(self._newest, dump.last_event_id)

    def _forget(self) -> None:
        """The publisher knows less than this view: begin again."""
        self.last_event_id, self._newest, self._weight = None, 0, 0
        self._held.clear()

    def _catch_up(self, answer: Events) -> None:
        for event in answer.events:
            self._check(event)
            if self.last_event_id is None:
                raise RemoteProtocolError("events where a dump was asked for")
            if event.event_id <= self.last_event_id:
                continue
            if event.event_id > self.last_event_id + 1 and event.change != Cleared():
                raise RemoteProtocolError(f"no event {self.last_event_id + 1} in the answer")
            self._apply(event)
        if self.last_event_id is None or self.last_event_id < answer.last_event_id:
            raise RemoteProtocolError(f"no event {answer.last_event_id} in the answer")
