"""``kv``: the worker where a request costs least, given what is cached and under way where.

Theory of operation
-------------------
Most workers share nothing with a prompt. What these cost differs from each other by what they
have to do already, whatever the prompt is; so they are kept in the order of that, and of all of
them only the first one can be the best. Those that share something are few, and each is looked
at. So a choice takes one step a block of the prompt, one for each worker that holds any of it,
and one for each that may not be chosen.

With a temperature every worker has its chance, and all are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from dynamo_trio.routing.abc import Ask, Target, refuse
from dynamo_trio.routing.active import ActiveRequests, Load
from dynamo_trio.routing.cost import Costs, CostSettings, draw
from dynamo_trio.routing.ranking import Ranking

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence


class Index(Protocol):
    """What is, or should be, in whose cache."""

    def match(self, blocks: Sequence[int], now: float) -> dict[Target, int]:
        """How many blocks of a prompt, from its beginning, each cache has."""
        ...

    def routed(self, target: Target, blocks: Sequence[int], now: float) -> None:
        """A prompt went there."""
        ...

    def drop(self, target: Target) -> None:
        """A cache is not there any more."""
        ...


@attrs.define(eq=False)
class KvRouting:
    """``kv``. Whoever listens to the workers feeds ``index``, if it takes events."""

    #: Tokens.
    block_size: int
    index: Index
    _rng: random.Random
    settings: CostSettings = attrs.field(factory=CostSettings)
    active: ActiveRequests = attrs.field(init=False)
    # Worker -> its ranks.
    _workers: dict[int, tuple[Target, ...]] = attrs.field(factory=dict, init=False)
    # By what they cost by themselves.
    _ranking: Ranking[Target] = attrs.field(factory=Ranking, init=False)
    # By prefill tokens; empty unless there is a decay.
    _prefills: Ranking[Target] = attrs.field(factory=Ranking, init=False)

    def __attrs_post_init__(self) -> None:
        self.active = ActiveRequests(self.block_size, self._note)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    # --- who is there --------------------------------------------------------------------

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come, or its ranks have changed."""
        ranks = tuple(Target(worker_id, rank) for rank in dp_ranks)
        for target in set(self._workers.get(worker_id, ())) - set(ranks):
            self._forget(target)
        self._workers[worker_id] = ranks
        for target in ranks:
            self.active.add(target)

    def remove(self, worker_id: int) -> None:
        """A worker has gone, and its caches with it."""
        for target in self._workers.pop(worker_id, ()):
            self._forget(target)

    def _forget(self, target: Target) -> None:
        self.active.remove(target)
        self.index.drop(target)
        self._ranking.drop(target)
        self._prefills.drop(target)

    def _note(self, load: Load) -> None:
        self._ranking.put(load.target, self.settings.base(load, self.block_size))
        if self.settings.overlap_score_credit_decay:
            self._prefills.put(load.target, load.prefill_tokens)

    # --- the choice ----------------------------------------------------------------------

    def choose(self, ask: Ask) -> Target:
        """Where it costs least, or with a temperature probably little. Raises NoWorker."""
        overlaps = self.index.match(ask.blocks, ask.now)
        counted = self.settings.router_track_active_blocks
        shared = self.active.match(ask.blocks) if counted else {}
        costs = Costs(
            *(self.settings, self.block_size, ask.tokens),
            len(ask.blocks) if counted else 0,
            self._least_prefill(ask),
        )
        if self.settings.router_temperature:
            return self._drawn(ask, costs, overlaps, shared)
        best, chosen = self._best_of_those(ask, costs, overlaps, shared)
        for target in self._rest(ask, costs.more, best, overlaps, shared):
            return target
        return chosen or refuse(ask)

    def _best_of_those(
        self, ask: Ask, costs: Costs, overlaps: Mapping[Target, int], shared: Mapping[Target, int]
    ) -> tuple[float, Target | None]:
        """The best of those who share something; among equal ones, any."""
        best, chosen, equal = float("inf"), None, 0
        loads, without = self.active.loads, ask.without
        for target in overlaps.keys() | shared.keys() if shared else overlaps:
            load = loads.get(target)
            if load is None or target.worker_id in without:
                continue
            cost = costs.of(load, overlaps.get(target, 0), shared.get(target, 0))
            if cost < best:
                best, chosen, equal = cost, target, 1
            elif cost == best:
                equal += 1
                if self._rng.random() * equal < 1:
                    chosen = target
        return best, chosen

    def _rest(
        self,
        ask: Ask,
        more: float,
        best: float,
        overlaps: Mapping[Target, int],
        shared: Mapping[Target, int],
    ) -> Iterator[Target]:
        """Those who share nothing and cost less than the best of the others; the best first."""
        for base, target in self._ranking.ascending():
            if base + more >= best:
                return  # nobody behind this one costs less
            if target in overlaps or target in shared or target.worker_id in ask.without:
                continue
            yield target

    def _least_prefill(self, ask: Ask) -> int:
        for tokens, target in self._prefills.ascending():
            if target.worker_id not in ask.without:
                return int(tokens)
        return 0

    def _drawn(
        self, ask: Ask, costs: Costs, overlaps: Mapping[Target, int], shared: Mapping[Target, int]
    ) -> Target:
        targets = [t for t in self.active.loads if t.worker_id not in ask.without]
        if not targets:
            refuse(ask)
        loads = self.active.loads
        all_costs = [
            costs.of(loads[target], overlaps.get(target, 0), shared.get(target, 0))
            for target in targets
        ]
        return targets[draw(all_costs, self.settings.router_temperature, self._rng)]

    # --- requests ------------------------------------------------------------------------

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The request goes to ``target``, a rank."""
        settings = self.settings
        cached = self.index.match(ask.blocks, ask.now).get(target, 0) * self.block_size
        tokens = ask.tokens if settings.router_track_prefill_tokens else 0
        blocks = ask.blocks if settings.router_track_active_blocks else ()
        self.active.begin(request_id, target, tokens, blocks, cached)
        if target in self.active.loads:
            self.index.routed(target, ask.blocks, ask.now)

    def prefilled(self, request_id: str) -> None:
        """Its first token has come."""
        self.active.prefilled(request_id)

    def grew(self, request_id: str, tokens: int) -> None:
        """So many more tokens have come."""
        if self.settings.router_track_output_blocks:
            self.active.grew(request_id, tokens)

    def end(self, request_id: str) -> None:
        """It is over."""
        self.active.end(request_id)
