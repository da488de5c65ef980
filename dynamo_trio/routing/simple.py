"""Modes that look at no load: ``round-robin``, ``random`` and ``direct``."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import InvalidArgument, NoWorker
from dynamo_trio.routing.abc import Ask, Target, Unbooked, refuse
from dynamo_trio.routing.pool import Pool

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@attrs.define(eq=False)
class _Turn:
    """Who was chosen is the last to be chosen again; who comes, comes last."""

    # An OrderedDict: a plain one gets slow at its front.
    _line: OrderedDict[int, None] = attrs.field(factory=OrderedDict)

    def add(self, worker_id: int) -> None:
        self._line.setdefault(worker_id)

    def remove(self, worker_id: int) -> None:
        self._line.pop(worker_id, None)

    def next(self, ask: Ask) -> int:
        without = ask.without
        for worker_id in self._line:
            if worker_id not in without:
                break
        else:
            refuse(ask)
        self._line.move_to_end(worker_id)
        return worker_id


@attrs.define(eq=False)
class RoundRobin(Unbooked):
    """``round-robin``: whoever has waited longest.

    Requests that leave workers out take turns of their own. Else a worker that refuses would
    be the first one of every other request: with two workers, each second try, at the other
    one, would make it the refusing one's turn again.
    """

    _turn: _Turn = attrs.field(factory=_Turn)
    _turn_again: _Turn = attrs.field(factory=_Turn)
    _known: set[int] = attrs.field(factory=set)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come. It waits for its turn as everybody else."""
        self._known.add(worker_id)
        self._turn.add(worker_id)
        self._turn_again.add(worker_id)

    def remove(self, worker_id: int) -> None:
        """A worker has gone."""
        self._known.discard(worker_id)
        self._turn.remove(worker_id)
        self._turn_again.remove(worker_id)

    def choose(self, ask: Ask) -> Target:
        """Who is next. Raises NoWorker."""
        return Target((self._turn_again if ask.without else self._turn).next(ask))


@attrs.define(eq=False)
class Random(Unbooked):
    """``random``: anybody."""

    _rng: random.Random
    _pool: Pool = attrs.field(factory=Pool)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._pool

    def __len__(self) -> int:
        return len(self._pool)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come."""
        self._pool.add(worker_id)

    def remove(self, worker_id: int) -> None:
        """A worker has gone."""
        self._pool.remove(worker_id)

    def choose(self, ask: Ask) -> Target:
        """Anybody who may be asked. Raises NoWorker."""
        drawn = self._pool.draw(self._rng, ask.without)
        return Target(drawn[0]) if drawn else refuse(ask)


@attrs.define(eq=False)
class Direct(Unbooked):
    """``direct``: whom the request names."""

    _known: set[int] = attrs.field(factory=set)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come."""
        self._known.add(worker_id)

    def remove(self, worker_id: int) -> None:
        """A worker has gone."""
        self._known.discard(worker_id)

    def choose(self, ask: Ask) -> Target:
        """The worker that is named, and nobody else.

        Raises:
            InvalidArgument: none is named.
            NoWorker: it is not there, or may not be asked.
        """
        if ask.worker_id is None:
            raise InvalidArgument("with direct routing a request names its worker")
        if ask.worker_id not in self._known or ask.worker_id in ask.without:
            raise NoWorker(f"worker {ask.worker_id:x} cannot be asked")
        return Target(ask.worker_id)
