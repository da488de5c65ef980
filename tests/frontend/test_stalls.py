"""Workers that fall silent in the middle of a request."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.frontend.stalls import DEFAULT, PACE, Stalls
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import LLMEngineOutput
from tests.frontend.test_placement import (
    CHAT,
    NEVER,
    TEXT,
    WELL,
    Deed,
    Scene,
    both_kinds,
    chat,
    open_scene,
    said,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.plane import ItemSink


@attrs.frozen
class Slowly(Deed):
    """Sends one token in so many seconds, and falls silent after some of them."""

    each: float = 1.0
    silent_after: int = 10**6


@asynccontextmanager
async def open_stalling(*deeds: Deed, limit: float = 10.0) -> AsyncIterator[Scene]:
    async with open_scene(*deeds) as scene, trio.open_nursery() as nursery:
        scene.frontend.stalls.limit = limit
        plain = scene.workers._answer

        async def answer(address: str, deed: Deed, sink: ItemSink) -> None:
            if isinstance(deed, Slowly):
                for number, token in enumerate(deed.tokens):
                    await trio.sleep(deed.each)
                    if number >= deed.silent_after:
                        await trio.sleep_forever()
                    sink.feed_tokens([token])
                sink.feed([MSGPACK.encode(LLMEngineOutput(token_ids=[], finish_reason="stop"))])
                sink.finish(None)
            else:
                await plain(address, deed, sink)

        scene.workers._answer = answer  # type: ignore[method-assign]  # workers of its own
        nursery.start_soon(scene.frontend.stalls.run)
        yield scene
        nursery.cancel_scope.cancel()


@both_kinds
async def test_a_worker_that_never_begins_is_given_up_and_another_asked(
    autojump_clock: MockClock, stream: bool
) -> None:
    async with open_stalling(NEVER, WELL) as scene:
        began = trio.current_time()
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(answer, stream=stream) == TEXT
        assert 10 <= trio.current_time() - began <= 12
        assert scene.workers.left == ["w1"], "the silent one was not told that nobody waits"
        again = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(again, stream=stream) == TEXT
        assert scene.asked == ["w1", "w2", "w2"], "it is left out for a while"
        assert scene.lifecycle.http.tally == {Outcome.FINISHED: 2}


@attrs.frozen
class Deaf(Deed):
    """Does not say that it has the request; its plane waits for that for long."""


@both_kinds
async def test_a_worker_that_does_not_take_a_request_is_given_up_in_the_same_time(
    autojump_clock: MockClock, stream: bool
) -> None:
    async with open_stalling(Deaf(after=1e6), WELL, limit=2.0) as scene:
        plain = scene.workers.open_stream

        @asynccontextmanager
        async def open_stream(address: str, *args: Any) -> AsyncIterator[Any]:
            async with plain(address, *args) as opened:
                if isinstance(scene.workers.deeds[address], Deaf):
                    await trio.sleep(1000)
                yield opened

        scene.workers.open_stream = open_stream  # type: ignore[assignment, method-assign]  # of its own
        began = trio.current_time()
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(answer, stream=stream) == TEXT
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)
        again = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(again, stream=stream) == TEXT
        assert scene.asked == ["w1", "w2", "w2"], "it is left out for a while"


async def test_the_whole_answer_may_take_as_long_as_it_likes(autojump_clock: MockClock) -> None:
    async with open_stalling(Slowly(tokens=TEXT, each=9.0)) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert said(answer, stream=True) == TEXT


async def test_a_stream_that_stops_in_the_middle_is_ended_with_its_reason(
    autojump_clock: MockClock,
) -> None:
    async with open_stalling(Slowly(tokens=TEXT, silent_after=3), WELL) as scene:
        began = trio.current_time()
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.text()) == (200, TEXT[:3].decode())
        assert answer.events()[-1]["error"]["code"] == "response_timeout"
        assert answer.ended
        assert "[DONE]" not in answer.events()
        assert 13 <= trio.current_time() - began <= 15
        assert scene.asked == ["w1"]
        kind = {"error_type": "response_timeout"}
        assert scene.total("dynamo_frontend_requests_total", **kind) == 1
        assert scene.lifecycle.http.tally == {Outcome.CUT: 1}


async def test_a_whole_answer_that_stops_in_the_middle_comes_from_another(
    autojump_clock: MockClock,
) -> None:
    async with open_stalling(Slowly(tokens=TEXT, silent_after=3), WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=False))
        assert said(answer, stream=False) == TEXT
        assert scene.asked == ["w1", "w2"]


async def test_when_all_are_silent_the_client_may_try_again(autojump_clock: MockClock) -> None:
    async with open_stalling(NEVER, NEVER) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "unanswered")
        assert scene.asked == ["w1", "w2"]


async def test_who_waits_for_a_slow_client_is_not_silent(autojump_clock: MockClock) -> None:
    """The worker has sent all it may, and the client takes nothing for a long time."""
    async with open_stalling(Deed(tokens=TEXT * 6), limit=2.0) as scene:
        answer = scene.caller.start("POST", CHAT, chat(stream=True))
        scene.caller.slowness = 5.0
        await answer.done.wait()
        assert answer.status == 200
        assert "error" not in str(answer.events())


async def test_without_a_limit_nobody_is_given_up(autojump_clock: MockClock) -> None:
    async with open_stalling(Deed(tokens=TEXT, after=10_000.0), limit=math.inf) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert said(answer, stream=True) == TEXT


@pytest.mark.parametrize(
    ("limit", "plane", "seconds"),
    [
        (None, "tcp", DEFAULT),
        (None, "mux", math.inf),
        (None, "", math.inf),
        (7.0, "tcp", 7.0),
        (7.0, "mux", 7.0),
        (math.inf, "tcp", math.inf),
    ],
)
def test_which_limit_holds_where(limit: float | None, plane: str, seconds: float) -> None:
    assert Stalls(limit).limit_on(plane) == seconds


@attrs.define(eq=False)
class FakeAnswer:
    progress: int = 0
    waits_for_client: bool = False
    ended: list[object] = attrs.field(factory=list)

    def finish(self, error: object) -> None:
        self.ended.append(error)


async def test_tokens_cost_nothing_and_looks_are_few(autojump_clock: MockClock) -> None:
    """A stream that lives is looked at some times for each limit, whatever it brings."""
    answer: Any = FakeAnswer()
    looks = 0

    @attrs.define(eq=False)
    class Counted(Stalls):
        def _look(self, *, frozen: bool) -> None:
            nonlocal looks
            looks += 1
            super()._look(frozen=frozen)

    stalls = Counted(20.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stalls.run)
        with stalls.watch(answer, "tcp"):
            for _ in range(1000):
                answer.progress += 1
                await trio.sleep(0.1)
        assert 40 <= looks <= 52
        looks = 0
        await trio.sleep(1000)
        assert looks <= 1, "nobody is there to be looked at"
        nursery.cancel_scope.cancel()
    assert answer.ended == []


async def test_a_process_that_was_frozen_itself_does_not_judge(mock_clock: MockClock) -> None:
    stalls = Stalls(10.0)
    answer: Any = FakeAnswer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stalls.run)
        with stalls.watch(answer, "tcp"):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1000)
            await trio.testing.wait_all_tasks_blocked()
            assert answer.ended == []
            for _ in range(12):
                mock_clock.jump(1)
                await trio.testing.wait_all_tasks_blocked()
            assert len(answer.ended) == 1
        nursery.cancel_scope.cancel()
    assert PACE[0] < 1 < PACE[1]
