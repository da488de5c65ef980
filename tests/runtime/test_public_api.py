"""The names that users of dynamo.runtime know: runtime, endpoint, client, context."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio import Context, RequestHead, open_runtime
from dynamo_trio.discovery import Instance, MemoryDiscovery
from dynamo_trio.endpoint import READ_INLINE_BYTES
from dynamo_trio.errors import (
    Cancelled,
    Draining,
    EngineShutdown,
    InvalidArgument,
    NoWorker,
    Overloaded,
    Unknown,
)
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.response_stream import ResponseStream
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.client import Client
    from dynamo_trio.endpoint import Handler
    from dynamo_trio.runtime import DistributedRuntime

NAME = "test.backend.generate"


@asynccontextmanager
async def served(
    handler: Handler, *, codec: Codec = MSGPACK, limit: float = math.inf, **settings: Any
) -> AsyncIterator[tuple[Client, DistributedRuntime]]:
    async with open_runtime(codec=codec, request_limit=limit) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving(handler, **settings), endpoint.client() as client:
            await client.wait_for_instances()
            yield client, runtime


async def echo(request: object) -> AsyncGenerator[object, None]:
    yield request


async def endless(_request: object, context: Context) -> AsyncGenerator[object, None]:
    """Counts until it is asked to stop, and then says so."""
    number = 0
    while not context.is_stopped():
        yield number
        number += 1
        await trio.sleep(1)
    yield "stopped"


# --- asking ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
async def test_a_request_travels_in_the_codec_of_its_instance(
    codec: Codec, autojump_clock: MockClock
) -> None:
    request = {"text": "ü", "numbers": [1, 2.5, None, True]}
    async with served(echo, codec=codec) as (client, _), client.generate(request) as stream:
        assert client.instances()[0].codec is codec
        assert [item async for item in stream] == [request]


@pytest.mark.parametrize("way", ["generate", "round_robin", "random", "direct"])
async def test_every_way_to_ask(way: str, autojump_clock: MockClock) -> None:
    async with served(echo) as (client, runtime):
        args = (7, runtime.instance_id) if way == "direct" else (7,)
        async with getattr(client, way)(*args, item_type=int) as stream:
            assert [item async for item in stream] == [7]


@pytest.mark.parametrize("way", ["generate", "round_robin", "random", "direct"])
async def test_no_way_to_ask_nobody(way: str, autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime, runtime.endpoint(NAME).client() as client:
        args = (7, 1) if way == "direct" else (7,)
        with pytest.raises(NoWorker):
            async with getattr(client, way)(*args):
                raise AssertionError("it must not open")


async def test_random_reaches_every_instance(autojump_clock: MockClock) -> None:
    plane, discovery = MemoryPlane(), MemoryDiscovery()

    def named(name: str) -> Handler:
        async def handler(_request: object) -> AsyncGenerator[str, None]:
            yield name

        return handler

    async with (
        open_runtime(planes=[plane], discovery=discovery) as one,
        open_runtime(planes=[plane], discovery=discovery) as two,
        one.endpoint(NAME).serving(named("one")),
        two.endpoint(NAME).serving(named("two")),
        one.endpoint(NAME).client() as client,
    ):
        seen = set()
        for _ in range(64):
            async with client.random(None) as stream:
                seen |= {item async for item in stream}
        assert seen == {"one", "two"}


async def test_the_worker_sees_id_and_metadata(autojump_clock: MockClock) -> None:
    async def tell(_request: object, context: Context) -> AsyncGenerator[object, None]:
        yield [context.id(), dict(context.metadata)]

    async with served(tell) as (client, _):
        async with client.generate(None, Context("mine", {"who": "me"})) as stream:
            assert [item async for item in stream] == [["mine", {"who": "me"}]]
        async with client.generate(None) as stream:  # each request has an id of its own
            assert len((await anext(stream))[0]) == 36


async def test_an_item_that_cannot_be_spelled_is_the_handlers_mistake(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def bad(_request: object) -> AsyncGenerator[object, None]:
        yield object()

    async with served(bad) as (client, _), client.generate(None) as stream:
        with pytest.raises(Unknown, match="failed to serve"):
            await anext(stream)
    assert "the handler failed" in caplog.text


@pytest.mark.parametrize("deep", [False, True])
async def test_the_log_begins_with_what_the_handler_raised(
    caplog: pytest.LogCaptureFixture, deep: bool, autojump_clock: MockClock
) -> None:
    async def bad(_request: object) -> AsyncGenerator[object, None]:
        yield "begun"
        error = ValueError("no such voice")
        raise ExceptionGroup("a nursery", [error]) if deep else error

    async with served(bad) as (client, _), client.generate(None, Context("r")) as stream:
        assert await anext(stream) == "begun"
        with pytest.raises(Unknown):
            await anext(stream)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.getMessage() == "request r: the handler failed: ValueError: no such voice"
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError


async def test_a_typed_exception_arrives_typed(autojump_clock: MockClock) -> None:
    async def leave(_request: object) -> AsyncGenerator[object, None]:
        yield 1
        raise EngineShutdown("going away")

    async with served(leave) as (client, _), client.generate(None) as stream:
        assert await anext(stream) == 1
        with pytest.raises(EngineShutdown, match="going away"):
            await anext(stream)


@attrs.frozen
class Question:
    number: int


@pytest.mark.parametrize("filler", ["", "x" * READ_INLINE_BYTES])
async def test_an_invalid_request_never_starts(filler: str, autojump_clock: MockClock) -> None:
    started = []

    async def handler(request: Question) -> AsyncGenerator[int, None]:
        started.append(request)
        yield request.number

    async with served(handler, request_type=Question) as (client, _):
        async with client.generate({"number": "no" + filler}) as stream:
            with pytest.raises(InvalidArgument, match="generate expects"):
                await anext(stream)
        assert not started
        async with client.generate({"number": 5, "more": filler}) as stream:
            assert await anext(stream) == 5


# --- limits ------------------------------------------------------------------------------


async def test_a_full_endpoint_refuses_and_recovers(autojump_clock: MockClock) -> None:
    async with served(endless, limit=1) as (client, _):
        async with client.generate(None):
            with pytest.raises(Overloaded, match="requests at once: 1"):
                async with client.generate(None):
                    raise AssertionError("it must not open")
        await trio.testing.wait_all_tasks_blocked()
        async with client.generate(None) as stream:
            assert await anext(stream) == 0


# --- stopping ----------------------------------------------------------------------------


async def test_stop_lets_the_worker_come_to_its_end(autojump_clock: MockClock) -> None:
    context = Context()
    async with served(endless) as (client, _), client.generate(None, context) as stream:
        assert await anext(stream) == 0
        context.stop_generating()
        assert [item async for item in stream][-1] == "stopped"


async def test_kill_ends_the_stream_for_its_reader_at_once(autojump_clock: MockClock) -> None:
    context = Context()
    async with served(endless) as (client, _), client.generate(None, context) as stream:
        assert await anext(stream) == 0
        context.kill()
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_a_context_that_was_stopped_before_stops_what_it_asks_for(
    autojump_clock: MockClock,
) -> None:
    context = Context()
    context.stop_generating()
    async with served(endless) as (client, _), client.generate(None, context) as stream:
        assert [item async for item in stream][-1] == "stopped"


async def test_a_stream_that_is_left_no_longer_follows_the_context(
    autojump_clock: MockClock,
) -> None:
    context = Context()
    async with served(echo) as (client, _), client.generate(None, context):
        pass
    context.kill()
    assert context.is_stopped()
    assert context.is_killed()


def test_children_stop_with_their_parent_and_not_the_other_way_round() -> None:
    parent = Context("p", {"a": "b"})
    first, second = parent.child(), parent.child("own")
    assert (first.id(), second.id(), first.metadata) == ("p", "own", {"a": "b"})
    second.stop_generating()
    assert not parent.is_stopped()
    assert not first.is_stopped()
    parent.stop_generating()
    assert first.is_stopped()
    assert not first.is_killed()
    parent.kill()
    assert first.is_killed()
    assert second.is_killed()
    assert parent.child().is_killed()


async def test_a_handler_passes_its_stop_on(autojump_clock: MockClock) -> None:
    """Client -> middle -> endless: a stop at the front reaches the last worker."""
    plane, discovery = MemoryPlane(), MemoryDiscovery()
    async with (
        open_runtime(planes=[plane], discovery=discovery) as back,
        open_runtime(planes=[plane], discovery=discovery) as front,
        back.endpoint("t.back.generate").serving(endless),
        front.endpoint("t.back.generate").client() as inner,
    ):

        async def middle(request: object, context: Context) -> AsyncGenerator[object, None]:
            async with inner.generate(request, context) as stream:
                async for item in stream:
                    yield item

        context = Context()
        async with (
            front.endpoint("t.middle.generate").serving(middle),
            front.endpoint("t.middle.generate").client() as client,
            client.generate(None, context) as answer,
        ):
            assert await anext(answer) == 0
            context.stop_generating()
            assert [item async for item in answer][-1] == "stopped"


# --- endpoints ---------------------------------------------------------------------------


async def test_an_endpoint_leaves_the_pool_and_comes_back(autojump_clock: MockClock) -> None:
    async with served(echo) as (client, runtime):
        endpoint = runtime.endpoint(NAME)
        assert endpoint.connection_id() == runtime.instance_id
        await endpoint.unregister_endpoint_instance()
        await trio.testing.wait_all_tasks_blocked()
        assert client.instance_ids() == []
        await endpoint.register_endpoint_instance()
        assert await client.wait_for_instances() == [runtime.instance_id]


async def test_only_what_is_served_can_leave_or_come_back(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        with pytest.raises(InvalidArgument, match="not served"):
            await runtime.endpoint(NAME).unregister_endpoint_instance()
        with pytest.raises(InvalidArgument, match="not served"):
            await runtime.endpoint(NAME).register_endpoint_instance()


async def test_a_process_that_stops_registers_nothing_any_more(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        runtime.shutdown()
        async with (
            runtime.endpoint(NAME).serving(echo),
            runtime.discovery.watch(Instance) as watch,
        ):
            assert not watch.snapshot


async def test_serve_endpoint_returns_when_the_process_has_stopped(
    autojump_clock: MockClock,
) -> None:
    async with open_runtime() as runtime, trio.open_nursery() as nursery:
        endpoint = runtime.endpoint(NAME)
        nursery.start_soon(endpoint.serve_endpoint, echo)
        async with endpoint.client() as client:
            await client.wait_for_instances()
            runtime.shutdown()
            await runtime.lifecycle.wait_stopped()
            with pytest.raises((NoWorker, Draining)):
                async with client.generate(None):
                    raise AssertionError("it must not open")


@pytest.mark.parametrize(
    ("payload", "why"), [("x", "a mapping, not str"), ({"a": {1, object()}}, "cannot be spelled")]
)
async def test_a_health_check_that_cannot_be_sent_is_refused(
    payload: Any, why: str, autojump_clock: MockClock
) -> None:
    async with open_runtime() as runtime:
        with pytest.raises(InvalidArgument, match=f"health_check_payload: .*{why}"):
            await runtime.endpoint(NAME).serve_endpoint(echo, health_check_payload=payload)


async def test_a_request_that_streams_in_has_no_health_check(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        serving = runtime.endpoint(NAME).serving(
            echo, streams_in=True, health_check_payload={"a": 1}
        )
        with pytest.raises(InvalidArgument, match="have no payload"):
            async with serving:
                raise AssertionError("it must not be served")


def exposition(runtime: DistributedRuntime) -> list[str]:
    return runtime.metrics.exposition().decode().splitlines()


async def test_requests_are_counted_with_dynamos_labels(autojump_clock: MockClock) -> None:
    async def half(_request: object) -> AsyncGenerator[int, None]:
        yield 1
        raise InvalidArgument("no")

    async with served(half, metrics_labels=[("model", "m")]) as (client, runtime):
        async with client.generate(None) as stream:
            with pytest.raises(InvalidArgument):
                [item async for item in stream]
        labels = (
            'dynamo_component="backend",dynamo_endpoint="generate",dynamo_namespace="test",'
            '{error}model="m",worker_id="' + f"{runtime.instance_id:x}" + '"}}'
        )
        lines = exposition(runtime)
        plain, failed = (
            labels.format(error=""),
            labels.format(error='error_type="invalid_message",'),
        )
        assert f"dynamo_component_requests_total{{{plain} 1.0" in lines
        assert f"dynamo_component_errors_total{{{failed} 1.0" in lines
        assert f"dynamo_component_inflight_requests{{{plain} 0.0" in lines
        assert f'dynamo_component_uptime_seconds{{worker_id="{runtime.instance_id:x}"}}' in (
            line.partition(" ")[0] for line in lines
        )


async def test_endpoints_may_have_different_labels(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        one, two = runtime.endpoint("t.b.one"), runtime.endpoint("t.b.two")
        async with one.serving(echo, metrics_labels=[("model", "m")]), two.serving(echo):
            totals = [
                line
                for line in exposition(runtime)
                if line.startswith("dynamo_component_requests_total{")
            ]
            assert len(totals) == 2  # both are there before the first request
            assert [line for line in totals if 'model="m"' in line and '"one"' in line]
            heads = [
                line
                for line in exposition(runtime)
                if line.startswith("# TYPE dynamo_component_requests_total")
            ]
            assert len(heads) == 1


async def test_the_work_handlers_metrics(autojump_clock: MockClock) -> None:
    def value(runtime: DistributedRuntime, name: str) -> float:
        (line,) = [x for x in exposition(runtime) if x.startswith(f"{name} ")]
        return float(line.split()[1])

    async with served(endless, limit=1) as (client, runtime):
        instance = client.pick()
        async with client.generate(None) as stream:
            assert await anext(stream) == 0
            for _ in range(2):
                with pytest.raises(Overloaded):
                    async with client.generate(None):
                        raise AssertionError("it must not open")
            assert value(runtime, "dynamo_work_handler_pool_active_tasks") == 1
        assert value(runtime, "dynamo_rejection_request_total") == 2
        assert value(runtime, "dynamo_work_handler_pool_capacity") == 1
        assert value(runtime, "dynamo_work_handler_time_to_first_response_seconds_count") == 1
        assert value(runtime, "dynamo_work_handler_permit_wait_seconds_count") == 1
        runtime.shutdown()
        await runtime.lifecycle.interrupted.wait()
        late = ResponseStream(object)
        with pytest.raises(Draining):
            async with client.open_stream(instance, RequestHead("late"), None, late):
                raise AssertionError("it must not open")
        assert value(runtime, "dynamo_work_handler_enqueue_rejected_total") == 1


def test_engine_routes_are_named_once() -> None:
    async def main() -> None:
        async with open_runtime() as runtime:

            async def profile(body: dict[str, object]) -> object:
                return body

            runtime.register_engine_route("profile/start", profile)
            for bad in ("profile/start", "", "/x"):
                with pytest.raises(ValueError, match="engine route"):
                    runtime.register_engine_route(bad, profile)

    trio.run(main)


@attrs.define(eq=False)
class Slow(MemoryDiscovery):
    """A store in which a registration takes its time."""

    async def register(self, record: Any) -> None:
        await trio.sleep(5)
        await super().register(record)


async def test_what_is_withdrawn_while_it_registers_was_never_found(
    autojump_clock: MockClock,
) -> None:
    async with open_runtime(discovery=Slow()) as runtime, trio.open_nursery() as nursery:
        nursery.start_soon(runtime.endpoint(NAME).serve_endpoint, echo)
        await trio.sleep(1)
        await runtime.unregister_all()
        await trio.sleep(10)
        assert not runtime.was_found
        assert runtime.endpoint_states() == {"generate": False}
        runtime.shutdown()
