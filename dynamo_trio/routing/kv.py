"""``kv``: the worker where a request costs least, given what is cached and under way where.

Theory of operation
-------------------
Most workers share nothing with a prompt. What these cost differs from each other by what they
have to do already, whatever the prompt is; so all are kept in the order of that. Of those that
share something the ones with the longest beginning are looked at, up to :data:`FEW`. Then the
others are gone through in their order until no one who is left can be better: what sharing can
save them is known, since it is no longer than the longest that was not looked at.

So a choice takes one step a block of the prompt, one for each of the few, and as a rule one or
two more; more than that only where many share as much as the best one, and have as little to do.
That all prompts begin with the same blocks, and all workers have them, costs nothing.

With a temperature every worker has its chance, and all are looked at.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import attrs

from dynamo_trio.routing.abc import Ask, Target, refuse
from dynamo_trio.routing.active import ActiveRequests, Load
from dynamo_trio.routing.cost import Costs, CostSettings, draw
from dynamo_trio.routing.ranking import Ranking

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dynamo_trio.routing.tree import Holders

#: Of those that share something with a prompt, how many are looked at in any case, at most.
FEW = 32


class Index(Protocol):
    """What is, or should be, in whose cache."""

    def match(self, blocks: Sequence[int], now: float) -> Holders:
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
    # The last choice, and how many blocks are cached there: most often it is what begins next.
    _last: tuple[Ask, Target, int] | None = attrs.field(default=None, init=False)
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
        counted = self.settings.router_track_active_blocks
        search = _Search(
            self.active.loads,
            ask.without,
            Costs(
                *(self.settings, self.block_size, ask.tokens),
                len(ask.blocks) if counted else 0,
                self._least_prefill(ask),
            ),
            self.index.match(ask.blocks, ask.now),
            self.active.match(ask.blocks if counted else ()),
        )
        if self.settings.router_temperature:
            chosen = search.drawn(self._rng)
        else:
            chosen = search.best(self._rng, self._ranking)
        if chosen is None:
            refuse(ask)
        self._last = ask, chosen, search.overlaps.of(chosen)
        return chosen

    def _cached(self, target: Target, ask: Ask) -> int:
        last = self._last
        if last is not None and last[0] is ask and last[1] == target:
            return last[2]
        return self.index.match(ask.blocks, ask.now).of(target)

    def _least_prefill(self, ask: Ask) -> int:
        for tokens, target in self._prefills.ascending():
            if target.worker_id not in ask.without:
                return int(tokens)
        return 0

    # --- requests ------------------------------------------------------------------------

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The request goes to ``target``, a rank."""
        settings = self.settings
        cached = self._cached(target, ask) * self.block_size
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


@attrs.define(eq=False)
class _Search:
    """One choice."""

    _loads: Mapping[Target, Load]
    _without: Collection[int]
    _costs: Costs
    #: Who has the prompt in its cache.
    overlaps: Holders
    #: Where it is active.
    _shared: Holders

    def best(self, rng: random.Random, ranking: Ranking[Target]) -> Target | None:
        """Whom it costs least; among equal ones of the few, any."""
        overlaps, most_overlap = self.overlaps.deepest(FEW)
        shared, most_shared = self._shared.deepest(FEW)
        few = overlaps.keys() | shared.keys() if shared else overlaps.keys()
        least, chosen = self._best_of(few, rng)
        more = self._costs.more - self._costs.saved(most_overlap, most_shared)
        for base, target in ranking.ascending():
            if base + more >= least:
                break  # nobody behind this one costs less
            if target in few or target.worker_id in self._without:
                continue
            if (cost := self._cost(target)) < least:
                least, chosen = cost, target
        return chosen

    def _best_of(self, few: Iterable[Target], rng: random.Random) -> tuple[float, Target | None]:
        least, chosen, equal = math.inf, None, 0
        for target in few:
            if target not in self._loads or target.worker_id in self._without:
                continue
            cost = self._cost(target)
            if cost < least:
                least, chosen, equal = cost, target, 1
            elif cost == least:
                equal += 1
                if rng.random() * equal < 1:
                    chosen = target
        return least, chosen

    def drawn(self, rng: random.Random) -> Target | None:
        """Anybody, but most probably somebody whom it costs little."""
        targets = [t for t in self._loads if t.worker_id not in self._without]
        if not targets:
            return None
        costs = [self._cost(target) for target in targets]
        return targets[draw(costs, self._costs.settings.router_temperature, rng)]

    def _cost(self, target: Target) -> float:
        overlap, shared = self.overlaps.of(target), self._shared.of(target)
        return self._costs.of(self._loads[target], overlap, shared)
