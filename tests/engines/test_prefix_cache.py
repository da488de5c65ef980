"""The simulated core's prefix cache: what it keeps, what it tells, and what it leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.engines import Delta, InlineHost, KvEvent, Request, open_engine
from dynamo_trio.engines.prefix_cache import PrefixCache
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes
from dynamo_trio.wire.dynamo.kv_events import Block, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK = 4
SETTINGS = SimSettings(kv_block_tokens=BLOCK, kv_blocks=24, eos_every=0, max_running=4)


def request(name: str, prompt: Iterable[int], tokens: int = 1) -> Request:
    return Request(request_id=name, token_ids=prompt, max_tokens=tokens, ignore_eos=True)


def blocks_of(tokens: Sequence[int], parent: int | None = None) -> list[Block]:
    hashes = tokens_hashes(tokens, BLOCK)
    return [*map(Block, chain_hashes(hashes, parent), hashes)]


def run(core: SimCore, *requests: Request) -> dict[str, Delta]:
    """Run until nobody is left; the last delta of each."""
    for each in requests:
        core.add(each)
    ends: dict[str, Delta] = {}
    while core.has_work():
        ends |= {d.request_id: d for d in core.step() if d.finish_reason is not None}
    return ends


def cached(core: SimCore, prompt: Iterable[int]) -> int | None:
    return run(core, request("r", prompt))["r"].cached_tokens


class Mirror:
    """Applies events as a router does, and finds each that makes no sense."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent, _, blocks):
                    for block in blocks:
                        assert parent is None or parent in self.parents
                        assert block.block_hash not in self.parents
                        self.parents[block.block_hash] = parent
                        parent = block.block_hash
                case Removed(names):
                    for name in names:
                        del self.parents[name]
                        assert name not in self.parents.values(), "a block under another went"
                case other:
                    pytest.fail(f"{other}")


# --- what is reused -----------------------------------------------------------------------


def test_a_prompt_finds_the_full_blocks_of_one_with_the_same_beginning() -> None:
    core = SimCore(SETTINGS)
    assert cached(core, range(10)) == 0
    assert cached(core, [*range(10), 50]) == 8
    assert cached(core, [*range(7), 50]) == 4
    assert cached(core, [50, *range(10)]) == 0


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    core = SimCore(SETTINGS)
    assert [cached(core, range(8)) for _ in range(3)] == [0, 4, 4]


def test_an_answer_is_reused_by_the_prompt_that_continues_it() -> None:
    core = SimCore(SETTINGS)
    core.add(request("r", range(6), tokens=10))
    tokens = [token for _ in range(10) for delta in core.step() for token in delta.token_ids]
    assert cached(core, [*range(6), *tokens, 50]) == 16


def test_two_prompts_of_one_step_share_their_beginning() -> None:
    ends = run(SimCore(SETTINGS), request("a", range(9)), request("b", range(9)))
    assert [ends[name].cached_tokens for name in "ab"] == [0, 8]


def test_an_aborted_request_leaves_its_blocks() -> None:
    core = SimCore(SETTINGS)
    core.add(request("a", range(8), tokens=4))
    core.step()
    core.abort("a")
    assert core.stats().kv_blocks_used == 0
    assert cached(core, range(9)) == 8


def test_what_was_idle_longest_makes_room() -> None:
    core = SimCore(attrs.evolve(SETTINGS, kv_blocks=30))
    mirror = Mirror()
    for first in (0, 100, 200):  # 8 blocks each
        run(core, request("r", range(first, first + 32)))
    cached(core, [*range(32), 1])
    mirror.apply(core.take_kv_events())
    run(core, request("r", range(300, 328)))
    (removed,) = [e for e in core.take_kv_events() if isinstance(e, Removed)]
    middle = [block.block_hash for block in blocks_of(range(100, 132))]
    # The deepest first.
    assert list(removed.block_hashes) == [middle[7], middle[6]]


# --- what is told -------------------------------------------------------------------------


