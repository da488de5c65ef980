"""Handlers that push: another task's items, and every way in which such a request can end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.errors import EngineDead, EngineShutdown, Unknown
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.plane import INITIAL_CREDIT
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.llm import encode_token, size_of_token
from tests.runtime.test_endpoint import collect, endless, served

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dynamo_trio import Context
    from dynamo_trio.runtime import DistributedRuntime

LAST = {"token_ids": [9], "finish_reason": "length"}


@attrs.define(eq=False)
class Puppet:
    """A handler whose items the test puts, from its own task, as an engine would."""

    output: Output | None = None
    context: Context | None = None
    #: Set by the test: the handler returns.
    returns: trio.Event = attrs.field(factory=trio.Event)
    started: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, request: object, context: Context, output: Output) -> None:
        self.output, self.context = output, context
        self.started.set()
        await self.returns.wait()

    async def begun(self) -> Output:
        await self.started.wait()
        assert self.output is not None
        return self.output


def response_bytes(runtime: DistributedRuntime) -> float:
    (line,) = (
        line
        for line in runtime.metrics.exposition().decode().splitlines()
        if line.startswith("dynamo_component_response_bytes_total{")
    )
    return float(line.rpartition(" ")[2])


async def test_what_another_task_puts_arrives_and_counts_like_what_a_generator_yields(
    autojump_clock: trio.testing.MockClock,
) -> None:
    items = [{"token_ids": [token]} for token in (1, 300, 70_000)]

    async def generator(request: object) -> AsyncGenerator[Any, None]:
        for item in (*items, LAST):
            yield item

    async with served(generator) as (client, runtime):
        assert await collect(client) == [*items, LAST]
        expected = response_bytes(runtime)
    puppet = Puppet()
    async with served(PushHandler(puppet.run)) as (client, runtime):
        async with client.generate(None) as stream:
            output = await puppet.begun()
            output.put_tokens([1, 300])
            output.put_tokens([])
            output.put({"token_ids": [70_000]})
            output.put_last(LAST)
            puppet.returns.set()
            assert [item async for item in stream] == [*items, LAST]
        assert response_bytes(runtime) == expected
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
@pytest.mark.parametrize("token", [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1])
def test_a_token_is_spelled_as_the_item_that_it_stands_for(codec: Codec, token: int) -> None:
    assert encode_token(codec, token) == codec.encode({"token_ids": [token]})
    assert size_of_token(codec, token) == len(encode_token(codec, token))


async def test_what_comes_behind_the_last_item_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    puppet = Puppet()
    async with served(PushHandler(puppet.run)) as (client, _), client.generate(None) as stream:
        output = await puppet.begun()
        output.put_last(LAST)
        output.put_last(LAST)
        output.put({"late": True})
        output.put_tokens([1])
        puppet.returns.set()
        assert [item async for item in stream] == [LAST]


async def test_what_comes_behind_the_handlers_end_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    puppet = Puppet()
    async with served(PushHandler(puppet.run)) as (client, runtime):
        async with client.generate(None) as stream:
            output = await puppet.begun()
            output.put(1)
            puppet.returns.set()
            assert [item async for item in stream] == [1]
            output.put_last(2)
        assert not output.complete
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}


async def test_a_cut_ends_the_handler_and_says_why(
    autojump_clock: trio.testing.MockClock,
) -> None:
    puppet = Puppet()
    async with served(PushHandler(puppet.run), drain=10.0) as (client, runtime):
        async with client.generate(None) as stream:
            (await puppet.begun()).put_tokens([5])
            runtime.shutdown()
            assert await anext(stream) == {"token_ids": [5]}
            with pytest.raises(EngineShutdown):
                await anext(stream)
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}


async def test_a_cut_behind_the_last_item_changes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    puppet = Puppet()
    async with served(PushHandler(puppet.run), drain=10.0) as (client, runtime):
        async with client.generate(None) as stream:
            (await puppet.begun()).put_last(LAST)
            runtime.shutdown()  # the handler does not return by itself
            assert [item async for item in stream] == [LAST]
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}


async def test_a_client_that_leaves_cancels_the_handler(
    autojump_clock: trio.testing.MockClock,
) -> None:
    puppet = Puppet()
    async with served(PushHandler(puppet.run)) as (client, runtime):
        async with client.generate(None) as stream:
            output = await puppet.begun()
            output.put_tokens([5])
            await anext(stream)
        output.put_tokens([6])  # the engine has not heard of it yet
        output.put_last(LAST)
        await runtime.lifecycle.work.wait_empty()
        assert puppet.context is not None
        assert puppet.context.is_killed()
        assert runtime.lifecycle.work.tally == {Outcome.CANCELLED: 1}


async def test_its_errors_are_told_like_a_generators(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    @PushHandler
    async def failing(request: object, context: Context, output: Output) -> None:
        output.put_tokens([1])
        raise EngineDead("it broke") if request == "typed" else ZeroDivisionError("secret")

    async with served(failing) as (client, runtime):
        with pytest.raises(EngineDead, match="it broke"):
            await collect(client, "typed")
        with pytest.raises(Unknown):
            await collect(client, "bug")
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1, Outcome.FAILED: 1}
    assert "ZeroDivisionError: secret" in caplog.text


async def test_a_slow_reader_gets_everything_in_order_and_keeps_the_request_open(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tokens = list(range(5 * INITIAL_CREDIT))

    @PushHandler
    async def eager(request: object, context: Context, output: Output) -> None:
        for token in tokens:
            output.put_tokens([token])
        assert not output.has_credit
        await output.wait_credit()
        output.put_last(LAST)

    async with served(eager) as (client, runtime):
        async with client.generate(None) as stream:
            await trio.sleep(100)
            assert runtime.lifecycle.work.count == 1
            got = [item async for item in stream]
        assert got == [*({"token_ids": [token]} for token in tokens), LAST]
        assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}


async def test_a_reader_that_never_reads_is_cut_and_told_before_what_was_held(
    autojump_clock: trio.testing.MockClock,
) -> None:
    @PushHandler
    async def eager(request: object, context: Context, output: Output) -> None:
        output.put_tokens(range(5 * INITIAL_CREDIT))
        await output.wait_credit()
        output.put_last(LAST)

    async with served(eager, drain=30.0) as (client, runtime):
        async with client.generate(None) as stream:
            await trio.testing.wait_all_tasks_blocked()
            runtime.shutdown()
            await runtime.lifecycle.wait_stopped()
            for token in range(INITIAL_CREDIT):
                assert await anext(stream) == {"token_ids": [token]}
            with pytest.raises(EngineShutdown):
                await anext(stream)
        assert runtime.lifecycle.work.tally == {Outcome.CUT: 1}


def test_a_generator_does_not_push() -> None:
    with pytest.raises(TypeError, match="endless is a generator, and those do not push"):
        PushHandler(endless)  # type: ignore[arg-type]  # that is the point
