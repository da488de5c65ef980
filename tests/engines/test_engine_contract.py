"""What every core on every host must do for its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.engines import Delta, Engine, Request, open_engine
from dynamo_trio.errors import EngineClosed, EngineShutdown, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.conftest import Rig


async def answer(engine: Engine, request: Request) -> list[int]:
    token_ids: list[int] = []
    async with engine.open(request) as deltas:
        async for delta in deltas:
            token_ids.extend(delta.token_ids)
    return token_ids


async def step_end(engine: Engine, condition: Callable[[], bool]) -> None:
    """Wait for the end of a step at which the condition holds."""
    reached = trio.Event()
    end = engine.on_step(lambda _: reached.set() if condition() else None)
    await reached.wait()
    end()


async def test_an_answer_has_its_tokens_once_and_one_end(rig: Rig) -> None:
    seen: list[Delta] = []
    async with open_engine(rig.core(), host=rig.host()) as engine:
        async with engine.open(rig.request(max_tokens=9)) as deltas:
            seen = [delta async for delta in deltas]
        with pytest.raises(trio.ClosedResourceError):
            await deltas.receive()
        assert engine.open_requests == 0
    assert sum(len(delta.token_ids) for delta in seen) == 9
    assert [delta.finish_reason for delta in seen] == [None] * (len(seen) - 1) + ["length"]


async def test_without_max_tokens_an_answer_fills_the_context(rig: Rig) -> None:
    async with open_engine(rig.core(), host=rig.host()) as engine:
        request = rig.request(max_tokens=None, prompt=240)
        room = engine.info.context_tokens - len(request.token_ids)
        assert len(await answer(engine, request)) == room


async def test_after_the_drain_nothing_is_left_and_nothing_new_gets_in(rig: Rig) -> None:
    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine, trio.open_nursery() as nursery:
        for name in "abcdef":
            nursery.start_soon(answer, engine, rig.request(name))
        await trio.testing.wait_all_tasks_blocked()
        await engine.drain()
        assert engine.state == "draining"
        assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_blocks_used) == (0,) * 3
        with pytest.raises(EngineClosed):
            await answer(engine, rig.request("late"))
    assert sorted(core.added) == list("abcdef")
    assert engine.state == "closed"


async def test_leaving_one_of_two_frees_it_at_the_next_boundary_and_spares_the_other(
    rig: Rig,
) -> None:
    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine:
        alone = await answer(engine, rig.request("b", 30))
        beside: list[int] = []
        async with trio.open_nursery() as nursery:

            async def stay() -> None:
                beside.extend(await answer(engine, rig.request("b", 30)))

            nursery.start_soon(stay)
            async with engine.open(rig.request("a", 200)):
                await step_end(engine, lambda: engine.stats.running == 2)
                both = engine.stats.kv_blocks_used
            left_at = engine.step_count  # the running step may end, then comes the boundary
            await step_end(engine, lambda: engine.step_count == left_at + 2)
            assert engine.stats.running == 1
            assert engine.stats.kv_blocks_used < both
    assert beside == alone
    assert core.aborted == ["a"]


async def test_a_request_left_before_it_reached_the_core_never_gets_there(rig: Rig) -> None:
    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine:
        async with engine.open(rig.request("gone")):
            pass
        await answer(engine, rig.request("here"))
    assert core.added == ["here"]
    assert core.aborted == []


async def test_an_id_may_come_back_as_soon_as_it_was_left(rig: Rig) -> None:
    async with open_engine(rig.core(), host=rig.host()) as engine:
        alone = await answer(engine, rig.request("x", 12))
        async with engine.open(rig.request("x", 100, prompt=9)) as deltas:
            await deltas.receive()
        assert await answer(engine, rig.request("x", 12)) == alone


async def test_an_id_in_use_is_rejected(rig: Rig) -> None:
    async with open_engine(rig.core(), host=rig.host()) as engine:
        async with engine.open(rig.request("x")) as deltas:
            with pytest.raises(RequestRejected, match="in use"):
                await answer(engine, rig.request("x"))
            assert sum([len(delta.token_ids) async for delta in deltas]) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "empty"),
        ({"token_ids": range(10, 270)}, "context has 256 tokens; the prompt has 260"),
        ({"max_tokens": 254}, "254 are to be generated"),
        ({"max_tokens": 0}, "at least 1"),
        ({"token_ids": (1, 10**9)}, "token ids must be between"),
        ({"token_ids": (1, -1)}, "token ids must be between"),
    ],
)
async def test_a_request_that_cannot_be_served_is_rejected_alone(
    rig: Rig, change: dict[str, Any], message: str
) -> None:
    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine:
        async with engine.open(rig.request("good", 20)) as deltas:
            with pytest.raises(RequestRejected, match=message):
                await answer(engine, attrs.evolve(rig.request("bad"), **change))
            assert sum([len(delta.token_ids) async for delta in deltas]) == 20
    assert core.added == ["good"]


async def test_a_reader_that_never_reads_stops_nobody_and_its_buffer_is_bounded(rig: Rig) -> None:
    async with open_engine(rig.core(), host=rig.host()) as engine:
        async with engine.open(rig.request("slow", 40)) as slow:
            assert len(await answer(engine, rig.request("quick", 60))) == 60
            batch = await slow.receive_batch()
            assert len(batch) <= 41
            assert sum(len(delta.token_ids) for delta in batch) == 40


async def test_more_requests_than_places_are_all_served(rig: Rig) -> None:
    answers: dict[str, int] = {}
    async with open_engine(rig.core(), host=rig.host()) as engine, trio.open_nursery() as nursery:

        async def one(name: str) -> None:
            answers[name] = len(await answer(engine, rig.request(name, 5)))

        for name in "abcdefghij":
            nursery.start_soon(one, name)
    assert answers == dict.fromkeys("abcdefghij", 5)


async def test_an_idle_engine_does_nothing(rig: Rig) -> None:
    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine:
        await answer(engine, rig.request())
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = engine.step_count, core.steps
        await trio.sleep(0.05)
        assert (engine.step_count, core.steps) == before
        assert engine.step_age() == 0.0


async def test_a_step_is_one_batch_for_its_listeners(rig: Rig) -> None:
    batches: list[list[str]] = []
    inbox: list[Delta] = []
    async with open_engine(rig.core(), host=rig.host()) as engine:
        with (
            engine.attach(rig.request("a", 5), inbox.append),
            engine.attach(rig.request("b", 5), inbox.append),
        ):
            end = engine.on_step(lambda deltas: batches.append([d.request_id for d in deltas]))
            await engine.drain()
            end()
    assert ["a", "b"] in batches
    assert [name for batch in batches for name in batch] == [d.request_id for d in inbox]


async def test_a_sink_that_raises_loses_its_request_only(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Delta) -> None:
        raise RuntimeError("broken sink")

    core = rig.core()
    async with open_engine(core, host=rig.host()) as engine:
        with engine.attach(rig.request("bad", 100), broken):
            assert len(await answer(engine, rig.request("good", 20))) == 20
            assert engine.open_requests == 0
    assert core.aborted == ["bad"]
    assert "broken sink" in caplog.text


# --- the end ------------------------------------------------------------------------


async def test_cancelling_everything_waits_for_the_step_then_closes_once(rig: Rig) -> None:
    core = rig.core()
    with trio.CancelScope() as scope:
        async with open_engine(core, host=rig.host()) as engine:
            async with engine.open(rig.request(max_tokens=200)) as deltas:
                await deltas.receive()
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert core.closes == 1
    assert engine.state == "closed"


async def test_leaving_the_block_by_an_exception_closes_once(rig: Rig) -> None:
    core = rig.core()
    with pytest.RaisesGroup(ZeroDivisionError):
        async with open_engine(core, host=rig.host()) as engine:
            async with engine.open(rig.request(max_tokens=200)) as deltas:
                await deltas.receive()
                raise ZeroDivisionError
    assert core.closes == 1
    assert engine.state == "closed"


async def test_who_outlives_the_engine_is_told(rig: Rig) -> None:
    core = rig.core()
    async with trio.open_nursery() as nursery:

        async def outlive(engine: Engine) -> None:
            async with engine.open(rig.request(max_tokens=200)) as deltas:
                with pytest.raises(EngineShutdown):
                    async for _ in deltas:
                        pass

        async with open_engine(core, host=rig.host()) as engine:
            nursery.start_soon(outlive, engine)
            await trio.testing.wait_all_tasks_blocked()
    assert core.closes == 1
    with pytest.raises(EngineClosed):
        await answer(engine, rig.request())


async def test_cancelling_the_load_leaves_a_core_that_is_closed_once(rig: Rig) -> None:
    core = rig.core()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_engine(core, host=rig.host()):
            pytest.fail("the load was cancelled")
    assert core.closes == 1
    assert core.steps == 0


async def test_progress_of_the_load_ends_at_1(rig: Rig) -> None:
    seen: list[float] = []
    async with open_engine(rig.core(), host=rig.host(), progress=seen.append):
        pass
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
