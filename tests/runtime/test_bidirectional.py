"""Endpoints whose requests stream in: what handler and client are given, and every end of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from dynamo_trio import Context, Timetable
from dynamo_trio.endpoint import READ_INLINE_BYTES
from dynamo_trio.errors import (
    Cancelled,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    LocalProtocolError,
    Unknown,
)
from dynamo_trio.lifecycle import Lifecycle, Outcome
from dynamo_trio.plane import INITIAL_CREDIT, RequestHead
from dynamo_trio.response_stream import ResponseStream
from dynamo_trio.runtime import open_runtime
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from tests.runtime.real_planes import plane_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from dynamo_trio.client import Client
    from dynamo_trio.endpoint import Handler
    from dynamo_trio.request_stream import RequestStream
    from dynamo_trio.runtime import DistributedRuntime

    Clock = trio.testing.MockClock
    Items = AsyncGenerator[Any, None]

NAME = "test.backend.realtime"
PATIENCE = 20.0


@attrs.define(eq=False)
class Scene:
    client: Client
    runtime: DistributedRuntime
    lifecycle: Lifecycle

    def measured(self, name: str) -> float:
        """The value of one metric of the endpoint."""
        lines = self.runtime.metrics.registry.collect()
        samples = [s for m in lines for s in m.samples if s.name == name]
        return sum(s.value for s in samples)


@asynccontextmanager
async def served(
    handler: Handler,
    kind: str = "mem",
    *,
    codec: Codec = MSGPACK,
    request_type: type = object,
    **limits: Any,
) -> AsyncIterator[Scene]:
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, **limits}))
    async with plane_of(kind) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle, planes=[plane], codec=codec) as runtime:
            endpoint = runtime.endpoint(NAME)
            serving = endpoint.serving_bidirectional(handler, request_type=request_type)
            async with endpoint.client() as client, serving:
                await client.wait_for_instances()
                yield Scene(client, runtime, lifecycle)
                lifecycle.request_stop("the test is over")
                await lifecycle.wait_stopped()


async def echo(requests: RequestStream, context: Context) -> Items:
    async for request in requests:
        yield {"echo": request}
    yield {"stopped": context.is_stopped()}


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
            await trio.sleep(0.001)


# --- over every way of asking ----------------------------------------------------------------


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda c: c.name)
@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_both_ways_at_once_and_then_the_end(kind: str, codec: Codec) -> None:
    async with (
        served(echo, kind, codec=codec) as scene,
        scene.client.bidirectional(Context("r1")) as stream,
    ):
        with trio.fail_after(PATIENCE):
            for number in range(3):
                await stream.send({"n": number})
                assert await anext(stream) == {"echo": {"n": number}}
            stream.end_input()
            assert [item async for item in stream] == [{"stopped": False}]


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_many_items_and_a_slow_handler(kind: str) -> None:
    """Far more than there is credit for: nothing is lost, and the client waits."""
    count = 10 * INITIAL_CREDIT

    async def slow(requests: RequestStream) -> Items:
        total = 0
        async for request in requests:
            await trio.lowlevel.checkpoint()
            total += request["n"]
        yield total

    async with served(slow, kind) as scene, scene.client.bidirectional() as stream:
        with trio.fail_after(PATIENCE):
            for number in range(count):
                await stream.send({"n": number})
            stream.end_input()
            assert [item async for item in stream] == [sum(range(count))]


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_a_handler_that_stops_reading_holds_its_client_back(kind: str) -> None:
    done = trio.Event()

    async def deaf(requests: RequestStream) -> Items:
        await done.wait()
        yield "enough"

    async with served(deaf, kind) as scene, scene.client.bidirectional() as stream:
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < 2000:
                await stream.send("x" * 50_000)
                sent += 1

        async def finish_when_held_back() -> None:
            before = -1
            while sent != before:
                before = sent
                await trio.sleep(0.3)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(finish_when_held_back)
            with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
                await send()
        assert sent >= INITIAL_CREDIT
        assert [item async for item in stream] == ["enough"]


# --- what the handler is told ----------------------------------------------------------------


async def test_items_have_a_type(autojump_clock: Clock) -> None:
    class Item(msgspec.Struct):
        n: int

    async def double(requests: RequestStream[Item]) -> Items:
        async for request in requests:
            yield Item(2 * request.n)

    async with (
        served(double, request_type=Item) as scene,
        scene.client.bidirectional(item_type=Item) as stream,
    ):
        await stream.send(Item(4))
        assert (await anext(stream)).n == 8
        await stream.send({"n": "eight"})
        with pytest.raises(InvalidArgument, match=r"not what realtime expects"):
            await anext(stream)


async def test_a_cancelled_wait_loses_no_item_however_large() -> None:
    large = "x" * (2 * READ_INLINE_BYTES)

    async def impatient(requests: RequestStream) -> Items:
        with trio.move_on_after(0):  # it is read in a thread, which takes longer
            yield len(await anext(requests))
        async for request in requests:
            yield len(request)

    async with served(impatient) as scene, scene.client.bidirectional() as stream:
        await stream.send(large)
        await stream.send("small")
        stream.end_input()
        assert [item async for item in stream] == [len(large), len("small")]


async def test_a_handler_may_go_on_behind_an_item_that_it_cannot_read(
    autojump_clock: Clock,
) -> None:
    async def patient(requests: RequestStream[int]) -> Items:
        while True:
            try:
                yield await anext(requests)
            except InvalidArgument as exc:
                yield str(exc)
            except StopAsyncIteration:
                return

    async with (
        served(patient, request_type=int) as scene,
        scene.client.bidirectional() as stream,
    ):
        for item in (1, "two", 3):
            await stream.send(item)
        stream.end_input()
        one, error, three = [item async for item in stream]
        assert (one, three) == (1, 3)
        assert "the request is not what realtime expects" in error


async def test_metadata_and_identity(autojump_clock: Clock) -> None:
    async def who(requests: RequestStream, context: Context) -> Items:
        yield [context.id(), dict(context.metadata)]

    async with (
        served(who) as scene,
        scene.client.bidirectional(Context("r7", {"a": "b"})) as stream,
    ):
        assert await anext(stream) == ["r7", {"a": "b"}]


async def test_stopping_ends_the_input(autojump_clock: Clock) -> None:
    async with served(echo) as scene, scene.client.bidirectional() as stream:
        await stream.send(1)
        assert await anext(stream) == {"echo": 1}
        stream.stop_generating()
        assert [item async for item in stream] == [{"stopped": True}]
        with pytest.raises(trio.ClosedResourceError):
            await stream.send(2)


@pytest.mark.parametrize("killed", [True, False])
async def test_leaving_cancels_the_handler(killed: bool, autojump_clock: Clock) -> None:
    seen: list[object] = []

    async def listen(requests: RequestStream, context: Context) -> Items:
        try:
            yield "ready"
            await anext(requests)
        finally:
            seen.append(context.is_killed())

    async with served(listen) as scene:
        context = Context()
        async with scene.client.bidirectional(context) as stream:
            assert await anext(stream) == "ready"
            if killed:
                context.kill()
                with pytest.raises(Cancelled):
                    await anext(stream)
        await until(lambda: bool(seen))
        assert seen == [True]
        await until(lambda: scene.measured("dynamo_component_inflight_requests") == 0)
        assert scene.measured("dynamo_component_cancellation_total") == 1


async def test_a_killed_request_wakes_its_sender(autojump_clock: Clock) -> None:
    async def deaf(requests: RequestStream) -> Items:
        await trio.Event().wait()
        yield None

    async with served(deaf) as scene:
        context = Context()
        async with scene.client.bidirectional(context) as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(2 * INITIAL_CREDIT):
                    await stream.send(0)

            async def send_in_vain() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await send()

            nursery.start_soon(send_in_vain)
            await trio.testing.wait_all_tasks_blocked(0.1)
            with pytest.raises(trio.BusyResourceError):
                await stream.send(1)
            context.kill()


# --- ends ------------------------------------------------------------------------------------


async def test_the_handler_may_end_first(autojump_clock: Clock) -> None:
    async def once(requests: RequestStream) -> Items:
        yield await anext(requests)

    async with served(once) as scene, scene.client.bidirectional() as stream:
        await stream.send("a")
        assert [item async for item in stream] == ["a"]
        with pytest.raises(trio.BrokenResourceError) as info:
            await stream.send("b")
        assert info.value.__cause__ is None
        stream.end_input()


async def test_the_answer_goes_on_behind_the_end_of_the_input(autojump_clock: Clock) -> None:
    async def sums(requests: RequestStream) -> Items:
        numbers = [number async for number in requests]
        for number in numbers:
            await trio.sleep(1)
            yield number

    async with served(sums) as scene, scene.client.bidirectional() as stream:
        for number in range(3):
            await stream.send(number)
        stream.end_input()
        stream.end_input()
        assert [item async for item in stream] == [0, 1, 2]


async def test_an_error_of_the_handler(autojump_clock: Clock) -> None:
    async def boom(requests: RequestStream) -> Items:
        async for _ in requests:
            raise RuntimeError("boom")
        yield None

    async with served(boom) as scene, scene.client.bidirectional() as stream:
        await stream.send(1)
        with pytest.raises(Unknown):
            await anext(stream)


async def test_an_item_that_no_codec_can_spell(autojump_clock: Clock) -> None:
    async with served(echo) as scene, scene.client.bidirectional() as stream:
        with pytest.raises(LocalProtocolError):
            await stream.send(object())
        await stream.send("fine")
        assert await anext(stream) == {"echo": "fine"}


async def test_a_draining_worker_serves_what_runs_and_then_cuts_it(autojump_clock: Clock) -> None:
    async with served(echo, drain=5.0) as scene, scene.client.bidirectional() as stream:
        await stream.send(1)
        assert await anext(stream) == {"echo": 1}
        scene.lifecycle.request_stop("enough")
        await trio.sleep(2)
        await stream.send(2)
        assert await anext(stream) == {"echo": 2}
        with pytest.raises(EngineShutdown):
            await anext(stream)
        await scene.lifecycle.wait_stopped()


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_what_streams_in_cannot_be_continued_elsewhere(kind: str) -> None:
    async with served(echo, kind, drain=0.2) as scene, scene.client.bidirectional() as stream:
        await stream.send(1)
        assert await anext(stream) == {"echo": 1}
        scene.lifecycle.request_stop("enough")
        with pytest.raises(EngineShutdown):
            await anext(stream)
        await scene.lifecycle.wait_stopped()
        assert scene.lifecycle.work.tally == {Outcome.CUT: 1}


async def test_bytes_that_stream_in_are_counted(autojump_clock: Clock) -> None:
    async with served(echo) as scene, scene.client.bidirectional() as stream:
        await stream.send("12345")
        await anext(stream)
        assert scene.measured("dynamo_component_request_bytes_total") == 6
        assert scene.measured("dynamo_component_inflight_requests") == 1


# --- the wrong kind of request ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_a_single_request_to_such_an_endpoint(kind: str) -> None:
    async with served(echo, kind) as scene, scene.client.generate("single") as stream:
        with pytest.raises(InvalidArgument, match="realtime takes requests that stream in only"):
            await anext(stream)


@pytest.mark.parametrize("kind", ["mem", "mux"])  # over tcp the control message is wrong already
async def test_what_streams_in_has_no_payload_beside_its_items(kind: str) -> None:
    async with plane_of(kind) as plane, open_runtime(planes=plane) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving_bidirectional(echo) as instance:
            head = RequestHead("r1", streams_in=True)
            answer: ResponseStream[Any] = ResponseStream(object)
            async with plane.open_stream(instance.transports[kind], head, b"\x01", answer):
                with pytest.raises(InvalidArgument, match="has items, and no payload"):
                    await anext(answer)


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_a_request_that_streams_in_to_an_ordinary_endpoint(kind: str) -> None:
    async def single(request: object) -> Items:
        yield request

    async with plane_of(kind) as plane, open_runtime(planes=[plane]) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving(single), endpoint.client() as client:
            await client.wait_for_instances()
            async with client.bidirectional() as stream:
                await until(lambda: stream._ended)
                with pytest.raises(trio.BrokenResourceError, match="takes single requests") as info:
                    await stream.send(1)
                assert isinstance(info.value.__cause__, InvalidArgument)
                with pytest.raises(InvalidArgument, match="realtime takes single requests only"):
                    await anext(stream)


async def test_items_that_broke_off_are_no_end() -> None:
    """The handler must not take the loss of a connection for the last word."""
    seen: list[object] = []

    async def listen(requests: RequestStream) -> Items:
        yield "ready"
        try:
            while True:
                seen.append(await anext(requests))
        except Disconnected as exc:
            seen.append(type(exc))
        yield "noted"

    async with served(listen, "tcp") as scene:
        sink: ResponseStream[Any] = ResponseStream(object)
        head = RequestHead("r1", streams_in=True)
        opening = scene.client.open_stream(scene.client.pick(), head, None, sink)
        async with opening as handle:
            assert await anext(sink) == "ready"
            handle.put(MSGPACK.encode(1))
            await until(lambda: seen == [1])
            items: Any = handle.items  # type: ignore[attr-defined]  # as of tcp
            items._sending.cancel()
            assert await anext(sink) == "noted"
    assert seen == [1, Disconnected]


async def test_serving_until_the_process_stops() -> None:
    lifecycle = Lifecycle(Timetable(grace=0.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            endpoint = runtime.endpoint(NAME)
            nursery.start_soon(endpoint.serve_bidirectional_endpoint, echo)
            async with endpoint.client() as client:
                await client.wait_for_instances()
                [instance_id] = client.instance_ids()
                async with client.bidirectional(instance_id=instance_id) as stream:
                    stream.end_input()
                    assert [item async for item in stream] == [{"stopped": False}]
            lifecycle.request_stop("the test is over")
            await lifecycle.wait_stopped()
