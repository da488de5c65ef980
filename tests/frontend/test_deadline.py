"""Requests whose client says how long it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.lifecycle import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT = "/v1/chat/completions"
HEADER = "x-dynamo-trio-deadline-secs"


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return {"model": "sim", "messages": messages, "max_tokens": 60, "ignore_eos": True, **fields}


async def test_a_whole_answer_that_comes_too_late_is_a_504(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(itl_ms=1000) as site:
        began = trio.current_time()
        answer = await site.client.ask("POST", CHAT, chat(), {HEADER: "7.5"})
        assert trio.current_time() - began == pytest.approx(7.5)
        assert answer.status == 504
        assert answer.headers["x-dynamo-reason"] == "deadline"
        assert answer.json()["error"]["code"] == "deadline"
        await site.lifecycle.work.wait_empty()
        assert site.lifecycle.http.tally == {Outcome.FAILED: 1}
        assert site.lifecycle.work.tally == {Outcome.CANCELLED: 1}


async def test_a_stream_that_takes_too_long_ends_in_an_error_event(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(itl_ms=1000) as site:
        answer = await site.client.ask("POST", CHAT, chat(stream=True), {HEADER: "7.5"})
        assert answer.status == 200
        assert answer.ended  # in good order
        *_, last = answer.events()
        assert last["error"]["code"] == "deadline"
        assert 4 <= len(answer.text()) <= 8
        await site.lifecycle.work.wait_empty()
        assert site.lifecycle.http.tally == {Outcome.FAILED: 1}
        assert site.lifecycle.work.tally == {Outcome.CANCELLED: 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_time_at_all(open_site: Opener, autojump_clock: MockClock, stream: bool) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", CHAT, chat(stream=stream), {HEADER: "0"})
        assert answer.status == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_time_is_as_ever(
    open_site: Opener, autojump_clock: MockClock, stream: bool
) -> None:
    async with open_site(itl_ms=10) as site:
        answer = await site.client.ask("POST", CHAT, chat(stream=stream), {HEADER: "60"})
        assert answer.status == 200
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 1}


async def test_the_worker_is_told_what_is_left(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(itl_ms=1000) as site:
        began = trio.current_time()
        answer = site.client.start("POST", CHAT, chat(stream=True), {HEADER: "30"})
        await trio.sleep(5)
        [front], [behind] = site.lifecycle.http.admissions(), site.lifecycle.work.admissions()
        assert front.prospects.deadline == pytest.approx(began + 30)
        assert behind.prospects.deadline == pytest.approx(began + 30, abs=0.01)
        assert behind.prospects.needs() == pytest.approx(25, abs=0.01)  # less than 60 tokens take
        await answer.done.wait()


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "1e3", "1_0", "999999999", "5s"])
async def test_a_bad_value_is_named_together_with_the_rule(
    open_site: Opener, autojump_clock: MockClock, value: str
) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", CHAT, chat(), {HEADER: value})
        assert answer.status == 400
        message = answer.json()["error"]["message"]
        assert f"{HEADER} must be a decimal number of seconds from 0 to 315360000" in message
        assert repr(value) in message
