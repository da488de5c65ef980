"""Which workers are too busy to be asked (Dynamo's busy thresholds and ``/busy_threshold``).

Theory of operation
-------------------
Workers tell their load (``kv_metrics``), their cards tell what they can bear. A worker is busy
while *each* of its data-parallel ranks is above one of the thresholds of the model, whichever;
it is idle while nothing is known of it: a worker that says nothing must not be shut out. Busy
workers are left out of the choice, and if that is everybody who could be asked, the request is
refused as overloaded without asking anyone.

Nothing here waits. :func:`~dynamo_trio.frontend.loads.follow_loads` brings what is told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from dynamo_trio.errors import InvalidArgument, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dynamo_trio.discovery import EndpointId
    from dynamo_trio.frontend.keeper import ServedModel
    from dynamo_trio.wire.dynamo.kv_events import KvMetrics

T = TypeVar("T")

ALL_BUSY = "All workers are busy, please retry later."


@attrs.frozen
class BusyThresholds:
    """What makes a worker busy; above one of them it is. None: this one is not looked at."""

    #: Part of the KV cache's blocks that are used, or that running requests need, 0..1
    #: (``DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD``).
    active_decode_blocks_threshold: float | None = None
    #: Tokens of prompts that are still to be computed (``DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD``).
    active_prefill_tokens_threshold: int | None = None
    #: The same, as a multiple of the tokens that one step takes
    #: (``DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC``).
    active_prefill_tokens_threshold_frac: float | None = None
    #: Is anything looked at?
    wanted: bool = attrs.field(init=False, eq=False, repr=False)

    @wanted.default
    def _wanted_default(self) -> bool:
        return not (
            self.active_decode_blocks_threshold is None
            and self.active_prefill_tokens_threshold is None
            and self.active_prefill_tokens_threshold_frac is None
        )

    def __attrs_post_init__(self) -> None:
        _check("active_decode_blocks_threshold", self.active_decode_blocks_threshold, 1.0)
        tokens, frac = "active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac"
        _check(tokens, self.active_prefill_tokens_threshold, math.inf)
        _check(frac, self.active_prefill_tokens_threshold_frac, math.inf)

    def exceeded(self, load: KvMetrics, capacity: Capacity) -> bool:
        """Is one cache with this load above one of them?"""
        # What is not told, or 0 as a capacity, is above nothing.
        prefill, step = load.active_prefill_tokens or 0, capacity.max_num_batched_tokens or 0
        tokens, frac = (
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )
        if tokens is not None and prefill > tokens:
            return True
        if frac is not None and step > 0 and prefill > frac * step:
            return True
        blocks, total = self.active_decode_blocks_threshold, capacity.total_kv_blocks or 0
        # Some publishers tell only one of these, and 1.5.1 looks at both.
        used = max(load.active_decode_blocks or 0, load.kv_used_blocks or 0)
        return blocks is not None and total > 0 and used > blocks * total


def _check(name: str, value: float | None, most: float) -> None:
    if value is not None and not (math.isfinite(value) and 0 <= value <= most):
        bounds = "of 0 or more" if most == math.inf else "from 0.0 to 1.0"
        raise InvalidArgument(f"{name} must be a number {bounds}", param=name)


_NONE = BusyThresholds()


@attrs.frozen
class Capacity:
    """What a worker's card says that each of its ranks can bear; None: it does not say."""

    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None


@attrs.define(eq=False)
class BusyWorkers:
    """The thresholds of all models, and who is above them."""

    #: Of models for which nothing was set at run time.
    defaults: BusyThresholds = _NONE
    #: Model -> what was set for it.
    thresholds: dict[str, BusyThresholds] = attrs.field(factory=dict)
    #: The last word of each cache on its load: endpoint -> worker -> rank. Empty while nobody
    #: follows the workers.
    loads: Callable[[EndpointId], Mapping[int, Mapping[int, KvMetrics]]] = lambda _: {}
    #: What a worker's card says.
    capacity: Callable[[EndpointId, int], Capacity] = lambda endpoint, worker: Capacity()
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: Who is busy, until something changes; None: nobody tells when that is, so each request looks.
    #: Invariant: only of models that were asked for since the last change.
    _found: dict[ServedModel, frozenset[int]] | None = None

    def follow(
        self,
        loads: Callable[[EndpointId], Mapping[int, Mapping[int, KvMetrics]]],
        capacity: Callable[[EndpointId, int], Capacity],
    ) -> None:
        """Ask these from now on; whoever changes what they say calls :meth:`note_change`."""
        self.loads, self.capacity, self._found = loads, capacity, {}

    def note_change(self) -> None:
        """Somebody's load, or capacity, has changed, or is not known any more."""
        if self._found:
            self._found.clear()

    @property
    def wanted(self) -> bool:
        """Is there a threshold for any model?"""
        return self.defaults.wanted or any(t.wanted for t in self.thresholds.values())

    async def wait_wanted(self) -> None:
        """Wait until there is one."""
        await trio.lowlevel.checkpoint()
        while not self.wanted:
            await self._changed.park()

    def get(self, model: str) -> BusyThresholds:
        """The thresholds of this model."""
        return self.thresholds.get(model, self.defaults)

    def set(
        self,
        model: str,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> BusyThresholds:
        """Change the thresholds of this model; what is None stays. Returns what holds now.

        Raises:
            InvalidArgument: one of them is out of its bounds.
        """
        now = self.get(model)
        self.thresholds[model] = BusyThresholds(
            _or(active_decode_blocks_threshold, now.active_decode_blocks_threshold),
            _or(active_prefill_tokens_threshold, now.active_prefill_tokens_threshold),
            _or(active_prefill_tokens_threshold_frac, now.active_prefill_tokens_threshold_frac),
        )
        self._changed.unpark_all()
        self.note_change()
        return self.thresholds[model]

    def busy(self, model: ServedModel) -> frozenset[int]:
        """The ids of the instances behind this model that are busy now."""
        if self._found is None:
            return self._look(model)
        found = self._found.get(model)
        if found is None:
            found = self._found[model] = self._look(model)
        return found

    def _look(self, model: ServedModel) -> frozenset[int]:
        thresholds = self.get(model.name)
        if not thresholds.wanted:
            return _NOBODY
        endpoint = model.client.endpoint
        found = set()
        for worker, ranks in self.loads(endpoint).items():
            if _is_busy(thresholds, ranks.values(), self.capacity(endpoint, worker)):
                found.add(worker)
        return frozenset(found) if found else _NOBODY

    def check(self, model: ServedModel) -> None:
        """Refuse a request for which nobody is there who is not busy.

        Raises:
            Overloaded: every worker is busy.
        """
        busy = self.busy(model)
        if busy and busy.issuperset(model.client.instance_ids()):
            raise Overloaded(ALL_BUSY)


def _or(given: T | None, else_: T | None) -> T | None:
    return else_ if given is None else given


def _is_busy(thresholds: BusyThresholds, ranks: Iterable[KvMetrics], capacity: Capacity) -> bool:
    """All of its caches are, as far as they have told of their load."""
    told = False
    for load in ranks:
        told = True
        if not thresholds.exceeded(load, capacity):
            return False
    return told


_NOBODY: frozenset[int] = frozenset()
