"""Our prefix index and NVIDIA's RadixTree, told the same, know the same."""

from __future__ import annotations

import json
import random
import subprocess
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import pytest

from dynamo_trio.routing import PrefixIndex, Target
from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes
from dynamo_trio.wire.dynamo.kv_events import Block, Cleared, Removed, RouterEvent, Stored
from tests.interop.fleet import PEERS, oracle_python

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Tokens of a block.
BLOCK = 4
WORKERS, RANKS = 5, 2


@attrs.define(eq=False)
class Trace:
    """Steps that both take, and what ours answers."""

    rng: random.Random
    index: PrefixIndex = attrs.field(factory=PrefixIndex)
    #: What each cache holds: the paths of its blocks, by their hashes.
    held: dict[Target, dict[int, tuple[int, ...]]] = attrs.field(factory=dict)
    steps: list[dict[str, Any]] = attrs.field(factory=list)
    answers: list[list[list[int]]] = attrs.field(factory=list)

    def prompt(self) -> tuple[int, ...]:
        """The tokens hashes of one of not too many prompts."""
        tokens = [token for _ in range(self.rng.randint(1, 8)) for token in self._block()]
        return tuple(tokens_hashes(tokens, BLOCK))

    def _block(self) -> list[int]:
        return [self.rng.randint(1, 2)] * BLOCK

    def target(self) -> Target:
        """One of the caches."""
        return Target(self.rng.randint(1, WORKERS), self.rng.randrange(RANKS))

    def store(self, target: Target) -> None:
        """A prompt comes into a cache: what is not there yet."""
        held, prompt = self.held.setdefault(target, {}), self.prompt()
        hashes = chain_hashes(prompt)
        new = next((at for at, known in enumerate(hashes) if known not in held), None)
        if new is not None:
            blocks = tuple(map(Block, hashes[new:], prompt[new:]))
            self._tell(target, Stored(hashes[new - 1] if new else None, blocks=blocks))
            held |= {hashes[at]: prompt[: at + 1] for at in range(new, len(hashes))}

    def evict(self, target: Target) -> None:
        """Blocks leave a cache from the ends of prompts, as engines evict them."""
        held = self.held.setdefault(target, {})
        gone = []
        for _ in range(self.rng.randint(1, 6)):
            parents = {path[:-1] for path in held.values()}
            if leaves := sorted(key for key, path in held.items() if path not in parents):
                gone.append(self.rng.choice(leaves))
                del held[gone[-1]]
        if gone:
            self._tell(target, Removed(tuple(gone)))

    def clear(self, target: Target) -> None:
        """A cache is emptied."""
        self._tell(target, Cleared())
        self.held.pop(target, None)

    def leave(self, target: Target) -> None:
        """A worker has gone."""
        for rank in range(RANKS):
            one = Target(target.worker_id, rank)
            self.index.drop(one)
            self.held.pop(one, None)
        self.steps.append({"gone": target.worker_id})

    def ask(self) -> None:
        """Who has how much of a prompt?"""
        prompt = self.prompt()
        found = self.index.match(prompt).all()
        self.steps.append({"ask": list(prompt)})
        told = [[t.worker_id, t.dp_rank or 0, blocks] for t, blocks in found.items()]
        self.answers.append(sorted(told))

    def _tell(self, target: Target, change: Stored | Removed | Cleared) -> None:
        self.index.apply(target, change)
        assert target.dp_rank is not None  # all of these have one
        event = RouterEvent.of(target.worker_id, len(self.steps) + 1, change, target.dp_rank)
        told = msgspec.to_builtins(event)["event"]
        self.steps.append({"worker": target.worker_id, "event": told})


def theirs(steps: Sequence[dict[str, Any]]) -> list[Any]:
    """What NVIDIA's tree answers."""
    done = subprocess.run(
        [oracle_python(), str(PEERS / "radix_tree.py")],
        input="".join(json.dumps(step) + "\n" for step in steps),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("seed", range(3))
def test_both_indexes_know_the_same_of_a_fleet(seed: int) -> None:
    trace = Trace(random.Random(seed))
    verbs = [trace.store] * 6 + [trace.evict] * 3
    for number in range(1500):
        trace.rng.choice(verbs)(trace.target())
        if number % 97 == 96:
            trace.rng.choice([trace.clear, trace.leave])(trace.target())
        trace.ask()
    assert theirs(trace.steps) == trace.answers
    assert sum(map(len, trace.answers)) > 1500