def test_blocks_are_told_as_they_fill() -> None:
    core = SimCore(SETTINGS)
    core.add(request("r", range(9), tokens=8))
    (delta,) = core.step()
    (prompt,) = core.take_kv_events()
    blocks = blocks_of(range(8))
    assert isinstance(prompt, Stored)
    assert prompt.parent_hash is None
    assert [*prompt.blocks] == blocks
    tokens = [8, *delta.token_ids]
    while len(tokens) < BLOCK:
        assert core.take_kv_events() == []
        tokens.extend(core.step()[0].token_ids)
    (more,) = core.take_kv_events()
    assert isinstance(more, Stored)
    assert more.parent_hash == blocks[-1].block_hash
    assert [*more.blocks] == blocks_of(tokens, more.parent_hash)


async def test_the_listeners_of_an_engine_get_the_events_of_a_step(autojump_clock: object) -> None:
    told: list[str | Sequence[KvEvent]] = []
    async with open_engine(SimCore(SETTINGS), host=InlineHost()) as engine:
        engine.on_step(lambda deltas: told.append("step"))
        end = engine.on_kv_events(told.append)
        async with engine.open(request("a", range(9), tokens=2)) as deltas:
            async for _ in deltas:
                pass
        end()
        async with engine.open(request("b", range(20, 29), tokens=2)) as deltas:
            async for _ in deltas:
                pass
    kinds = [each if isinstance(each, str) else "events" for each in told]
    assert kinds[:3] == ["step", "events", "step"]
    assert kinds.count("events") == 1


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Few tokens, so that beginnings are often the same."""
    return draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))


@given(
    work=st.lists(st.tuples(prompts(), st.integers(1, 12), st.integers(0, 5)), max_size=20),
    blocks=st.integers(11, 30),
)
def test_events_tell_all_and_memory_is_never_overcommitted(
    work: list[tuple[list[int], int, int]], blocks: int
) -> None:
    core = SimCore(SimSettings(kv_block_tokens=BLOCK, kv_blocks=blocks, max_running=3))
    mirror = Mirror()
    for number, (prompt, tokens, steps) in enumerate(work):
        core.add(request(str(number), prompt, tokens))
        for _ in range(steps):
            core.step()
            mirror.apply(core.take_kv_events())
            assert core.stats().kv_blocks_used + core._cache.idle <= blocks
        core.abort(str(number - 2))
    while core.has_work():
        core.step()
    mirror.apply(core.take_kv_events())
    assert core.stats().kv_blocks_used == 0
    assert len(mirror.parents) == core._cache.idle <= blocks


# --- what stays as it was -----------------------------------------------------------------


def owed(core: SimCore, prompt: Iterable[int]) -> float:
    core.add(request("r", prompt))
    core.step()
    return core.owed_seconds()


def test_a_cached_prompt_takes_the_time_of_any_other() -> None:
    core = SimCore(SimSettings(prefill_ms=30, kv_block_tokens=BLOCK))
    assert [owed(core, range(40)) for _ in range(2)] == [0.03, 0.03]


def test_time_per_token_is_owed_for_what_is_not_cached() -> None:
    core = SimCore(SimSettings(prefill_ms=30, prefill_token_us=1000, kv_block_tokens=BLOCK))
    assert owed(core, range(41)) == pytest.approx(0.03 + 0.041)
    assert owed(core, range(41)) == pytest.approx(0.03 + 0.001)


async def test_cached_blocks_keep_nobody_out(autojump_clock: object) -> None:
    core = SimCore(SETTINGS)
    async with open_engine(core, host=InlineHost()) as engine:
        for number in range(10):
            wanted = request(str(number), range(number * 100, number * 100 + 80), tokens=16)
            with trio.fail_after(5):
                async with engine.open(wanted) as deltas:
                    assert sum([len(delta.token_ids) async for delta in deltas]) == 16


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = PrefixCache(BLOCK)
    prefix, _ = cache.enter(range(8), 0)
    cache.leave(prefix)
    assert cache.idle == 2
    cache.enter((50,), 0)
    assert cache.idle == 0
