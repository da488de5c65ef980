"""Keeps things in the order of a number that changes often, and gives the least ones."""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

K = TypeVar("K", bound="Hashable")

#: Entries that may be out of date before they are thrown away, besides one for each key.
_SLACK = 64


@attrs.define(eq=False)
class Ranking(Generic[K]):
    """Keys by their values; among equal values, whose has not changed for longest comes first.

    A heap whose entries are not moved: a change adds one, and the old one is known by not
    being the key's latest. So a change takes O(log n), and the least one O(1) after that.
    """

    _latest: dict[K, tuple[float, int, K]] = attrs.field(factory=dict)
    # Invariant: holds each latest entry; at its top is one of them.
    _heap: list[tuple[float, int, K]] = attrs.field(factory=list)
    # No two entries have the same number, so keys are never compared.
    _number: itertools.count[int] = attrs.field(factory=itertools.count)

    def __contains__(self, key: object) -> bool:
        return key in self._latest

    def __len__(self) -> int:
        return len(self._latest)

    def put(self, key: K, value: float) -> None:
        """The key has this value now. The same again: it keeps its place."""
        known = self._latest.get(key)
        if known is not None and known[0] == value:
            return
        self._latest[key] = entry = (value, next(self._number), key)
        heappush(self._heap, entry)
        self._tidy()

    def drop(self, key: K) -> None:
        """The key is not there any more."""
        if self._latest.pop(key, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._latest) + _SLACK:
            self._heap = list(self._latest.values())
            heapify(self._heap)
        while self._heap and self._latest.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)

    def ascending(self) -> Iterator[tuple[float, K]]:
        """Value and key of all, the least first. ``k`` steps take O(k log k).

        Nothing may change meanwhile. The heap stays as it is: what lies below an entry is
        looked at when the entry has been given.
        """
        heap, latest = self._heap, self._latest
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heappop(ahead)
            if latest.get(entry[2]) is entry:
                yield entry[0], entry[2]
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heappush(ahead, (heap[below], below))
