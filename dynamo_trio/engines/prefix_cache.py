"""Which full blocks of the KV memory hold what, and which of them nobody needs.

Theory of operation
-------------------
A block is *full* when all its tokens are known. Its name is a hash of its tokens and of all
blocks before it, so equal names are equal beginnings of a prompt. A request *uses* the full
blocks of its beginning. A block that nobody uses any more stays, *idle*, until its room is
needed; a prompt that begins with it finds it.

Two rules keep every block reachable from the beginning, which is what lookups rely on:
a request that uses a block uses all blocks before it, and the deepest block of a request
becomes idle first. So in the order of idleness a block stands behind all that follow it, and
evicting from the front never takes a block away from under another.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attrs import define, field

from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes
from dynamo_trio.wire.dynamo.kv_events import Block, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.engines.protocol import KvEvent


@define(eq=False)
class Prefix:
    """The beginning of one request, as far as its blocks are full."""

    #: The names of the full blocks, in order; the request uses exactly these.
    names: list[int] = field(factory=list)
    #: Tokens behind the last full block; fewer than a block has.
    tail: list[int] = field(factory=list)

    @property
    def last(self) -> int | None:
        """The last full block, if there is one."""
        return self.names[-1] if self.names else None


@define(eq=False)
class PrefixCache:
    """See the head of this module. ``block_tokens``: how many tokens a block has."""

    block_tokens: int
    # Invariant: every block that is used, by how many; at least 1.
    _users: dict[int, int] = field(factory=dict, init=False)
    # Invariant: every block that is not, the next to be evicted first.
    _idle: OrderedDict[int, None] = field(factory=OrderedDict, init=False)
    _events: list[KvEvent] = field(factory=list, init=False)

    @property
    def idle(self) -> int:
        """Blocks that are kept though nobody uses them."""
        return len(self._idle)

    def take_events(self) -> list[KvEvent]:
        """What has changed since this was last asked."""
        events, self._events = self._events, []
        return events

    def enter(self, token_ids: Sequence[int], room: int) -> tuple[Prefix, int]:
        """A prompt is to be computed; returns its prefix, and how many tokens were there.

        ``room``: blocks that idle ones may have, once the request has its own. At least one
        token is always computed, since the first token of the answer comes from it.
        """
        prefix = Prefix()
        blocks = self._fill(prefix, token_ids)
        known = next((i for i, b in enumerate(blocks) if not self._has(b)), len(blocks))
        parent = blocks[known - 1].block_hash if known else None
        self._use(prefix, blocks)
        self._shrink(room)
        self._stored(parent, blocks[known:])
        return prefix, min(known, (len(token_ids) - 1) // self.block_tokens) * self.block_tokens

    def grow(self, prefix: Prefix, token_id: int) -> None:
        """The request got a token."""
        if len(prefix.tail) + 1 < self.block_tokens:
            prefix.tail.append(token_id)
            return
        parent, blocks = prefix.last, self._fill(prefix, (token_id,))
        new = [block for block in blocks if not self._has(block)]
        self._use(prefix, blocks)
        self._stored(parent, new)

    def leave(self, prefix: Prefix) -> None:
        """The request is over; its blocks stay for others."""
        for name in reversed(prefix.names):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._idle[name] = None

    def _fill(self, prefix: Prefix, token_ids: Sequence[int]) -> list[Block]:
        """Put tokens behind ``prefix``; the blocks that they fill."""
        tokens = [*prefix.tail, *token_ids]
        prefix.tail = tokens[len(tokens) // self.block_tokens * self.block_tokens :]
        hashes = tokens_hashes(tokens, self.block_tokens)
        return [*map(Block, chain_hashes(hashes, prefix.last), hashes)]

    def _has(self, block: Block) -> bool:
        return block.block_hash in self._users or block.block_hash in self._idle

    def _use(self, prefix: Prefix, blocks: Sequence[Block]) -> None:
        for block in blocks:
            name = block.block_hash
            prefix.names.append(name)
            self._idle.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1

    def _shrink(self, room: int) -> None:
        evicted = [self._idle.popitem(last=False)[0] for _ in range(len(self._idle) - room)]
        if evicted:
            self._events.append(Removed(tuple(evicted)))

    def _stored(self, parent: int | None, new: Sequence[Block]) -> None:
        if new:
            self._events.append(Stored(parent, None, tuple(new)))
