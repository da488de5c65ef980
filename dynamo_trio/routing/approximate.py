"""Guesses what is in the KV caches of workers that do not tell (``--no-router-kv-events``).

What was routed to a worker is taken to be in its cache for a while (``--router-ttl-secs``,
120 s), and again from the beginning each time that it is routed there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.routing.tree import Holders, Node, Slots, below, let_go, match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.routing.abc import Target

#: Dynamo's default, in seconds.
TTL = 120.0
#: Blocks that are remembered at most, each once for each worker; the oldest go first.
MAX_BLOCKS = 2**20


@attrs.define(eq=False)
class _Guess:
    slot: int
    #: How many blocks are remembered with this slot.
    blocks: int = 0
    gone: bool = False


@attrs.define(eq=False)
class ApproximateIndex:
    """What was routed lately, as one tree. Times are seconds on the caller's clock."""

    ttl: float = TTL
    max_blocks: int = MAX_BLOCKS
    _root: Node = attrs.field(factory=Node, init=False)
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _guesses: dict[Target, _Guess] = attrs.field(factory=dict, init=False)
    # When each block was last routed, the longest ago first.
    _routed: OrderedDict[tuple[Node, _Guess], float] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        """How many blocks are remembered, each once for each worker."""
        return len(self._routed)

    def match(self, blocks: Sequence[int], now: float) -> Holders:
        """How many blocks of a prompt, from its beginning, each worker should have."""
        self.expire(now)
        return match(self._root, blocks, self._slots)

    def routed(self, target: Target, blocks: Sequence[int], now: float) -> None:
        """A prompt with these blocks went to ``target``."""
        self.expire(now)
        guess = self._guesses.get(target)
        if guess is None:
            guess = self._guesses[target] = _Guess(self._slots.take(target))
        node, bit = self._root, 1 << guess.slot
        for key in blocks:
            node = below(node, key)
            if not node.held & bit:
                node.held |= bit
                guess.blocks += 1
            self._routed[node, guess] = now
            self._routed.move_to_end((node, guess))
        while len(self._routed) > self.max_blocks:
            self._forget_oldest()

    def drop(self, target: Target) -> None:
        """The worker has gone. What is remembered of it goes with time."""
        guess = self._guesses.pop(target, None)
        if guess is not None:
            guess.gone = True
            self._slots.hide(target)
            self._settle(guess)

    def expire(self, now: float) -> None:
        """Forget what was routed too long ago."""
        while self._routed and next(iter(self._routed.values())) + self.ttl <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (node, guess), _ = self._routed.popitem(last=False)
        guess.blocks -= 1
        let_go(node, 1 << guess.slot)
        self._settle(guess)

    def _settle(self, guess: _Guess) -> None:
        if guess.gone and not guess.blocks:
            self._slots.give(guess.slot)
