"""The publisher's side of one KV cache: numbers its changes and answers for them.

Changes get their event ids here, from 1 in steps of 1. The newest are kept, so that who
missed a few is told just these; who missed more, or knows nothing yet, gets a dump.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.wire.dynamo.kv_events import RouterEvent
from dynamo_trio.wire.dynamo.kv_query import (
    Error,
    Events,
    InvalidRange,
    TooNew,
    TreeDump,
    TreeDumpFailed,
)
from dynamo_trio.wire.dynamo.kv_state import KvState

if TYPE_CHECKING:
    from dynamo_trio.wire.dynamo.kv_events import Cleared, Removed, Stored
    from dynamo_trio.wire.dynamo.kv_query import Answer, KvQuery

#: How many blocks and events the kept events have in all.
KEPT = 2**16
#: Bytes of the largest dump, as JSON at worst. A request plane carries 32 MiB.
MAX_DUMP = 30 * 2**20

_EVENT_BYTES, _BLOCK_BYTES = 224, 80


@attrs.define(eq=False)
class KvLog:
    """The changes of one cache: one worker, one data-parallel rank."""

    worker_id: int
    dp_rank: int = 0
    kept: int = KEPT
    max_dump: int = MAX_DUMP  # bytes
    #: What all changes so far add up to.
    state: KvState = attrs.field(factory=KvState, init=False)
    last_event_id: int = attrs.field(default=0, init=False)
    # Invariant: the newest events, without a gap up to ``last_event_id``.
    _events: deque[RouterEvent] = attrs.field(factory=deque, init=False)
    # Invariant: their weights; not above ``kept`` after a change.
    _weight: int = attrs.field(default=0, init=False)

    def record(self, change: Stored | Removed | Cleared) -> RouterEvent:
        """A change has happened; the event that tells others.

        Raises:
            RemoteProtocolError: more blocks than any cache has; nothing was recorded.
        """
        self.state.apply(change)
        self.last_event_id += 1
        event = RouterEvent.of(self.worker_id, self.last_event_id, change, self.dp_rank)
        self._events.append(event)
        self._weight += event.weight
        while self._weight > self.kept:
            self._weight -= self._events.popleft().weight
        return event

    def answer(self, query: KvQuery) -> Answer:
        """What there is to say to a question. A dump takes a microsecond for each block."""
        if (wrong := self._wrong(query)) is not None:
            return wrong
        start, newest = query.start_event_id, self.last_event_id
        if start is None or newest == 0:
            return self._dump(query)
        if start > newest:
            end = newest if query.end_event_id is None else query.end_event_id
            return TooNew(requested_start=start, requested_end=end, newest_available=newest)
        if start <= newest - len(self._events):
            return self._dump(query)
        first = len(self._events) - (newest - start + 1)
        events = tuple(itertools.islice(self._events, first, None))
        return Events(events=events, last_event_id=newest)

    def _wrong(self, query: KvQuery) -> Answer | None:
        start, end = query.start_event_id, query.end_event_id
        if not query.is_recovery:
            return Error("KV state-agent queries are not supported by this endpoint")
        if (query.worker_id, query.dp_rank) != (self.worker_id, self.dp_rank):
            return Error(
                f"asked for worker {query.worker_id}, dp_rank {query.dp_rank}; "
                f"this is worker {self.worker_id}, dp_rank {self.dp_rank}"
            )
        if start is not None and end is not None and end < start:
            return InvalidRange(start_id=start, end_id=end)
        return None

    def _dump(self, query: KvQuery) -> Answer:
        changes = list(self.state.dump())
        size = len(changes) * _EVENT_BYTES + len(self.state) * _BLOCK_BYTES
        if size > self.max_dump:
            why = f"a dump of {len(self.state)} blocks is larger than {self.max_dump} bytes"
            if not query.supports_tree_dump_failed:
                return Error(why)
            return TreeDumpFailed(last_event_id=self.last_event_id, message=why)
        events = tuple(
            RouterEvent.of(self.worker_id, number, change, self.dp_rank)
            for number, change in enumerate(changes)
        )
        return TreeDump(events=events, last_event_id=self.last_event_id)
