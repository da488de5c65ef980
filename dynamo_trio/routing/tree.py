"""A tree of prompts' beginnings, and who holds which of its nodes.

Theory of operation
-------------------
A node is a block behind the blocks above it; its key is the tokens hash of the block. Who may
hold nodes has a *slot*, a small number, and a node knows its holders as the bits of an integer.
So one step of a lookup is one look into a dict and one ``and`` for all holders together, however
many there are; only those that do *not* hold the next block are looked at one by one.

Somebody who leaves is taken out of the mask of those who count, in one step. Its bits stay in
the nodes until they are swept out; its slot is not given to anybody else before.

A node without holders and without nodes below it is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynamo_trio.routing.abc import Target


@attrs.define(eq=False)
class Node:
    """A block behind its parent."""

    parent: Node | None = None
    key: int = 0
    #: A bit for each slot that holds it.
    held: int = 0
    # None as long as there was none: most blocks of most prompts have one below them at most.
    children: dict[int, Node] | None = None


def below(node: Node, key: int) -> Node:
    """The node with this key below ``node``; made, if it is not there."""
    children = node.children
    if children is None:
        children = node.children = {}
    found = children.get(key)
    if found is None:
        found = children[key] = Node(node, key)
    return found


def let_go(node: Node, bit: int) -> None:
    """A slot holds the node no more."""
    node.held &= ~bit
    while not node.held and not node.children and (parent := node.parent) is not None:
        assert parent.children is not None  # the node is one of them
        del parent.children[node.key]
        node.parent = None
        node = parent


@attrs.define(eq=False)
class Slots:
    """Who has which slot."""

    #: None: free.
    targets: list[Target | None] = attrs.field(factory=list)
    #: Those who count, and their bits in one number.
    places: dict[Target, int] = attrs.field(factory=dict)
    live: int = 0
    _free: list[int] = attrs.field(factory=list)

    def take(self, target: Target) -> int:
        """A slot for ``target``, which counts from now on."""
        if self._free:
            slot = self._free.pop()
            self.targets[slot] = target
        else:
            slot = len(self.targets)
            self.targets.append(target)
        self.places[target] = slot
        self.live |= 1 << slot
        return slot

    def hide(self, target: Target) -> None:
        """It does not count any more."""
        self.live &= ~(1 << self.places.pop(target))

    def give(self, slot: int) -> None:
        """Who is hidden holds nothing: somebody else may have its slot."""
        self.targets[slot] = None
        self._free.append(slot)


@attrs.frozen
class Holders:
    """Who holds how many blocks of one prompt. Good until something changes."""

    _slots: Slots
    #: Depths, from 1 up, each with the bits of those who hold just so many.
    _groups: list[tuple[int, int]]

    def of(self, target: Target) -> int:
        """How many this one holds."""
        slot = self._slots.places.get(target)
        if slot is not None:
            bit = 1 << slot
            for depth, mask in self._groups:
                if mask & bit:
                    return depth
        return 0

    def all(self) -> dict[Target, int]:
        """Everybody who holds any."""
        return self.deepest(len(self._slots.targets))[0]

    def deepest(self, most: int) -> tuple[dict[Target, int], int]:
        """Those who hold most blocks, ``most`` of them at most, and how many others may hold.

        Who hold equally many are all among them, or none of them is.
        """
        found: dict[Target, int] = {}
        targets = self._slots.targets
        for depth, mask in reversed(self._groups):
            if len(found) + mask.bit_count() > most:
                return found, depth
            for slot in bits(mask):
                target = targets[slot]
                assert target is not None  # who counts has a slot
                found[target] = depth
        return found, 0


def match(root: Node, keys: Iterable[int], slots: Slots) -> Holders:
    """Who holds how many blocks of a prompt, from its beginning without a gap."""
    return Holders(slots, _groups(root, keys, slots.live))


def _groups(root: Node, keys: Iterable[int], live: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    node, depth, going = root, 0, live
    for key in keys:
        child = node.children.get(key) if node.children else None
        if child is None:
            break
        held = going & child.held
        if held != going:
            if depth:
                found.append((depth, going ^ held))
            if not held:
                return found
            going = held
        node, depth = child, depth + 1
    if depth and going:
        found.append((depth, going))
    return found


def bits(mask: int) -> Iterator[int]:
    """The places of the bits that are set, the lowest first."""
    digits = bin(mask)[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)
