"""What the requests that are under way cost each worker, as Dynamo's router counts it.

* *Active blocks*: the full blocks of their prompts, each once however many requests of the
  worker share it, from the moment in which a request is sent until it is over; and, if output
  is counted, one for each block that their answers have filled.
* *Prefill tokens*: tokens of prompts that were not in the worker's cache, until the first token
  of the answer has come.

(Dynamo: ``lib/kv-router/src/sequences``, ``ActiveSequences``. Its guess of how far a prefill has
come, ``--router-prefill-load-model aic``, and the fractions by which it discounts answers near
their expected ends are not here.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.routing.tree import Holders, Node, Slots, below, let_go, match

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.routing.abc import Target


@attrs.define(eq=False)
class Load:
    """What one rank of one worker has to do."""

    target: Target
    _slot: int
    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    #: The worker has gone.
    gone: bool = False
    # How many of its requests hold each block.
    _counts: dict[Node, int] = attrs.field(factory=dict)

    def hold(self, root: Node, blocks: Sequence[int]) -> list[Node]:
        """One more request holds these blocks, from the beginning."""
        counts, bit, node, nodes = self._counts, 1 << self._slot, root, []
        for key in blocks:
            node = below(node, key)
            nodes.append(node)
            count = counts.get(node, 0)
            counts[node] = count + 1
            if not count:
                node.held |= bit
                self.blocks += 1
        return nodes

    def let_go(self, nodes: list[Node]) -> None:
        """One request less holds them."""
        counts, bit = self._counts, 1 << self._slot
        for node in reversed(nodes):
            count = counts.pop(node) - 1
            if count:
                counts[node] = count
            else:
                let_go(node, bit)
                self.blocks -= 1


@attrs.define(eq=False)
class _Request:
    load: Load
    #: The blocks of its prompt, from the beginning.
    nodes: list[Node]
    #: Tokens that count as prefill.
    prefill: int
    #: Of prompt and answer so far.
    tokens: int
    #: Blocks that the answer has filled.
    output: int = 0


@attrs.define(eq=False)
class ActiveRequests:
    """The loads of all ranks. ``changed`` is called with each that has changed.

    Each call takes one step a block of its request at most.
    """

    #: Tokens.
    block_size: int
    changed: Callable[[Load], object] = bool
    loads: dict[Target, Load] = attrs.field(factory=dict)
    _root: Node = attrs.field(factory=Node, init=False)
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _requests: dict[str, _Request] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        """How many requests are under way."""
        return len(self._requests)

    def add(self, target: Target) -> None:
        """A rank has come; it has nothing to do yet."""
        if target not in self.loads:
            load = self.loads[target] = Load(target, self._slots.take(target))
            self.changed(load)

    def remove(self, target: Target) -> None:
        """A rank has gone. Its requests are known until each is over."""
        load = self.loads.pop(target, None)
        if load is not None:
            load.gone = True
            self._slots.hide(target)
            self._settle(load)

    def match(self, blocks: Sequence[int]) -> Holders:
        """How many blocks of a prompt, from its beginning, are active at each rank already."""
        return match(self._root, blocks, self._slots)

    def begin(
        self, request_id: str, target: Target, tokens: int, blocks: Sequence[int], cached: int
    ) -> None:
        """A request goes to ``target``. Of one that is known, or to who is not: nothing happens.

        Args:
            tokens: of its prompt.
            blocks: tokens hashes of its full blocks.
            cached: how many tokens of it should be in the cache there.
        """
        load = self.loads.get(target)
        if load is None or request_id in self._requests:
            return
        nodes = load.hold(self._root, blocks)
        request = _Request(load, nodes, max(0, tokens - cached), tokens)
        self._requests[request_id] = request
        load.requests += 1
        load.prefill_tokens += request.prefill
        self.changed(load)

    def prefilled(self, request_id: str) -> None:
        """Its first token has come."""
        request = self._requests.get(request_id)
        if request is not None and request.prefill:
            request.load.prefill_tokens -= request.prefill
            request.prefill = 0
            self._tell(request.load)

    def grew(self, request_id: str, tokens: int) -> None:
        """So many more tokens of its answer have come."""
        request = self._requests.get(request_id)
        if request is None:
            return
        filled = (request.tokens + tokens) // self.block_size - request.tokens // self.block_size
        request.tokens += tokens
        if filled:
            request.output += filled
            request.load.blocks += filled
            self._tell(request.load)

    def end(self, request_id: str) -> None:
        """It is over."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        load = request.load
        load.let_go(request.nodes)
        load.requests -= 1
        load.prefill_tokens -= request.prefill
        load.blocks -= request.output
        self._tell(load)
        self._settle(load)

    def _tell(self, load: Load) -> None:
        if not load.gone:
            self.changed(load)

    def _settle(self, load: Load) -> None:
        if load.gone and not load.requests:
            self._slots.give(load._slot)
