"""What a worker knows of its requests' future: their end, and whether another one can go on."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from dynamo_trio import open_runtime
from dynamo_trio.engines import open_engine
from dynamo_trio.engines.pace import WEIGHT, Pace
from dynamo_trio.testing import InlineHost, SimCore, SimSettings
from dynamo_trio.wire.llm import (
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo_trio.worker import engine_handler
from dynamo_trio.worker.serve import is_movable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio.testing

    from dynamo_trio import DistributedRuntime
    from dynamo_trio.client import Client

# --- the pace of an engine ------------------------------------------------------------------------


def measured(*steps: tuple[float, list[int], bool]) -> float | None:
    pace = Pace()
    for seconds, counts, waiting in steps:
        pace.note(seconds, counts, waiting=waiting)
    return pace.seconds_per_token


def test_nothing_is_known_before_somebody_got_a_second_token() -> None:
    assert measured() is None
    assert measured((9.0, [], False), (9.0, [], True)) is None


def test_the_pace_is_seconds_between_tokens_of_one_request() -> None:
    assert measured((0.5, [1, 1, 1], True)) == 0.5
    assert measured((1.0, [2, 2], True)) == 0.5  # two tokens at once take half the time each


def test_steps_for_long_prompts_count_for_those_who_wait() -> None:
    assert measured((3.0, [], True), (1.0, [1], True)) == 4.0
    assert measured((3.0, [], True), (1.0, [1], True), (4.0, [1], True)) == 4.0


def test_what_nobody_has_waited_for_does_not_count() -> None:
    # The one that waited was aborted before it got anything.
    assert measured((3.0, [], True), (1.0, [], False), (1.0, [1], True)) == 1.0


def test_the_pace_follows_slowly() -> None:
    assert measured((1.0, [1], True), (2.0, [1], True)) == 1.0 + WEIGHT
    assert measured((1.0, [1], True), *[(2.0, [1], True)] * 100) == pytest.approx(2.0, rel=1e-3)


# --- what can be continued elsewhere --------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "movable"),
    [
        (SamplingOptions(), True),
        (SamplingOptions(n=1, best_of=1, temperature=0.5, use_beam_search=False), True),
        (SamplingOptions(n=2), False),
        (SamplingOptions(best_of=2), False),
        (SamplingOptions(use_beam_search=True), False),
        (SamplingOptions(guided_decoding={"json": {"type": "object"}}), False),
    ],
)
def test_movable(sampling: SamplingOptions, movable: bool) -> None:
    assert is_movable(PreprocessedRequest(token_ids=[1], sampling_options=sampling)) is movable


# --- a worker -------------------------------------------------------------------------------------


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Client, DistributedRuntime]]:
    core = SimCore(SimSettings(virtual=True, itl_ms=1000.0, prefill_ms=0.0))
    async with open_engine(core, host=InlineHost()) as engine, open_runtime() as runtime:
        endpoint = runtime.endpoint("t.b.generate")
        serving = endpoint.serving(engine_handler(engine), request_type=PreprocessedRequest)
        async with serving, endpoint.client() as client:
            await client.wait_for_instances()
            yield client, runtime


def asking(max_tokens: int | None, sampling: SamplingOptions | None = None) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return PreprocessedRequest(
        token_ids=[1, 2, 3], stop_conditions=stop, sampling_options=sampling or SamplingOptions()
    )


async def test_a_worker_knows_when_a_request_ends_at_the_latest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        served() as (client, runtime),
        client.generate(asking(10), item_type=LLMEngineOutput) as stream,
    ):
        [admission] = runtime.lifecycle.work.admissions()
        assert admission.prospects.needs() is None  # nothing is measured yet
        for _ in range(4):
            await anext(stream)
        assert admission.prospects.needs() == pytest.approx(6.0, rel=0.05)
        assert admission.prospects.movable
        async for _ in stream:
            pass
        assert admission.prospects.needs() == 0.0


async def test_without_a_limit_of_its_own_nobody_knows(
    autojump_clock: trio.testing.MockClock,
) -> None:
    several = SamplingOptions(n=2)
    async with (
        served() as (client, runtime),
        client.generate(asking(None, several), item_type=LLMEngineOutput) as stream,
    ):
        for _ in range(2):
            await anext(stream)
        [admission] = runtime.lifecycle.work.admissions()
        assert admission.prospects.needs() is None
        assert not admission.prospects.movable
