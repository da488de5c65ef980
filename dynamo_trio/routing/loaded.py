"""Modes that look at how many requests a worker has: ``power-of-two`` and ``least-loaded``.

What counts is what went through this router and is not over. Which of a worker's data-parallel
ranks takes a request is left to its engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.routing.abc import Ask, Target, refuse
from dynamo_trio.routing.pool import Pool
from dynamo_trio.routing.ranking import Ranking

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@attrs.define(eq=False)
class _Counts:
    """How many requests each worker has.

    A worker that comes again begins with none; requests of before still end, unnoticed.
    """

    # Invariant: a list of one number for each worker that is there.
    numbers: dict[int, list[int]] = attrs.field(factory=dict)
    # Request id -> its worker, and the number it is in.
    _requests: dict[str, tuple[int, list[int]]] = attrs.field(factory=dict)

    def begin(self, request_id: str, worker_id: int) -> int | None:
        """Returns how many the worker has now; None: it is not there, or knows the request."""
        number = self.numbers.get(worker_id)
        if number is None or request_id in self._requests:
            return None
        number[0] += 1
        self._requests[request_id] = worker_id, number
        return number[0]

    def end(self, request_id: str) -> tuple[int, int] | None:
        """Returns whose it was and how many are left; None if that matters to nobody."""
        worker_id, number = self._requests.pop(request_id, (0, None))
        if number is None:
            return None
        number[0] -= 1
        return (worker_id, number[0]) if self.numbers.get(worker_id) is number else None


@attrs.define(eq=False)
class PowerOfTwo:
    """``power-of-two``: of two at random, the one with fewer requests."""

    _rng: random.Random
    _pool: Pool = attrs.field(factory=Pool)
    _counts: _Counts = attrs.field(factory=_Counts)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._pool

    def __len__(self) -> int:
        return len(self._pool)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come."""
        self._pool.add(worker_id)
        self._counts.numbers.setdefault(worker_id, [0])

    def remove(self, worker_id: int) -> None:
        """A worker has gone."""
        self._pool.remove(worker_id)
        self._counts.numbers.pop(worker_id, None)

    def choose(self, ask: Ask) -> Target:
        """The better one of two. Raises NoWorker."""
        drawn = self._pool.draw(self._rng, ask.without, 2)
        if not drawn:
            refuse(ask)
        return Target(min(drawn, key=self._requests))

    def _requests(self, worker_id: int) -> int:
        return self._counts.numbers[worker_id][0]

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The worker has one more."""
        self._counts.begin(request_id, target.worker_id)

    def prefilled(self, request_id: str) -> None:
        """Nothing happens."""

    def grew(self, request_id: str, tokens: int) -> None:
        """Nothing happens."""

    def end(self, request_id: str) -> None:
        """Its worker has one less."""
        self._counts.end(request_id)


@attrs.define(eq=False)
class LeastLoaded:
    """``least-loaded``: who has fewest requests; among several, who has had that for longest."""

    _counts: _Counts = attrs.field(factory=_Counts)
    _ranking: Ranking[int] = attrs.field(factory=Ranking)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._ranking

    def __len__(self) -> int:
        return len(self._ranking)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come."""
        number = self._counts.numbers.setdefault(worker_id, [0])
        self._ranking.put(worker_id, number[0])

    def remove(self, worker_id: int) -> None:
        """A worker has gone."""
        self._counts.numbers.pop(worker_id, None)
        self._ranking.drop(worker_id)

    def choose(self, ask: Ask) -> Target:
        """Who has fewest. Raises NoWorker."""
        for _, worker_id in self._ranking.ascending():
            if worker_id not in ask.without:
                return Target(worker_id)
        refuse(ask)

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The worker has one more."""
        number = self._counts.begin(request_id, target.worker_id)
        if number is not None:
            self._ranking.put(target.worker_id, number)

    def prefilled(self, request_id: str) -> None:
        """Nothing happens."""

    def grew(self, request_id: str, tokens: int) -> None:
        """Nothing happens."""

    def end(self, request_id: str) -> None:
        """Its worker has one less."""
        if (left := self._counts.end(request_id)) is not None:
            self._ranking.put(*left)
