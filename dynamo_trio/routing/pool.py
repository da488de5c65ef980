"""A set out of which one can be drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import random
    from collections.abc import Collection


@attrs.define(eq=False)
class Pool:
    """Worker ids. Everything takes constant time, but for one step per id that is left out.

    To draw without some of them, they are thought to stand at the end of the list: whoever
    really stands there takes the place of one of them further ahead.
    """

    # Invariant: the position of each id in the list.
    _places: dict[int, int] = attrs.field(factory=dict)
    _ids: list[int] = attrs.field(factory=list)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._places

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, worker_id: int) -> None:
        """Again: nothing happens."""
        if worker_id not in self._places:
            self._places[worker_id] = len(self._ids)
            self._ids.append(worker_id)

    def remove(self, worker_id: int) -> None:
        """The last one takes its place. Of one that is not there: nothing happens."""
        place = self._places.pop(worker_id, None)
        last = self._ids.pop() if place is not None else None
        if place is not None and last is not None and last != worker_id:
            self._ids[place] = last
            self._places[last] = place

    def draw(self, rng: random.Random, without: Collection[int], count: int = 1) -> tuple[int, ...]:
        """Up to ``count`` (1 or 2) different ids, each as likely as any other."""
        ids = self._ids
        if not without:
            left, standing = len(ids), None
        else:
            out = {self._places[i] for i in without if i in self._places}
            left = len(ids) - len(out)
            standing = self._standing(out, left)
        if left <= 0:
            return ()
        first = int(rng.random() * left)
        if count == 1 or left == 1:
            return (self._at(first, standing),)
        second = int(rng.random() * (left - 1))
        second += second >= first
        return self._at(first, standing), self._at(second, standing)

    def _standing(self, out: set[int], left: int) -> dict[int, int]:
        """Places ahead of ``left`` that are out -> the place whose id stands there instead."""
        instead = (place for place in range(left, len(self._ids)) if place not in out)
        return dict(zip((place for place in out if place < left), instead, strict=True))

    def _at(self, place: int, standing: dict[int, int] | None) -> int:
        return self._ids[place if standing is None else standing.get(place, place)]
