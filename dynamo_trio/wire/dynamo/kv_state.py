"""Which blocks one KV cache holds: what its events add up to.

Theory of operation
-------------------
A block stands at a *place*: behind its parent block (None: at the beginning of a prompt) and
with its tokens hash. A prompt is looked up place by place from the beginning, by tokens
hashes, and the blocks found on the way are its overlap. Two dicts that are each other's
inverse hold all that is known, so memory is bounded by the blocks that are there now, and by
``max_blocks`` whatever a publisher says.

Every event can be applied to every state. A block whose parent is not there is kept; it
is found again when its parent comes. A block that comes to a place where another one stands
takes its place: with the same tokens behind the same blocks, both are worth the same.
Removing what is not there does nothing. So an event that is applied twice, or to a state that
has it already, does no harm as long as all that follow are applied too; dumps rely on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.kv_events import Block, Cleared, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynamo_trio.wire.dynamo.kv_events import Change

#: No cache has more blocks than this.
MAX_BLOCKS = 2**22

#: Parent's block hash, own tokens hash.
Place = tuple[int | None, int]


@attrs.define(eq=False)
class KvState:
    """The blocks of one cache, by block hash."""

    max_blocks: int = MAX_BLOCKS
    # Invariant: each is the inverse of the other.
    _places: dict[int, Place] = attrs.field(factory=dict, init=False)
    _blocks: dict[Place, int] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def places(self) -> Mapping[int, Place]:
        """Where each block stands."""
        return self._places

    def overlap(self, tokens_hashes: Iterable[int]) -> int:
        """How many blocks of a prompt are there, from its beginning without a gap."""
        parent, count = None, 0
        for tokens_hash in tokens_hashes:
            parent = self._blocks.get((parent, tokens_hash))
            if parent is None:
                break
            count += 1
        return count

    # --- changes -------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Let a change happen. What is not known changes nothing.

        Raises:
            RemoteProtocolError: there would be more than ``max_blocks``; nothing has changed.
        """
        if isinstance(change, Stored):
            self._store(change)
        elif isinstance(change, Removed):
            for block_hash in change.block_hashes:
                self._remove(block_hash)
        elif isinstance(change, Cleared):
            self._places.clear()
            self._blocks.clear()

    def _store(self, stored: Stored) -> None:
        if len(self) + len(stored.blocks) > self.max_blocks:
            new = {b.block_hash for b in stored.blocks} - self._places.keys()
            if len(self) + len(new) > self.max_blocks:
                raise RemoteProtocolError(f"a KV cache of more than {self.max_blocks} blocks")
        parent = stored.parent_hash
        for block in stored.blocks:
            self._put(block.block_hash, (parent, block.tokens_hash))
            parent = block.block_hash

    def _put(self, block_hash: int, place: Place) -> None:
        there = self._blocks.get(place)
        if there == block_hash:
            return
        if there is not None:
            del self._places[there]
        self._remove(block_hash)
        self._places[block_hash] = place
        self._blocks[place] = block_hash

    def _remove(self, block_hash: int) -> None:
        place = self._places.pop(block_hash, None)
        if place is not None:
            del self._blocks[place]

    # --- dumps ---------------------------------------------------------------------------

    def dump(self) -> Iterator[Stored]:
        """The changes that make this state out of nothing, parents first; few and long ones."""
        followers: dict[int | None, list[int]] = {}
        for block_hash, (parent, _) in self._places.items():
            followers.setdefault(parent, []).append(block_hash)
        # A block whose parent is not there begins a line as the first of a prompt does.
        begins: list[int] = []
        for parent in followers.keys() - self._places.keys():
            begins += followers[parent]
        told = set[int]()
        while begins:
            line = _line(begins.pop(), followers)
            begins += followers.get(line[-1], ())
            told.update(line)
            yield self._stored(line)
        # Blocks that are behind themselves; only a confused publisher has them.
        for block_hash in self._places.keys() - told:
            yield self._stored([block_hash])

    def _stored(self, line: list[int]) -> Stored:
        blocks = tuple(Block(block_hash, self._places[block_hash][1]) for block_hash in line)
        return Stored(self._places[line[0]][0], blocks=blocks)


def _line(first: int, followers: Mapping[int | None, list[int]]) -> list[int]:
    """Blocks that follow each other, up to where none or several follow."""
    line = [first]
    while len(found := followers.get(line[-1], ())) == 1:
        line += found
    return line
