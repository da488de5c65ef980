"""What it would cost to give a request to a worker, in blocks: the formula of Dynamo 1.5.1.

Theory of operation
-------------------
For a prompt of ``tokens`` tokens, in blocks of ``block_size``::

    raw_prefill_blocks      = (prefill_tokens of the worker + tokens) / block_size
    overlap_credit_blocks   = overlap_score_credit * decay * overlap
    adjusted_prefill_blocks = max(0, raw_prefill_blocks - overlap_credit_blocks)
    decode_blocks           = active blocks of the worker + full blocks of the prompt that are
                              not active there
    cost = prefill_load_scale * adjusted_prefill_blocks + decode_blocks
           + decode_active_request_weight * requests of the worker

    decay = 1 / (1 + overlap_score_credit_decay * excess / ceil(tokens / block_size))
    excess = (prefill_tokens of the worker - the least of all eligible) / block_size

Least cost wins. With a temperature a worker is drawn: the weight of each is
``exp(-(cost - least) / ((greatest - least) * temperature))``.

The lines of the first block are those that the 1.5.1 wheel writes to its log for each worker
("... = prefill_load_scale * adjusted_prefill_blocks + decode_blocks + active_request_cost_blocks");
decay and softmax are those of ``lib/kv-router/src/scheduling/selector/default.rs``. Without
``track_prefill_tokens`` raw_prefill_blocks is 0 there, and so it is here. Not here: credits for
host memory, disk and shared caches, of which our index knows nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from dynamo_trio.routing.active import Load


def _not_negative(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"{attribute.name} must be a number of 0 or more")


def _weight(default: float) -> float:
    return attrs.field(default=default, validator=_not_negative)


@attrs.frozen(kw_only=True)
class CostSettings:
    """How costs are weighed. Raises InvalidArgument where a number is below 0 or not finite."""

    #: What a block in the cache is worth (``--router-kv-overlap-score-credit``).
    overlap_score_credit: float = _weight(1.0)
    #: By how much less, where prefill piles up (``--router-kv-overlap-score-credit-decay``).
    overlap_score_credit_decay: float = _weight(0.0)
    #: What a block of prefill costs (``--router-prefill-load-scale``).
    prefill_load_scale: float = _weight(1.0)
    #: What each request costs (``--router-decode-active-request-weight``).
    decode_active_request_weight: float = _weight(0.0)
    #: 0: the least cost wins (``--router-temperature``).
    router_temperature: float = _weight(0.0)
    #: Does prefill count (``--router-track-prefill-tokens``)?
    router_track_prefill_tokens: bool = True
    #: Do the full blocks of running requests count (``--router-track-active-blocks``)?
    router_track_active_blocks: bool = True
    #: And those of their answers (``--router-track-output-blocks``)?
    router_track_output_blocks: bool = False

    def base(self, load: Load, block_size: int) -> float:
        """What a worker costs by itself: for a request that shares nothing with it, this is
        the cost but for a number that is the same for all workers."""
        prefill = self.prefill_load_scale * load.prefill_tokens / block_size
        return prefill + load.blocks + self.decode_active_request_weight * load.requests


@attrs.frozen
class Costs:
    """The costs of one request."""

    settings: CostSettings
    #: Tokens.
    block_size: int
    tokens: int
    #: Full blocks that would become active; 0 if these do not count.
    blocks: int
    #: The least prefill tokens of all who may be asked; needed only with decay.
    least_prefill: int = 0

    def of(self, load: Load, overlap: int, shared: int) -> float:
        """The cost at one worker.

        Args:
            overlap: blocks of the prompt that are in its cache.
            shared: full blocks of the prompt that are active there.
        """
        settings = self.settings
        prefill = 0.0
        if settings.router_track_prefill_tokens:
            credit = settings.overlap_score_credit * overlap
            if settings.overlap_score_credit_decay and overlap:
                credit /= 1.0 + settings.overlap_score_credit_decay * self._excess(load)
            raw = (load.prefill_tokens + self.tokens) / self.block_size
            prefill = settings.prefill_load_scale * max(0.0, raw - credit)
        decode = load.blocks + self.blocks - shared
        return prefill + decode + settings.decode_active_request_weight * load.requests

    @property
    def more(self) -> float:
        """What is added to :meth:`CostSettings.base` where nothing is shared."""
        prefill = self.settings.router_track_prefill_tokens * self.tokens / self.block_size
        return self.settings.prefill_load_scale * prefill + self.blocks

    def saved(self, overlap: int, shared: int) -> float:
        """What so many blocks may save at most."""
        settings = self.settings
        return settings.prefill_load_scale * settings.overlap_score_credit * overlap + shared

    def _excess(self, load: Load) -> float:
        """Prefill above the least, in requests of this size."""
        excess = max(0, load.prefill_tokens - self.least_prefill) / self.block_size
        return excess / max(1, -(-self.tokens // self.block_size))


def draw(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """Which one of at least one, by a softmax of the costs scaled to the range 0 to 1."""
    least, greatest = min(costs), max(costs)
    if least == greatest:
        return int(rng.random() * len(costs))
    scale = -1.0 / ((greatest - least) * temperature)
    weights = [math.exp((cost - least) * scale) for cost in costs]
    rest = rng.random() * math.fsum(weights)
    for place, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return place
    return costs.index(least)
