"""What readers believe of one bucket, and when they stop believing it. No I/O, no clock.

Theory of operation
-------------------
The view changes in two ways: by the changes of a watch, and by a comparison with all that
is there after the watch had broken off. A key that is missing in a comparison, or removed
while an outage is not yet forgotten, becomes *doubtful*: it stays in the view. If it is put
back with the same value nobody hears of all this; if it is still missing at its time, it is
removed. A key that is removed in quiet times goes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery.store import StorePut, StoreRemoved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.discovery.store import StoreChange


@attrs.define(eq=False)
class View:
    """Keys and values; every method returns the changes that readers must be told.

    Invariant: ``doubtful`` names only keys that are in ``known``.
    """

    #: Seconds of the store being there for which a doubtful key is kept.
    hold: float
    known: dict[str, bytes] = attrs.field(factory=dict)
    #: key -> the time before which it is not removed
    doubtful: dict[str, float] = attrs.field(factory=dict)

    def put(self, key: str, value: bytes) -> list[StoreChange]:
        """The key has this value in the store."""
        self.doubtful.pop(key, None)
        if self.known.get(key) == value:
            return []
        self.known[key] = value
        return [StorePut(key, value)]

    def remove(self, key: str, now: float, *, in_doubt: bool) -> list[StoreChange]:
        """The key is not in the store any more. One that is doubtful keeps its time."""
        if key not in self.known or key in self.doubtful:
            return []
        if in_doubt:
            self.doubtful[key] = now + self.hold
            return []
        return [self._drop(key)]

    def misses(self, there: Mapping[str, bytes]) -> bool:
        """Something of the view is not there."""
        return not self.known.keys() <= there.keys()

    def compare(
        self, there: Mapping[str, bytes], now: float, *, in_doubt: bool
    ) -> list[StoreChange]:
        """This, and nothing else, is in the store."""
        changes = [change for key, value in there.items() for change in self.put(key, value)]
        for key in self.known.keys() - there.keys():
            changes += self.remove(key, now, in_doubt=in_doubt)
        return changes

    def expire(self, now: float) -> list[StoreChange]:
        """Nobody has put these back in time."""
        due = [key for key, time in self.doubtful.items() if time <= now]
        return [self._drop(key) for key in due]

    def _drop(self, key: str) -> StoreChange:
        del self.known[key]
        self.doubtful.pop(key, None)
        return StoreRemoved(key)
