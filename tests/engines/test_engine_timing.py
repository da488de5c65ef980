"""The pace and the scheduling of the simulated core, exact under a virtual clock."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dynamo_trio.engines import Engine, InlineHost, Request, open_engine
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import RequestRejected

if TYPE_CHECKING:
    from trio.testing import MockClock


def request(name: str, max_tokens: int, prompt: int = 8, priority: int = 0) -> Request:
    return Request(
        request_id=name,
        token_ids=range(1, prompt + 1),
        max_tokens=max_tokens,
        ignore_eos=True,
        priority=priority,
    )


async def arrivals(engine: Engine, wanted: Request) -> list[float]:
    """When each token came, from the moment of asking."""
    begin = trio.current_time()
    async with engine.open(wanted) as deltas:
        return [trio.current_time() - begin async for delta in deltas for _ in delta.token_ids]


async def test_a_lone_request_pays_its_prefill_and_then_each_token(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(itl_ms=20, prefill_ms=150))
    async with open_engine(core, host=InlineHost()) as engine:
        times = await arrivals(engine, request("a", 10))
        assert times == pytest.approx([0.150 + 0.020 * n for n in range(10)])
        assert engine.last_step_seconds == pytest.approx(0.020)


async def test_a_prompt_delays_the_tokens_of_others_by_its_prefill(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(itl_ms=20, prefill_ms=100))
    got: dict[str, list[float]] = {}
    async with open_engine(core, host=InlineHost()) as engine, trio.open_nursery() as nursery:

        async def one(name: str, tokens: int) -> None:
            got[name] = await arrivals(engine, request(name, tokens))

        nursery.start_soon(one, "a", 4)
        await trio.sleep(0.130)  # in the third step of a
        nursery.start_soon(one, "b", 1)
    assert got["a"] == pytest.approx([0.100, 0.120, 0.140, 0.260])
    assert got["b"] == pytest.approx([0.130])


async def test_requests_wait_for_kv_blocks_in_order_of_priority(autojump_clock: MockClock) -> None:
    core = SimCore(SimSettings(itl_ms=10, prefill_ms=10, kv_blocks=2))
    order: list[str] = []
    async with open_engine(core, host=InlineHost()) as engine, trio.open_nursery() as nursery:

        async def one(name: str, priority: int) -> None:
            await arrivals(engine, request(name, 20, prompt=8, priority=priority))
            order.append(name)

        nursery.start_soon(one, "first", 5)
        await trio.sleep(0.005)
        for name, priority in [("late", 1), ("later", 1), ("urgent", 0)]:
            nursery.start_soon(one, name, priority)
            await trio.sleep(0.001)
        await trio.sleep(0.05)
        assert (engine.stats.running, engine.stats.waiting) == (1, 3)
        assert engine.stats.kv_usage == 1.0
    assert order == ["first", "urgent", "late", "later"]


async def test_a_request_larger_than_all_kv_blocks_is_rejected_by_its_stream(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(kv_blocks=2))
    async with open_engine(core, host=InlineHost()) as engine:
        async with engine.open(request("good", 16)) as good:
            with pytest.raises(RequestRejected, match="needs 3 KV blocks; there are 2"):
                await arrivals(engine, request("bad", 30))
            assert sum([len(delta.token_ids) async for delta in good]) == 16


async def test_max_running_bounds_a_step(autojump_clock: MockClock) -> None:
    sizes: list[int] = []
    core = SimCore(SimSettings(max_running=3))
    async with open_engine(core, host=InlineHost()) as engine:
        engine.on_step(lambda deltas: sizes.append(len(deltas)))
        async with trio.open_nursery() as nursery:
            for name in "abcdefgh":
                nursery.start_soon(arrivals, engine, request(name, 4))
    assert max(sizes) == 3
    assert sum(sizes) == 8 * 4


async def test_the_age_of_a_step_tells_a_live_engine_from_a_stuck_one(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(prefill_ms=10_000))
    async with open_engine(core, host=InlineHost()) as engine:
        assert engine.step_age() == 0.0
        with engine.attach(request("a", 1), lambda _: None):
            await trio.sleep(4)
            assert engine.step_age() == pytest.approx(4)
            await engine.drain()
        assert engine.step_age() == 0.0


async def test_a_drain_waits_until_the_core_has_let_go_of_what_was_left(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(itl_ms=1000))
    async with open_engine(core, host=InlineHost()) as engine:
        with engine.attach(request("a", 100), lambda _: None):
            await trio.sleep(1.5)
        assert engine.stats.running == 1
        await engine.drain()
        assert engine.stats.running == 0
        assert trio.current_time() == pytest.approx(2.0)


async def test_leaving_the_engine_does_not_wait_for_a_step_that_nobody_wants(
    autojump_clock: MockClock,
) -> None:
    core = SimCore(SimSettings(prefill_ms=10_000))
    async with open_engine(core, host=InlineHost()) as engine:
        with engine.attach(request("a", 100), lambda _: None):
            await trio.sleep(1.5)
    assert trio.current_time() == pytest.approx(1.5)


async def test_ten_thousand_requests_with_leavers_leave_nothing_behind(
    autojump_clock: MockClock,
) -> None:
    """A third of them leaves half-way; every other gets exactly its tokens."""
    rng = random.Random(1)
    core = SimCore(SimSettings(itl_ms=10, max_running=128, kv_blocks=200))
    tokens = 0
    wanted = 0
    async with open_engine(core, host=InlineHost()) as engine, trio.open_nursery() as nursery:

        async def one(number: int, length: int, patience: float) -> None:
            nonlocal tokens, wanted
            got = 0
            with trio.move_on_after(patience) as scope:
                async with engine.open(request(str(number), length)) as deltas:
                    async for delta in deltas:
                        got += len(delta.token_ids)
            if not scope.cancelled_caught:
                tokens, wanted = tokens + got, wanted + length

        for number in range(10_000):
            patience = rng.choice([rng.uniform(0, 20), 1e6, 1e6])
            nursery.start_soon(one, number, rng.randint(1, 12), patience)
        await trio.testing.wait_all_tasks_blocked()
        await engine.drain()
        assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_blocks_used) == (0,) * 3
    assert tokens == wanted > 30_000
