"""An engine as the handler of ``generate``: what a request that is stopped does to it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from dynamo_trio import Context, RequestHead, open_runtime
from dynamo_trio.engines import open_engine
from dynamo_trio.errors import Unknown
from dynamo_trio.testing import InlineHost, SimCore, SimSettings
from dynamo_trio.wire.llm import LLMEngineOutput, PreprocessedRequest, StopConditions
from dynamo_trio.worker import engine_handler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pytest
    from trio.testing import MockClock

    from dynamo_trio.client import Client
    from dynamo_trio.engines import Engine
    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.dynamo.codec import Codec

ENDLESS = PreprocessedRequest(
    token_ids=[1, 2, 3], stop_conditions=StopConditions(max_tokens=5000, ignore_eos=True)
)


@asynccontextmanager
async def served(**settings: float) -> AsyncIterator[tuple[Client, Engine]]:
    core = SimCore(SimSettings(virtual=True, **settings))  # type: ignore[arg-type]  # all are numbers
    async with open_engine(core, host=InlineHost()) as engine, open_runtime() as runtime:
        endpoint = runtime.endpoint("t.b.generate")
        serving = endpoint.serving(engine_handler(engine), request_type=PreprocessedRequest)
        async with serving, endpoint.client() as client:
            await client.wait_for_instances()
            yield client, engine


async def test_a_request_that_is_stopped_ends_at_once(autojump_clock: MockClock) -> None:
    context = Context()
    async with (
        served(itl_ms=1000.0) as (client, engine),
        client.generate(ENDLESS, context, item_type=LLMEngineOutput) as stream,
    ):
        assert len((await anext(stream)).token_ids) == 1
        stopped_at = trio.current_time()
        context.stop_generating()
        items = [item async for item in stream]
        assert items[-1].finish_reason == "cancelled"
        assert trio.current_time() - stopped_at < 2.0
        await trio.sleep(2)  # the step that was under way is over
        assert engine.open_requests == 0


async def test_a_request_that_is_stopped_before_its_first_token_ends_at_once(
    autojump_clock: MockClock,
) -> None:
    context = Context()
    async with (
        served(prefill_ms=60_000.0) as (client, _),
        client.generate(ENDLESS, context, item_type=LLMEngineOutput) as stream,
    ):
        await trio.sleep(1)
        stopped_at = trio.current_time()
        context.stop_generating()
        [only] = [item async for item in stream]
        assert (only.token_ids, only.finish_reason) == ([], "cancelled")
        assert trio.current_time() - stopped_at < 2.0


class Mistaken:
    """A sink in this process that breaks its promise not to raise."""

    def __init__(self) -> None:
        self.ends: list[DynamoException | None] = []

    def expect(self, codec: Codec) -> None:
        pass

    def feed(self, payloads: Sequence[bytes]) -> None:
        raise AssertionError("the stream goes on")

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        raise ZeroDivisionError("a mistake")

    def finish(self, error: DynamoException | None) -> None:
        self.ends.append(error)


async def test_a_mistake_where_the_tokens_go_fails_that_request_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(itl_ms=10.0) as (client, engine):
        sink = Mistaken()
        async with client.open_stream(client.pick(), RequestHead("r1"), ENDLESS, sink):
            async with client.generate(ENDLESS, item_type=LLMEngineOutput) as stream:
                assert [len((await anext(stream)).token_ids) for _ in range(5)] == [1] * 5
            await trio.sleep(1)
            assert engine.open_requests == 0
        assert [type(end) for end in sink.ends] == [Unknown]
    assert "ZeroDivisionError: a mistake" in caplog.text
