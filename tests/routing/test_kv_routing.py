"""The cost of a request, what is under way, and the choice by both."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.routing import (
    ActiveRequests,
    ApproximateIndex,
    Ask,
    CostSettings,
    KvRouting,
    Load,
    PrefixIndex,
    Target,
    kv,
)
from dynamo_trio.routing.cost import Costs, draw
from dynamo_trio.wire.dynamo.kv_events import Block, Stored

BLOCK = 16
A, B = Target(1, 0), Target(2, 0)


def load(requests: int = 0, prefill_tokens: int = 0, blocks: int = 0) -> Load:
    return Load(A, 0, requests, prefill_tokens, blocks)


def routing(*workers: int, seed: int = 0, **settings: float) -> KvRouting:
    made = KvRouting(BLOCK, PrefixIndex(), random.Random(seed), CostSettings(**settings))  # type: ignore[arg-type]  # numbers only
    for worker_id in workers:
        made.add(worker_id)
    return made


def cache(made: KvRouting, target: Target, *keys: int) -> None:
    """Let a worker tell that it has the blocks of a prompt."""
    assert isinstance(made.index, PrefixIndex)
    made.index.apply(target, Stored(None, blocks=tuple(Block(key, key) for key in keys)))


# --- the cost ------------------------------------------------------------------------------------


def test_the_cost_is_that_of_dynamos_documentation() -> None:
    """The three workers of its page on the KV router: 10 raw prefill blocks each."""
    costs = Costs(CostSettings(), BLOCK, tokens=10 * BLOCK, blocks=0)
    assert costs.of(load(blocks=10), overlap=2, shared=0) == 18
    assert costs.of(load(blocks=5), overlap=5, shared=0) == 10
    assert costs.of(load(blocks=9), overlap=8, shared=0) == 11


def test_every_weight_has_its_effect() -> None:
    settings = CostSettings(
        overlap_score_credit=2.0,
        overlap_score_credit_decay=1.0,
        prefill_load_scale=3.0,
        decode_active_request_weight=0.5,
    )
    costs = Costs(settings, BLOCK, tokens=40, blocks=2, least_prefill=16)
    # raw 72/16 = 4.5; excess 1 block of a request of 3: decay 3/4; credit 2 * 3/4 * 2 = 3
    assert costs.of(load(4, 32, 7), overlap=2, shared=1) == pytest.approx(3 * 1.5 + 7 + 1 + 2)
    assert costs.of(load(4, 32, 7), overlap=9, shared=2) == 7 + 2  # never below zero
    silent = CostSettings(router_track_prefill_tokens=False)
    assert Costs(silent, BLOCK, tokens=40, blocks=2).of(load(4, 32, 7), 0, 1) == 8


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_weights_are_numbers_from_0_on(value: float) -> None:
    with pytest.raises(InvalidArgument, match="prefill_load_scale"):
        CostSettings(prefill_load_scale=value)


def test_a_temperature_draws_by_cost() -> None:
    rng, costs = random.Random(0), [10.0, 12.0, 20.0]
    drawn = Counter(draw(costs, 0.5, rng) for _ in range(9000))
    weights = [math.exp(-(cost - 10) / 10 / 0.5) for cost in costs]
    for place, weight in enumerate(weights):
        assert drawn[place] / 9000 == pytest.approx(weight / sum(weights), abs=0.03)
    assert set(Counter(draw([1.0] * 3, 0.5, rng) for _ in range(100))) == {0, 1, 2}


# --- what is under way ---------------------------------------------------------------------------


def test_a_request_is_counted_from_begin_to_end() -> None:
    seen: list[tuple[int, int, int]] = []
    active = ActiveRequests(BLOCK, lambda x: seen.append((x.requests, x.prefill_tokens, x.blocks)))
    active.add(A)
    active.begin("one", A, 40, [7, 8], cached=16)
    active.begin("two", A, 50, [7, 9], cached=0)
    assert active.match([7, 8, 9]).all() == {A: 2}
    active.prefilled("one")
    active.prefilled("one")
    active.grew("one", 7)  # 47 tokens: no block more
    active.grew("one", 1)
    active.end("one")
    active.end("one")
    assert active.match([7, 8]).all() == {A: 1}
    active.end("two")
    assert seen == [
        *((0, 0, 0), (1, 24, 2), (2, 74, 3), (2, 50, 3), (2, 50, 4), (1, 50, 2), (0, 0, 0)),
    ]
    assert (len(active), active.match([7]).all()) == (0, {})


def test_requests_of_a_worker_that_has_gone_end_unnoticed() -> None:
    active = ActiveRequests(BLOCK)
    active.add(A)
    active.begin("old", A, 16, [7], cached=0)
    active.remove(A)
    active.remove(A)
    active.add(A)
    active.begin("old", A, 16, [8], cached=0)  # known
    active.begin("lost", B, 16, [8], cached=0)  # to who is not there
    assert (active.match([7]).all(), len(active), active.loads[A].blocks) == ({}, 1, 0)
    active.grew("old", 99)
    active.end("old")
    assert (len(active), active.loads[A].blocks, active._root.children) == (0, 0, {})


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "prefilled", "grew", "end"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_loads_are_the_sums_of_their_requests(steps: list[tuple[str, int]]) -> None:
    active = ActiveRequests(4)
    model: dict[int, tuple[list[int], int, int]] = {}  # blocks, prefill, output tokens
    active.add(A)
    for verb, number in steps:
        if verb == "begin" and number not in model:
            blocks = [1, 2, number][: 1 + number % 3]
            active.begin(str(number), A, 4 * len(blocks) + 2, blocks, cached=4)
            model[number] = blocks, 4 * len(blocks) - 2, 0
        elif number in model:
            blocks, prefill, output = model[number]
            if verb == "prefilled":
                active.prefilled(str(number))
                model[number] = blocks, 0, output
            elif verb == "grew":
                active.grew(str(number), 3)
                model[number] = blocks, prefill, output + 3
            elif verb == "end":
                active.end(str(number))
                del model[number]
        now, held = active.loads[A], set[tuple[int, ...]]()
        for blocks, _, _ in model.values():
            held |= {tuple(blocks[: end + 1]) for end in range(len(blocks))}
        filled = sum((output + 2) // 4 for _, _, output in model.values())
        assert now.requests == len(model)
        assert now.blocks == len(held) + filled
        assert now.prefill_tokens == sum(prefill for _, prefill, _ in model.values())


# --- the choice ----------------------------------------------------------------------------------


def test_a_prompt_goes_where_it_is_cached() -> None:
    made = routing(1, 2, 3)
    cache(made, B, 7, 8, 9)
    ask = Ask(tokens=60, blocks=[7, 8, 9])
    assert made.choose(ask) == B
    assert made.choose(Ask(tokens=60, blocks=[7, 8, 9], without={2})).worker_id in (1, 3)
    made.remove(2)
    assert made.choose(ask).worker_id in (1, 3)


def test_a_cache_does_not_outweigh_any_load() -> None:
    made = routing(1, 2)
    cache(made, A, 7, 8)
    made.begin("busy", A, Ask(tokens=160, blocks=range(100, 110)))
    assert made.choose(Ask(tokens=40, blocks=[7, 8])) == B
    made.prefilled("busy")
    made.end("busy")
    assert made.choose(Ask(tokens=40, blocks=[7, 8])) == A


def test_requests_that_run_together_share_their_blocks() -> None:
    made = routing(1, 2)
    ask = Ask(tokens=64, blocks=[1, 2, 3, 4])
    made.begin("one", A, ask)
    made.prefilled("one")
    made.begin("other", B, Ask(tokens=64, blocks=[5, 6, 7, 8]))
    made.prefilled("other")
    assert made.choose(ask) == A
    alone = routing(1, 2, router_track_active_blocks=False)
    alone.begin("one", A, ask)
    assert alone.active.loads[A].blocks == 0


def test_prefill_does_not_count_unless_it_should() -> None:
    made = routing(1, router_track_prefill_tokens=False)
    made.begin("one", A, Ask(tokens=64, blocks=[1]))
    assert (made.active.loads[A].prefill_tokens, made.active.loads[A].blocks) == (0, 1)


def test_answers_count_only_if_they_should() -> None:
    for wanted, blocks in ((False, 1), (True, 2)):
        made = routing(1, router_track_output_blocks=wanted)
        made.begin("one", A, Ask(tokens=16, blocks=[1]))
        made.grew("one", 16)
        assert made.active.loads[A].blocks == blocks


def test_each_rank_of_a_worker_is_a_target() -> None:
    made = routing()
    made.add(1, (0, 1))
    cache(made, Target(1, 1), 7)
    assert made.choose(Ask(tokens=16, blocks=[7])) == Target(1, 1)
    made.add(1, (0,))
    assert made.choose(Ask(tokens=16, blocks=[7])) == Target(1, 0)
    assert len(made) == 1


def test_without_events_a_session_of_prompts_stays_where_it_began() -> None:
    made = KvRouting(BLOCK, ApproximateIndex(ttl=10.0), random.Random(0))
    for worker_id in range(5):
        made.add(worker_id)
    first = made.choose(Ask(tokens=32, blocks=[7, 8], now=0.0))
    made.begin("one", first, Ask(tokens=32, blocks=[7, 8], now=0.0))
    made.end("one")
    assert made.choose(Ask(tokens=48, blocks=[7, 8, 9], now=9.0)) == first
    assert made.choose(Ask(tokens=48, blocks=[7, 8, 9], now=10.0)) != first  # it waits at the end


def test_equal_costs_are_spread_by_chance() -> None:
    made = routing(1, 2, 3)
    for worker_id in (1, 2):
        cache(made, Target(worker_id, 0), 7)
    drawn = Counter(made.choose(Ask(tokens=16, blocks=[7])).worker_id for _ in range(200))
    assert drawn.keys() == {1, 2}
    assert min(drawn.values()) > 60


def test_whoever_shares_most_is_found_among_many_that_share() -> None:
    """More than are looked at in any case, and each of them busier than one who shares nothing."""
    made = routing(*range(kv.FEW + 2))
    for worker_id in range(kv.FEW + 1):
        cache(made, Target(worker_id, 0), 7, 8)
        made.begin(f"{worker_id}", Target(worker_id, 0), Ask(tokens=1, blocks=[99]))
        made.prefilled(f"{worker_id}")
    assert made.choose(Ask(tokens=32, blocks=[7, 8])).worker_id <= kv.FEW
    without = frozenset(range(kv.FEW + 1)) - {3}
    assert made.choose(Ask(tokens=32, blocks=[7, 8], without=without)).worker_id == 3


#: Prompts that as a rule have something in common.
prompts = st.builds(
    lambda common, own: [1, 2, 1, 2][:common] + own,
    st.integers(0, 4),
    st.lists(st.integers(1, 2), max_size=1),
)
requests = st.tuples(
    st.integers(0, 4),  # worker
    prompts,
    st.booleans(),  # prefilled
)


@given(
    begun=st.lists(requests, max_size=12),
    cached=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5),
    blocks=prompts,
    without=st.frozensets(st.integers(0, 4), max_size=4),
    credit=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    decay=st.sampled_from([0.0, 1.0]),
    weight=st.sampled_from([0.0, 0.7]),
    few=st.integers(0, 3),
)
def test_the_choice_is_the_naive_minimum(
    begun: list[tuple[int, list[int], bool]],
    cached: list[tuple[int, int]],
    blocks: list[int],
    without: frozenset[int],
    credit: float,
    decay: float,
    weight: float,
    few: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "FEW", few)
        compare(begun, cached, blocks, without, credit, decay, weight)


def compare(
    begun: list[tuple[int, list[int], bool]],
    cached: list[tuple[int, int]],
    blocks: list[int],
    without: frozenset[int],
    credit: float,
    decay: float,
    weight: float,
) -> None:
    made = routing(
        *range(5),
        overlap_score_credit=credit,
        overlap_score_credit_decay=decay,
        decode_active_request_weight=weight,
    )
    for worker_id, depth in cached:
        keys, parent = [1, 2, 1, 2][:depth], None
        hashes = [hash(tuple(keys[: end + 1])) for end in range(depth)]
        stored = Stored(parent, blocks=tuple(map(Block, hashes, keys)))
        assert isinstance(made.index, PrefixIndex)
        made.index.apply(Target(worker_id, 0), stored)
    for number, (worker_id, prompt, prefilled) in enumerate(begun):
        asked = Ask(tokens=BLOCK * len(prompt) + 3, blocks=prompt)
        made.begin(str(number), Target(worker_id, 0), asked)
        if prefilled:
            made.prefilled(str(number))

    ask = Ask(tokens=BLOCK * len(blocks) + 5, blocks=blocks, without=without)
    able = [Target(i, 0) for i in range(5) if i not in without]
    loads, overlaps = made.active.loads, made.index.match(blocks, 0.0).all()
    shared = made.active.match(blocks).all()
    least = min(loads[t].prefill_tokens for t in able)
    costs = Costs(made.settings, BLOCK, ask.tokens, len(blocks), least)
    naive = {t: costs.of(loads[t], overlaps.get(t, 0), shared.get(t, 0)) for t in able}
    assert naive[made.choose(ask)] == pytest.approx(min(naive.values()))
    warm = routing(router_temperature=0.5)
    warm.active, warm.index = made.active, made.index
    assert warm.choose(ask) in able
