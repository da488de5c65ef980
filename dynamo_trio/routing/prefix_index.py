"""Which beginnings of prompts are in whose KV cache, from what the workers tell.

Events come in order and without gaps (:class:`~dynamo_trio.wire.dynamo.kv_view.KvView` sees to
that). After a gap, :meth:`PrefixIndex.replace` takes the place of all that was known of one
cache. Memory is bounded by what the caches hold, and by ``max_blocks`` each, whatever a
publisher says.

As in Dynamo's ``RadixTree``, a block whose parent is not there is not taken in: nobody can say
of which prompt it is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.routing.tree import Holders, Node, Slots, below, let_go, match
from dynamo_trio.wire.dynamo.kv_events import Cleared, Removed, Stored
from dynamo_trio.wire.dynamo.kv_state import MAX_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_trio.routing.abc import Target
    from dynamo_trio.wire.dynamo.kv_events import Change

#: Blocks of caches that have gone which one event sweeps out, at least.
_SWEEP = 64


@attrs.define(eq=False)
class _Cache:
    slot: int
    #: Block hash -> where it stands.
    nodes: dict[int, Node] = attrs.field(factory=dict)
    #: How many more block hashes than one stand at the same node, where that is so.
    doubles: dict[Node, int] = attrs.field(factory=dict)

    @property
    def bit(self) -> int:
        return 1 << self.slot

    def put(self, block_hash: int, node: Node, bit: int) -> None:
        before = self.nodes.get(block_hash)
        if before is node:
            return
        if node.held & bit:
            self.doubles[node] = self.doubles.get(node, 0) + 1
        node.held |= bit
        self.nodes[block_hash] = node
        if before is not None:
            self.leave(before, bit)

    def leave(self, node: Node, bit: int) -> None:
        more = self.doubles.pop(node, 0)
        if more > 1:
            self.doubles[node] = more - 1
        elif not more:
            let_go(node, bit)


@attrs.define(eq=False)
class PrefixIndex:
    """The caches of a fleet as one tree.

    A lookup takes one step a block, and one for each cache that holds any of it. To store or
    remove a block takes constant time, to drop a cache as well: its blocks are swept out with
    the events that follow.
    """

    max_blocks: int = MAX_BLOCKS
    #: Blocks that were told of and whose parents are not there.
    orphans: int = attrs.field(default=0, init=False)
    _root: Node = attrs.field(factory=Node, init=False)
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _caches: dict[Target, _Cache] = attrs.field(factory=dict, init=False)
    # Invariant: none of them counts; each has its slot until it is empty.
    _leaving: deque[_Cache] = attrs.field(factory=deque, init=False)

    def __len__(self) -> int:
        """How many blocks are held, each once for each cache."""
        return sum(len(cache.nodes) for cache in self._caches.values())

    def targets(self) -> set[Target]:
        """Whose caches there are."""
        return set(self._caches)

    def match(self, blocks: Sequence[int], now: float = 0.0) -> Holders:
        """How many blocks of a prompt, from its beginning, each cache has."""
        return match(self._root, blocks, self._slots)

    def routed(self, target: Target, blocks: Sequence[int], now: float) -> None:
        """Nothing happens: the worker will tell what becomes of it."""

    # --- what workers tell ---------------------------------------------------------------

    def apply(self, target: Target, change: Change) -> None:
        """Let a change happen to one cache. What is not known changes nothing.

        Raises:
            RemoteProtocolError: it would have more than ``max_blocks``; what fits is kept.
        """
        if isinstance(change, Stored):
            self._store(self._cache(target), change)
            self.sweep(2 * len(change.blocks) + _SWEEP)
        elif isinstance(change, Removed):
            if (cache := self._caches.get(target)) is not None:
                _remove(cache, change)
            self.sweep(_SWEEP)
        elif isinstance(change, Cleared):
            self.drop(target)

    def replace(self, target: Target, changes: Iterable[Change]) -> None:
        """Forget one cache, and begin again with these changes: a dump of it.

        Raises:
            RemoteProtocolError: as :meth:`apply`.
        """
        self.drop(target)
        for change in changes:
            self.apply(target, change)

    def drop(self, target: Target) -> None:
        """A cache is empty, or not there any more."""
        cache = self._caches.pop(target, None)
        if cache is not None:
            self._slots.hide(target)
            self._leaving.append(cache)
            self.sweep(_SWEEP)

    def sweep(self, blocks: int) -> bool:
        """Sweep out up to so many blocks of caches that have gone. True: none is left."""
        while self._leaving and blocks > 0:
            cache = self._leaving[0]
            bit = cache.bit
            while cache.nodes and blocks > 0:
                let_go(cache.nodes.popitem()[1], bit)
                blocks -= 1
            if not cache.nodes:
                self._slots.give(self._leaving.popleft().slot)
        return not self._leaving

    def _cache(self, target: Target) -> _Cache:
        cache = self._caches.get(target)
        if cache is None:
            cache = self._caches[target] = _Cache(self._slots.take(target))
        return cache

    def _store(self, cache: _Cache, stored: Stored) -> None:
        parent = stored.parent_hash
        node = self._root if parent is None else cache.nodes.get(parent)
        if node is None:
            self.orphans += len(stored.blocks)
            return
        bit = cache.bit
        for block in stored.blocks:
            if len(cache.nodes) >= self.max_blocks and block.block_hash not in cache.nodes:
                raise RemoteProtocolError(f"a KV cache of more than {self.max_blocks} blocks")
            node = below(node, block.tokens_hash)
            cache.put(block.block_hash, node, bit)


def _remove(cache: _Cache, removed: Removed) -> None:
    bit = cache.bit
    for block_hash in removed.block_hashes:
        node = cache.nodes.pop(block_hash, None)
        if node is not None:
            cache.leave(node, bit)
