"""The modes that look at no cache, alone and against naive models of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument, NoWorker
from dynamo_trio.routing import (
    ApproximateIndex,
    Ask,
    Direct,
    KvRouting,
    LeastLoaded,
    PowerOfTwo,
    PrefixIndex,
    Random,
    RoundRobin,
    Router,
    SessionAffinity,
    Sticky,
    Target,
)
from dynamo_trio.routing.pool import Pool
from dynamo_trio.routing.ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable

ANY = Ask()

MODES: dict[str, Callable[[random.Random], Router]] = {
    "round-robin": lambda rng: RoundRobin(),
    "random": Random,
    "power-of-two": PowerOfTwo,
    "least-loaded": lambda rng: LeastLoaded(),
    "kv": lambda rng: KvRouting(16, PrefixIndex(), rng),
    "kv, approximate": lambda rng: KvRouting(16, ApproximateIndex(), rng),
    "sticky": lambda rng: Sticky(RoundRobin(), SessionAffinity(60.0)),
}

modes = pytest.mark.parametrize("make", MODES.values(), ids=MODES)
ids = st.integers(0, 6)


def filled(make: Callable[[random.Random], Router], count: int) -> Router:
    router = make(random.Random(0))
    for worker_id in range(count):
        router.add(worker_id)
    return router


# --- every mode ----------------------------------------------------------------------------------


@modes
def test_without_workers_there_is_nobody_to_choose(make: Callable[[random.Random], Router]) -> None:
    with pytest.raises(NoWorker):
        make(random.Random(0)).choose(ANY)


@modes
def test_who_is_left_out_is_not_chosen(make: Callable[[random.Random], Router]) -> None:
    router = filled(make, 3)
    chosen = {router.choose(Ask(without=[1, 7])).worker_id for _ in range(50)}
    assert chosen
    assert chosen <= {0, 2}
    with pytest.raises(NoWorker):
        router.choose(Ask(without={0, 1, 2}))


@modes
def test_what_came_and_went_twice_is_counted_once(make: Callable[[random.Random], Router]) -> None:
    router = filled(make, 2)
    router.add(1)
    assert len(router) == 2
    router.remove(0)
    router.remove(0)
    assert (len(router), 0 in router, 1 in router) == (1, False, True)
    assert router.choose(ANY).worker_id == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ids),
        st.tuples(st.just("remove"), ids),
        st.tuples(st.just("begin"), st.frozensets(ids, max_size=4)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("prefilled"), st.integers(0, 5)),
        st.tuples(st.just("grew"), st.integers(0, 5)),
    ),
    max_size=60,
)


@modes
@given(steps=STEPS, seed=st.integers(0, 3))
def test_a_choice_never_names_an_absent_or_excluded_worker(
    make: Callable[[random.Random], Router], steps: list[tuple[str, object]], seed: int
) -> None:
    router, there, running = make(random.Random(seed)), set[int](), list[str]()
    for number, (verb, value) in enumerate(steps):
        if verb == "add":
            assert isinstance(value, int)
            router.add(value)
            there.add(value)
        elif verb == "remove":
            assert isinstance(value, int)
            router.remove(value)
            there.discard(value)
        elif verb == "begin":
            assert isinstance(value, frozenset)
            blocks = [number % 2, number % 3, 0]
            ask = Ask(tokens=50, blocks=blocks, without=value, session=str(number % 3), now=number)
            if not there - value:
                with pytest.raises(NoWorker):
                    router.choose(ask)
                continue
            target = router.choose(ask)
            assert target.worker_id in there - value
            router.begin(str(number), target, ask)
            running.append(str(number))
        elif running:
            assert isinstance(value, int)
            request = running[value % len(running)]
            if verb == "end":
                running.remove(request)
                router.end(request)
            elif verb == "prefilled":
                router.prefilled(request)
            else:
                router.grew(request, 7)
        assert len(router) == len(there)


# --- round robin ---------------------------------------------------------------------------------


def test_round_robin_gives_everybody_a_turn() -> None:
    router = filled(lambda rng: RoundRobin(), 3)
    assert [router.choose(ANY).worker_id for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@given(st.lists(st.tuples(st.sampled_from(["choose", "again", "add", "remove"]), ids), max_size=80))
def test_round_robin_chooses_who_has_waited_longest(steps: list[tuple[str, int]]) -> None:
    router = RoundRobin()
    waits: dict[str, list[int]] = {"choose": [], "again": []}  # the naive model: two queues
    for verb, worker_id in steps:
        if verb == "add":
            router.add(worker_id)
            for queue in waits.values():
                queue += [worker_id] * (worker_id not in queue)
        elif verb == "remove":
            router.remove(worker_id)
            for queue in waits.values():
                queue[:] = [other for other in queue if other != worker_id]
        else:
            queue = waits[verb]
            without = [worker_id] if verb == "again" else []
            able = [other for other in queue if other not in without]
            if able:
                assert router.choose(Ask(without=without)).worker_id == able[0]
                queue.remove(able[0])
                queue.append(able[0])


def test_who_refuses_is_not_the_first_of_every_request() -> None:
    router = filled(lambda rng: RoundRobin(), 2)
    firsts = []
    for _ in range(4):
        first = router.choose(ANY).worker_id
        firsts.append(first)
        if first == 0:  # it refuses
            assert router.choose(Ask(without=[0])).worker_id == 1
    assert firsts == [0, 1, 0, 1]


# --- random, direct ------------------------------------------------------------------------------


def test_random_is_even_and_repeats_with_its_seed() -> None:
    drawn = [
        [router.choose(Ask(without={3})).worker_id for _ in range(3000)]
        for router in (filled(Random, 5), filled(Random, 5))
    ]
    assert drawn[0] == drawn[1]
    counts = Counter(drawn[0])
    assert counts.keys() == {0, 1, 2, 4}
    assert all(600 < count < 900 for count in counts.values())  # 750 each, 24 is one sigma


def test_direct_asks_whom_the_request_names() -> None:
    router = filled(lambda rng: Direct(), 2)
    assert router.choose(Ask(worker_id=1)) == Target(1)
    assert (0 in router, len(router)) == (True, 2)
    with pytest.raises(NoWorker):
        router.choose(Ask(worker_id=1, without=[1]))
    router.remove(1)
    with pytest.raises(NoWorker):
        router.choose(Ask(worker_id=1))
    with pytest.raises(InvalidArgument):
        router.choose(ANY)


# --- by load -------------------------------------------------------------------------------------


def test_least_loaded_spreads_equal_loads() -> None:
    router = filled(lambda rng: LeastLoaded(), 4)
    seen = Counter[int]()
    for number in range(40):  # one at a time: all are equal whenever one is asked for
        target = router.choose(ANY)
        seen[target.worker_id] += 1
        router.begin(str(number), target, ANY)
        router.end(str(number))
    assert set(seen.values()) == {10}


@given(steps=st.lists(st.tuples(st.booleans(), ids, st.frozensets(ids)), max_size=80))
def test_least_loaded_is_the_naive_minimum(
    steps: list[tuple[bool, int, frozenset[int]]],
) -> None:
    router, counts, running = LeastLoaded(), dict[int, int](), list[tuple[str, int]]()
    for number, (joins, worker_id, without) in enumerate(steps):
        if joins and worker_id not in counts:
            router.add(worker_id)
            counts[worker_id] = 0
        elif joins:
            router.remove(worker_id)
            del counts[worker_id]
            running = [(request, at) for request, at in running if at != worker_id]
        elif able := counts.keys() - without:
            target = router.choose(Ask(without=without))
            assert counts[target.worker_id] == min(counts[i] for i in able)
            router.begin(str(number), target, ANY)
            counts[target.worker_id] += 1
            running.append((str(number), target.worker_id))
        if number % 3 == 0 and running:
            request, at = running.pop(0)
            router.end(request)
            counts[at] -= 1


@given(loads=st.lists(st.integers(0, 4), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_power_of_two_never_takes_the_one_most_loaded(loads: list[int], seed: int) -> None:
    router = PowerOfTwo(random.Random(seed))
    for worker_id, load in enumerate(loads):
        router.add(worker_id)
        for number in range(load):
            router.begin(f"{worker_id}.{number}", Target(worker_id), ANY)
    most = max(loads)
    if loads.count(most) == 1:
        assert loads[router.choose(ANY).worker_id] < most
    drawn = Random(random.Random(seed))  # the same two, with both known: the naive minimum
    for worker_id in range(len(loads)):
        drawn.add(worker_id)
    pair = drawn._pool.draw(random.Random(seed), (), 2)
    again = PowerOfTwo(random.Random(seed), router._pool, router._counts)
    assert loads[again.choose(ANY).worker_id] == min(loads[i] for i in pair)


def test_a_worker_that_comes_again_begins_with_nothing() -> None:
    for router in (filled(PowerOfTwo, 2), filled(lambda rng: LeastLoaded(), 2)):
        router.begin("old", Target(0), ANY)
        router.begin("old", Target(0), ANY)  # known: counted once
        router.remove(0)
        router.add(0)
        router.begin("new", Target(1), ANY)
        router.end("old")
        router.end("old")
        assert router.choose(ANY) == Target(0)


# --- their parts ---------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 12)), st.integers(0, 99))
def test_a_pool_draws_two_different_ones_of_those_that_are_left(
    members: set[int], without: set[int], seed: int
) -> None:
    pool = Pool()
    for worker_id in members:
        pool.add(worker_id)
    drawn = pool.draw(random.Random(seed), without, 2)
    assert len(set(drawn)) == len(drawn) == min(2, len(members - without))
    assert set(drawn) <= members - without


def test_a_pool_can_draw_everybody() -> None:
    pool, rng = Pool(), random.Random(1)
    for worker_id in range(6):
        pool.add(worker_id)
    pool.remove(0)
    assert {pool.draw(rng, {3, 9})[0] for _ in range(200)} == {1, 2, 4, 5}


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3)), max_size=300))
def test_a_ranking_is_in_order(changes: list[tuple[int, int | None]]) -> None:
    ranking, model = Ranking[int](), dict[int, tuple[int, int]]()
    for number, (key, value) in enumerate(changes):
        if value is None:
            ranking.drop(key)
            model.pop(key, None)
        else:
            ranking.put(key, value)
            if key not in model or model[key][0] != value:
                model[key] = value, number
        assert len(ranking._heap) <= 2 * len(model) + 64
    expected = sorted((value, number, key) for key, (value, number) in model.items())
    assert list(ranking.ascending()) == [(value, key) for value, _, key in expected]
