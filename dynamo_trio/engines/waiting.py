"""The requests that wait for room, in the order in which they get it."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.engines.protocol import Request


@define(eq=False)
class WaitingLine:
    """By priority (lower first), then by arrival. A request may leave from anywhere."""

    _heap: list[tuple[int, int, Request]] = field(factory=list, init=False)
    # Invariant: exactly the requests that wait; the heap may hold ones that have left.
    _places: dict[str, int] = field(factory=dict, init=False)
    _arrivals: Iterator[int] = field(factory=count, init=False)

    def __len__(self) -> int:
        return len(self._places)

    def push(self, request: Request) -> None:
        """Let a request wait."""
        place = next(self._arrivals)
        self._places[request.request_id] = place
        heapq.heappush(self._heap, (request.priority, place, request))

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        while self._heap:
            _, place, request = self._heap[0]
            if self._places.get(request.request_id) == place:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the request that :meth:`peek` shows."""
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        del self._places[request.request_id]
        return request

    def remove(self, request_id: str) -> bool:
        """Let a request leave; False if it does not wait here."""
        return self._places.pop(request_id, None) is not None
