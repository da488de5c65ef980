"""An endpoint in virtual time: admission, the handler's task, every way in which it can end."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dynamo_trio import Context, RequestHead, Timetable
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.endpoint import takes_context
from dynamo_trio.errors import (
    Draining,
    EngineDead,
    EngineShutdown,
    InvalidArgument,
    NoWorker,
    Unknown,
)
from dynamo_trio.lifecycle import DrainPolicy, Lifecycle, Outcome
from dynamo_trio.plane import INITIAL_CREDIT, MemoryPlane
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.runtime import open_runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dynamo_trio.client import Client
    from dynamo_trio.endpoint import AnyHandler, Handler
    from dynamo_trio.runtime import DistributedRuntime

NAME = "test.backend.generate"


@asynccontextmanager
async def served(
    handler: AnyHandler, *, graceful: bool = True, request_type: type = object, **limits: Any
) -> AsyncIterator[tuple[Client, DistributedRuntime]]:
    """A handler behind a client; the block is left with a graceful stop."""
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, **limits}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            endpoint = runtime.endpoint(NAME)
            async with (
                endpoint.client() as client,
                endpoint.serving(handler, graceful_shutdown=graceful, request_type=request_type),
            ):
                await client.wait_for_instances()
                yield client, runtime
                lifecycle.request_stop("the test is over")
                await lifecycle.wait_stopped()


async def collect(client: Client, request: object = None) -> list[Any]:
    async with client.generate(request, Context("r1")) as stream:
        return [item async for item in stream]


async def count_to_three(request: dict[str, int]) -> AsyncGenerator[int, None]:
    for number in range(3):
        await trio.sleep(1)
        yield number + request["start"]


async def test_items_arrive_as_they_are_yielded(autojump_clock: trio.testing.MockClock) -> None:
    async with served(count_to_three) as (client, runtime):
        assert await collect(client, {"start": 5}) == [5, 6, 7]
        await trio.testing.wait_all_tasks_blocked()
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}


async def test_a_handler_may_take_the_context(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(request: object, context: Context) -> AsyncGenerator[str, None]:
        yield f"{context.id()} {context.is_stopped()} {context.is_killed()}"

    async with served(handler) as (client, _):
        assert await collect(client) == ["r1 False False"]


@pytest.mark.parametrize(
    "handler", [lambda: None, lambda a, b, c: None], ids=["no argument", "three arguments"]
)
def test_a_handler_takes_one_or_two_arguments(handler: Any) -> None:
    with pytest.raises(TypeError, match=r"\(request\) or \(request, context\)"):
        takes_context(handler)


async def a_coroutine(request: object) -> int:
    return 1


def a_generator(request: object) -> Any:
    yield 1


@pytest.mark.parametrize("handler", [a_coroutine, a_generator])
def test_what_is_no_asynchronous_generator_is_refused_at_once(handler: Any) -> None:
    with pytest.raises(TypeError, match=rf"{handler.__name__} is a .*'async def' with 'yield'"):
        takes_context(handler)


async def test_a_plain_function_may_return_a_generator(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def handler(request: dict[str, int]) -> AsyncGenerator[int, None]:
        return count_to_three(request)

    async with served(handler) as (client, _):
        assert await collect(client, {"start": 1}) == [1, 2, 3]


async def test_what_a_plain_function_returns_instead_is_its_fault(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(request: object) -> Any:
        return [1, 2, 3]

    async with served(handler) as (client, _):
        with pytest.raises(Unknown):
            await collect(client)
    assert "the handler returned [1, 2, 3], no asynchronous generator" in caplog.text


async def test_a_long_wait_for_a_worker_is_told(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_runtime() as runtime, runtime.endpoint("a.b.misspelt").client() as client:
        with pytest.raises(NoWorker, match=r"dyn://a\.b\.misspelt"):
            client.pick()
        with trio.move_on_after(15):
            await client.wait_for_instances()
    assert "still waiting for a worker that serves dyn://a.b.misspelt" in caplog.text


async def test_a_typed_error_arrives_typed(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        yield 1
        raise EngineDead("it broke")

    async with served(handler) as (client, runtime):
        with pytest.raises(EngineDead, match="it broke"):
            await collect(client)
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}  # nobody could take it


async def test_a_handlers_bug_is_logged_and_stays_in_its_request(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        yield 1
        raise ZeroDivisionError("secret")

    async with served(handler) as (client, _):
        with pytest.raises(Unknown) as raised:
            await collect(client)
        assert "secret" not in str(raised.value)
        with pytest.raises(Unknown):  # the endpoint lives
            await collect(client)
    assert "ZeroDivisionError: secret" in caplog.text


async def test_errors_in_a_nursery_of_the_handler_do_not_leave_the_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def fail() -> None:
        raise ValueError("inner")

    async def handler(request: object) -> AsyncGenerator[int, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
        yield 1

    async with served(handler) as (client, _):
        with pytest.raises(Unknown):
            await collect(client)


class ForeignCancelled(BaseException):
    """As asyncio's CancelledError: no Exception, and none of Trio's business."""


def what_kills(error: BaseException, *, pushes: bool) -> AnyHandler:
    """A handler that is fine, or raises this in the middle of its work."""

    async def generate(request: str) -> AsyncGenerator[int, None]:
        yield 0
        await trio.sleep(1)
        if request == "bad":
            raise error
        yield 1

    async def push(request: str, context: Context, output: Output) -> None:
        output.put(0)
        await trio.sleep(1)
        if request == "bad":
            raise error
        output.put_last(1)

    return PushHandler(push) if pushes else generate


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), ForeignCancelled()])
async def test_no_exception_of_a_handler_ends_more_than_its_request(
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    pushes: bool,
) -> None:
    async with served(what_kills(error, pushes=pushes)) as (client, runtime):
        async with client.generate("good", item_type=int) as good:
            assert await anext(good) == 0
            with pytest.raises(Unknown):
                await collect(client, "bad")
            assert await anext(good) == 1
        assert await collect(client, "good") == [0, 1]
        await trio.testing.wait_all_tasks_blocked()
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 2, Outcome.FAILED: 1}
    assert f"the handler failed: {type(error).__name__}: {error}" in caplog.text


async def test_ctrl_c_in_a_handler_ends_the_program(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        async with served(what_kills(KeyboardInterrupt(), pushes=False)) as (client, _):
            with pytest.raises(EngineShutdown):
                await collect(client, "bad")
            await trio.sleep_forever()


async def test_what_is_no_generator_fails_only_its_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def handler(request: object) -> Any:
        raise RuntimeError("not a generator")

    async with served(handler) as (client, _):
        with pytest.raises(Unknown):
            await collect(client)


async def test_a_client_that_leaves_cancels_the_handler_whose_cleanup_runs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    seen: list[object] = []

    async def handler(request: object, context: Context) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            seen.append((context.is_stopped(), context.is_killed()))
            with context.cleanup(5):
                await trio.sleep(2)
                seen.append("cleaned")

    async with served(handler) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            assert await stream.__anext__() == 1
        await runtime.lifecycle.work.wait_empty()
        assert seen == [(True, True), "cleaned"]
        assert runtime.lifecycle.work.tally == {Outcome.CANCELLED: 1}


async def test_cleanup_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(request: object, context: Context) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            with context.cleanup(5):
                await trio.sleep_forever()

    async with served(handler) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
        left = trio.current_time()
        await runtime.lifecycle.work.wait_empty()
        assert trio.current_time() - left == 5


async def endless(request: object) -> AsyncGenerator[int, None]:
    yield 0
    await trio.sleep_forever()


async def test_the_drain_waits_and_then_says_farewell(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(endless, drain=900.0) as (client, runtime):
        began = trio.current_time()
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
            runtime.shutdown()
            with pytest.raises(EngineShutdown) as raised:
                await stream.__anext__()
        assert not raised.value.planned
        assert trio.current_time() - began == pytest.approx(900.25, abs=0.3)
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}


async def test_a_request_that_ends_in_the_drain_is_not_disturbed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(count_to_three) as (client, runtime):
        async with client.generate({"start": 0}, Context("r1"), item_type=int) as stream:
            runtime.shutdown()
            assert [item async for item in stream] == [0, 1, 2]
        await runtime.lifecycle.wait_stopped()
        assert trio.current_time() == pytest.approx(3.0, abs=0.3)


async def test_nothing_waits_for_an_endpoint_that_is_not_graceful(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(endless, graceful=False) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
            runtime.shutdown()
            with pytest.raises(EngineShutdown):
                await stream.__anext__()
        assert trio.current_time() < 2


async def test_the_policy_migrate_keeps_what_nobody_has_a_place_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    migrate = served(endless, drain=10.0, drain_policy=DrainPolicy.MIGRATE)
    async with migrate as (client, runtime):
        began = trio.current_time()
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
            runtime.shutdown()
            with pytest.raises(EngineShutdown) as raised:
                await stream.__anext__()
        assert not raised.value.planned
        assert trio.current_time() - began == pytest.approx(10.25, abs=0.3)
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}


@pytest.mark.parametrize("error", [RuntimeError("in cleanup"), Unknown("gone")])
async def test_cleanup_that_fails_under_a_cut_does_not_hide_the_cut(
    autojump_clock: trio.testing.MockClock, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        yield 0
        try:
            await trio.sleep_forever()
        finally:
            raise error

    async with served(handler, drain=1.0) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
            runtime.shutdown()
            with pytest.raises(EngineShutdown, match="the worker is shutting down"):
                await stream.__anext__()
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}
        assert "dynamo_component_errors_total{" not in runtime.metrics.exposition().decode()
    logged = "request r1: the handler failed: RuntimeError: in cleanup" in caplog.text
    assert logged is isinstance(error, RuntimeError)  # the other is one that handlers may raise


async def test_cleanup_that_fails_behind_a_client_that_left_is_a_cancellation(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        yield 0
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("in cleanup")

    async with served(handler) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
        await runtime.lifecycle.work.wait_empty()
        assert runtime.lifecycle.work.tally == {Outcome.CANCELLED: 1}
    assert "request r1: the handler failed: RuntimeError: in cleanup" in caplog.text


async def test_a_worker_that_stops_refuses_new_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(endless, drain=10.0) as (client, runtime):
        instance = client.pick()
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
            runtime.shutdown()
            await runtime.lifecycle.interrupted.wait()
            with pytest.raises(Draining):
                async with client.open_stream(instance, RequestHead("r1"), None, stream):
                    raise AssertionError("it must not open")
            with pytest.raises(NoWorker):  # discovery has told, too
                client.pick()


async def test_a_slow_reader_holds_back_only_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    made = {"slow": 0, "fast": 0}

    async def handler(request: str) -> AsyncGenerator[int, None]:
        for number in range(1000):
            made[request] += 1
            yield number

    async with served(handler) as (client, _):
        async with client.generate("slow", Context("r1"), item_type=int) as slow:
            await slow.__anext__()
            assert len(await collect(client, "fast")) == 1000
            assert made["slow"] <= INITIAL_CREDIT + 1
            assert [item async for item in slow] == list(range(1, 1000))


async def test_a_reader_that_never_reads_is_cut_at_the_limit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        while True:
            yield 1

    async with served(handler, drain=30.0) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int):
            await trio.testing.wait_all_tasks_blocked()
            runtime.shutdown()
            await runtime.lifecycle.wait_stopped()
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}
        assert trio.current_time() < 33


async def test_a_request_of_the_wrong_shape_is_refused_with_its_name(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(count_to_three, request_type=int) as (client, runtime):
        with pytest.raises(InvalidArgument, match="generate"):
            await collect(client, "no number")
        assert runtime.lifecycle.work.count == 0


async def test_a_hard_cancel_still_says_the_last_word(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lifecycle = Lifecycle(Timetable(grace=0.0))
    plane, discovery = MemoryPlane(), MemoryDiscovery()
    async with (
        open_runtime(lifecycle, planes=[plane], discovery=discovery) as mine,
        mine.endpoint(NAME).client() as client,
    ):
        with trio.CancelScope() as worker:
            async with mine.endpoint(NAME).serving(endless):
                await client.wait_for_instances()
                async with client.generate(None, Context("r1"), item_type=int) as stream:
                    await stream.__anext__()
                    worker.cancel()
                    with trio.CancelScope(shield=True):
                        with pytest.raises(EngineShutdown):
                            await stream.__anext__()
        assert lifecycle.work.tally == {Outcome.LOST: 1}
        await trio.testing.wait_all_tasks_blocked()
        assert client.instance_ids() == []


async def test_a_generator_that_ignores_its_end_is_reported(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: object) -> AsyncGenerator[int, None]:
        while True:
            try:
                yield 1
            except GeneratorExit:
                yield 2

    caplog.set_level(logging.ERROR)
    async with served(handler) as (client, runtime):
        async with client.generate(None, Context("r1"), item_type=int) as stream:
            await stream.__anext__()
        await runtime.lifecycle.work.wait_empty()
    assert "yielded after it had been told to end" in caplog.text


async def test_round_robin_takes_turns(autojump_clock: trio.testing.MockClock) -> None:
    plane, discovery = MemoryPlane(), MemoryDiscovery()

    def named(name: str) -> Handler:
        async def handler(request: object) -> AsyncGenerator[str, None]:
            yield name

        return handler

    async with (
        open_runtime(planes=[plane], discovery=discovery) as one,
        open_runtime(planes=[plane], discovery=discovery) as two,
        one.endpoint(NAME).serving(named("one")) as first,
        two.endpoint(NAME).serving(named("two")),
        one.endpoint(NAME).client() as client,
    ):
        assert [(await collect(client))[0] for _ in range(4)] == ["one", "two", "one", "two"]
        assert client.find(first.instance_id) == first
        with pytest.raises(NoWorker):
            client.find(1)


async def test_leaving_the_routing_pool_and_coming_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with served(count_to_three) as (client, runtime):
        (instance,) = client.instances()
        await runtime.unregister(instance)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NoWorker):
            client.pick()
        await runtime.register(instance)
        assert await client.wait_for_instances() == [instance.instance_id]


async def test_a_runtime_without_a_lifecycle_stops_by_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_runtime() as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.client() as client, endpoint.serving(count_to_three):
            await client.wait_for_instances()
            assert await collect(client, {"start": 1}) == [1, 2, 3]
    assert runtime.lifecycle.cause == "the runtime is left"
