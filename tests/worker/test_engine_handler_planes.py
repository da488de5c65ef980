"""The engine's tokens on their way over every plane: all of them, in order, whatever else ends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio import Context, open_runtime
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.engines import open_engine
from dynamo_trio.errors import EngineDead, EngineShutdown
from dynamo_trio.lifecycle import DrainPolicy, Lifecycle, Outcome, Timetable
from dynamo_trio.testing import Fault, InlineHost, SimCore, SimSettings
from dynamo_trio.wire.llm import LLMEngineOutput, PreprocessedRequest, StopConditions
from dynamo_trio.worker import engine_handler
from tests.plane.test_plane_contract import KINDS, PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.client import Client

STEP_MS = 2.0


def asking(seed: int, tokens: int) -> PreprocessedRequest:
    conditions = StopConditions(max_tokens=tokens, ignore_eos=True)
    return PreprocessedRequest(token_ids=[7, 8, 9, seed], stop_conditions=conditions)


@attrs.define(eq=False)
class Site:
    kind: str
    client: Client
    lifecycle: Lifecycle
    core: SimCore

    async def answer(self, request: PreprocessedRequest) -> list[LLMEngineOutput]:
        with trio.fail_after(PATIENCE):
            async with self.client.generate(request, item_type=LLMEngineOutput) as stream:
                return [item async for item in stream]

    async def ended(self, **outcomes: int) -> None:
        """Wait until everything has ended, and so."""
        with trio.fail_after(PATIENCE):
            await self.lifecycle.work.wait_empty()
        assert self.lifecycle.work.tally == {Outcome(k): v for k, v in outcomes.items()}


@pytest.fixture(params=KINDS)
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(request.param, tmp_path) as site:
        yield site


@asynccontextmanager
async def open_site(
    kind: str, folder: Path, drain: float = 0.5, policy: DrainPolicy = DrainPolicy.AUTO
) -> AsyncIterator[Site]:
    timetable = Timetable(grace=0.0, drain=drain, drain_policy=policy)
    lifecycle, discovery = Lifecycle(timetable), MemoryDiscovery()
    core = SimCore(SimSettings(itl_ms=STEP_MS, virtual=True))
    codec = KINDS[kind].codec
    async with (
        KINDS[kind].open(folder) as (ours, theirs),
        trio.open_nursery() as nursery,
        open_engine(core, host=InlineHost()) as engine,
        open_runtime(lifecycle, discovery=discovery, planes=[ours], codec=codec) as worker,
        open_runtime(discovery=discovery, planes=[theirs]) as asker,
        worker.endpoint("t.b.generate").serving(
            engine_handler(engine), request_type=PreprocessedRequest
        ),
        asker.endpoint("t.b.generate").client() as client,
    ):
        nursery.start_soon(lifecycle.run)
        await client.wait_for_instances()
        yield Site(kind, client, lifecycle, core)
        lifecycle.request_stop("the test is over")
        await lifecycle.wait_stopped()


def tokens_of(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


async def test_many_answers_are_each_what_the_engine_said(site: Site) -> None:
    answers: dict[int, list[LLMEngineOutput]] = {}

    async def ask(seed: int) -> None:
        answers[seed] = await site.answer(asking(seed, 20 + seed))

    async with trio.open_nursery() as nursery:
        for seed in range(16):
            nursery.start_soon(ask, seed)
    for seed, items in answers.items():
        alone = SimCore(SimSettings())
        assert tokens_of(items) == expected(alone, asking(seed, 20 + seed))
        assert [item.finish_reason for item in items] == [None] * (len(items) - 1) + ["length"]
        usage = items[-1].completion_usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (4, 20 + seed)
    await site.ended(finished=16)


def expected(core: SimCore, request: PreprocessedRequest) -> list[int]:
    """What a core of its own says to this request."""
    from dynamo_trio.worker.serve import to_engine

    core.add(to_engine(request, "alone"))
    tokens: list[int] = []
    while core.has_work():
        tokens += [token for delta in core.step() for token in delta.token_ids]
    return tokens


async def test_a_reader_that_sleeps_gets_all_of_it_afterwards(site: Site) -> None:
    request = asking(1, 400)
    with trio.fail_after(PATIENCE):
        async with site.client.generate(request, item_type=LLMEngineOutput) as stream:
            other = await site.answer(asking(2, 400))  # meanwhile the first is not read at all
            items = [item async for item in stream]
    assert tokens_of(items) == expected(SimCore(SimSettings()), request)
    assert other[-1].finish_reason == items[-1].finish_reason == "length"
    await site.ended(finished=2)


async def test_stopped_left_and_cut(site: Site) -> None:
    context = Context()
    with trio.fail_after(PATIENCE):
        async with site.client.generate(
            asking(1, 5000), context, item_type=LLMEngineOutput
        ) as stream:
            await anext(stream)
            context.stop_generating()
            stopped = [item async for item in stream]
        # Dynamo's tcp has no last words for a client that said stop.
        assert not stopped or stopped[-1].finish_reason in ("cancelled", None)
        async with site.client.generate(asking(2, 5000), item_type=LLMEngineOutput) as stream:
            await anext(stream)
        await site.ended(finished=1, cancelled=1)
        async with site.client.generate(asking(3, 5000), item_type=LLMEngineOutput) as stream:
            await anext(stream)
            site.lifecycle.request_stop("now")
            with pytest.raises(EngineShutdown):
                async for _ in stream:
                    pass
        # Whoever asks over tcp may go on elsewhere, and cannot say that it does not.
        last = "handed_over" if site.kind.startswith("tcp") else "cut"
        await site.ended(finished=1, cancelled=1, **{last: 1})


async def test_an_engine_that_dies_tells_every_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.RaisesGroup(EngineDead, allow_unwrapped=True, flatten_subgroups=True):
        async with open_site("mux-msgpack", tmp_path) as site:
            async with site.client.generate(asking(1, 500), item_type=LLMEngineOutput) as stream:
                await anext(stream)
                with trio.CancelScope(shield=True):
                    site.core.arm(Fault("raise"))
                    with pytest.raises(EngineDead):
                        async for _ in stream:
                            pass
