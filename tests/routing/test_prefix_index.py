"""The indexes of prefixes against sets of prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.routing import ApproximateIndex, PrefixIndex, Target
from dynamo_trio.wire.dynamo.block_hash import chain_hashes
from dynamo_trio.wire.dynamo.kv_events import Block, Change, Cleared, Removed, Stored
from dynamo_trio.wire.dynamo.kv_state import KvState

if TYPE_CHECKING:
    from collections.abc import Sequence

A, B = Target(1, 0), Target(1, 1)
EVERYBODY = [A, B, Target(2, 0), Target(3, 0)]

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=5)
targets = st.sampled_from(EVERYBODY)


def stored(prompt: Sequence[int], begin: int = 0) -> Stored:
    """That the blocks of a prompt from ``begin`` on came into a cache."""
    hashes = chain_hashes(prompt)
    blocks = tuple(map(Block, hashes[begin:], prompt[begin:]))
    return Stored(hashes[begin - 1] if begin else None, blocks=blocks)


def removed(prompt: Sequence[int], begin: int = 0) -> Removed:
    """That they left it, deepest first."""
    return Removed(tuple(reversed(chain_hashes(prompt)[begin:])))


def nodes(index: PrefixIndex | ApproximateIndex) -> int:
    count, ahead = 0, [index._root]
    while ahead:
        children = list((ahead.pop().children or {}).values())
        count += len(children)
        ahead += children
    return count


def test_each_cache_has_its_own_overlap() -> None:
    index = PrefixIndex()
    index.apply(A, stored([1, 2, 3]))
    index.apply(B, stored([1, 2]))
    index.apply(Target(2, 0), stored([1, 9]))
    assert index.match([1, 2, 3, 4]).all() == {A: 3, B: 2, Target(2, 0): 1}
    assert index.match([2]).all() == {}
    assert index.match([]).all() == {}
    assert (len(index), nodes(index), index.targets()) == (7, 4, {A, B, Target(2, 0)})


def test_a_block_behind_nothing_is_not_taken_in() -> None:
    index = PrefixIndex()
    index.apply(A, stored([1, 2, 3], 2))
    assert (index.match([1, 2, 3]).all(), index.orphans, nodes(index)) == ({}, 1, 0)


def test_a_gap_ends_the_overlap_until_it_is_filled() -> None:
    index = PrefixIndex()
    index.apply(A, stored([1, 2, 3]))
    middle = chain_hashes([1, 2])[1]
    index.apply(A, Removed((middle,)))
    assert index.match([1, 2, 3]).all() == {A: 1}
    index.apply(A, stored([1, 2], 1))
    assert index.match([1, 2, 3]).all() == {A: 3}


def test_two_blocks_at_one_place_are_there_until_both_have_gone() -> None:
    index = PrefixIndex()
    for block_hash in (100, 101, 102):
        index.apply(A, Stored(None, blocks=(Block(block_hash, 7),)))
    for block_hash, left in ((101, {A: 1}), (100, {A: 1}), (102, {})):
        index.apply(A, Removed((block_hash,)))
        assert index.match([7]).all() == left
    assert nodes(index) == 0


def test_a_block_that_comes_elsewhere_has_left_its_place() -> None:
    index = PrefixIndex()
    index.apply(A, Stored(None, blocks=(Block(100, 7),)))
    index.apply(A, Stored(None, blocks=(Block(100, 8),)))
    assert (index.match([7]).all(), index.match([8]).all(), len(index)) == ({}, {A: 1}, 1)


def test_a_cache_beyond_all_bounds_is_refused() -> None:
    index = PrefixIndex(max_blocks=3)
    index.apply(A, stored([1, 2, 3]))
    index.apply(A, stored([1, 2, 3]))
    index.apply(B, stored([1, 2]))
    with pytest.raises(RemoteProtocolError):
        index.apply(A, stored([1, 2, 3, 4], 3))
    assert len(index) == 5


def test_who_comes_anew_has_nothing_of_who_went() -> None:
    index = PrefixIndex()
    index.apply(A, stored(range(1000)))
    index.apply(B, stored([0, 1]))
    index.drop(A)
    index.drop(A)
    assert index.match([0, 1, 2]).all() == {B: 2}
    assert nodes(index) > 500  # dropping it was no work
    index.apply(Target(9, 0), stored([0]))
    assert index.match([0, 1, 2]).all() == {B: 2, Target(9, 0): 1}
    while not index.sweep(100):
        pass
    assert nodes(index) == 2


def test_after_a_gap_a_dump_takes_the_place_of_what_was_known() -> None:
    index, state = PrefixIndex(), KvState()
    for prompt in ([1, 2, 3], [1, 2, 4, 5], [6]):
        state.apply(stored(prompt))
    index.apply(A, stored([1, 9]))
    index.replace(A, state.dump())
    assert index.match([1, 2, 4, 5]).all() == {A: 4}
    assert index.match([1, 9]).all() == {A: 1}
    assert len(index) == len(state)


Step = tuple[str, Target, list[int], int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "drop", "replace"]),
        targets,
        prompts,
        st.integers(0, 4),
    ),
    max_size=50,
)


def apply_to_model(model: set[tuple[int, ...]], change: Change, prompt: Sequence[int]) -> None:
    """What a change does to a set of prefixes; ``prompt`` is whose blocks it is about."""
    if isinstance(change, Cleared):
        model.clear()
        return
    blocks = len(change.blocks if isinstance(change, Stored) else getattr(change, "block_hashes"))  # noqa: B009 - the union has a third kind
    begin = len(prompt) - blocks
    paths = {tuple(prompt[: end + 1]) for end in range(begin, len(prompt))}
    if isinstance(change, Removed):
        model -= paths
    elif not begin or tuple(prompt[:begin]) in model:
        model |= paths


def overlap(model: set[tuple[int, ...]], prompt: Sequence[int]) -> int:
    count = 0
    while count < len(prompt) and tuple(prompt[: count + 1]) in model:
        count += 1
    return count


@given(STEPS, st.lists(prompts, min_size=1, max_size=4))
def test_the_index_is_sets_of_prefixes(steps: list[Step], asked: list[list[int]]) -> None:
    index = PrefixIndex()
    model: dict[Target, set[tuple[int, ...]]] = {target: set() for target in EVERYBODY}
    for verb, target, prompt, at in steps:
        begin = min(at, len(prompt) - 1)
        if verb in ("store", "remove"):
            change = stored(prompt, begin) if verb == "store" else removed(prompt, begin)
            index.apply(target, change)
            apply_to_model(model[target], change, prompt)
        elif verb == "replace":
            index.replace(target, [stored(prompt)])
            model[target] = {tuple(prompt[: end + 1]) for end in range(len(prompt))}
        else:
            if verb == "clear":
                index.apply(target, Cleared())
            else:
                index.drop(target)
            model[target] = set()
        for question in [*asked, prompt]:
            found = {t: overlap(model[t], question) for t in EVERYBODY}
            assert index.match(question).all() == {t: n for t, n in found.items() if n}
        assert len(index) == sum(map(len, model.values()))
    for target in EVERYBODY:
        index.drop(target)
    index.sweep(10**6)
    assert nodes(index) == 0  # what nobody holds costs nothing


# --- without events ------------------------------------------------------------------------------


def test_what_was_routed_is_cached_for_a_while() -> None:
    index = ApproximateIndex(ttl=10.0)
    index.routed(A, [1, 2, 3], 0.0)
    index.routed(A, [1, 2], 5.0)
    index.routed(B, [1], 5.0)
    assert index.match([1, 2, 3], 9.0).all() == {A: 3, B: 1}
    assert index.match([1, 2, 3], 10.0).all() == {A: 2, B: 1}
    index.drop(B)
    assert index.match([1, 2, 3], 11.0).all() == {A: 2}
    assert index.match([1, 2, 3], 15.0).all() == {}
    assert (len(index), nodes(index)) == (0, 0)


def test_what_is_remembered_is_bounded() -> None:
    index = ApproximateIndex(max_blocks=4)
    for first in range(100):
        index.routed(A, [first, 1], 0.0)
    assert (len(index), nodes(index)) == (4, 4)
    assert index.match([99, 1], 0.0).all() == {A: 2}


@given(
    st.lists(
        st.tuples(targets, prompts, st.floats(0.0, 4.0), st.booleans()), min_size=1, max_size=40
    )
)
def test_the_approximate_index_is_sets_of_prefixes_with_times(
    steps: list[tuple[Target, list[int], float, bool]],
) -> None:
    index, now = ApproximateIndex(ttl=5.0), 0.0
    model: dict[Target, dict[tuple[int, ...], float]] = {target: {} for target in EVERYBODY}
    for target, prompt, pause, drops in steps:
        now += pause
        if drops:
            index.drop(target)
            model[target].clear()
        else:
            index.routed(target, prompt, now)
            model[target] |= {tuple(prompt[: end + 1]): now for end in range(len(prompt))}
        alive = {t: {p for p, at in m.items() if at + 5.0 > now} for t, m in model.items()}
        found = {t: overlap(alive[t], prompt) for t in EVERYBODY}
        assert index.match(prompt, now).all() == {t: n for t, n in found.items() if n}
    assert index.match([1], now + 5.0).all() == {}
    assert nodes(index) == 0
