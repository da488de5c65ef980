"""Sessions whose worker leaves, or is lost: they go on at another one, or their end is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.frontend.realtime import kept
from dynamo_trio.frontend.realtime.socket import RESTART
from dynamo_trio.wire.openai.realtime import room
from tests.frontend.realtime_peer import talking
from tests.frontend.voices import (
    NOTICE,
    PATIENCE,
    TRANSCRIPTION,
    append,
    closed,
    open_choir,
    select,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from tests.frontend.realtime_peer import Peer
    from tests.frontend.voices import Choir, Voice

PLANES = pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"
COMMITTED = "input_audio_buffer.committed"


async def transcribe(peer: Peer) -> str:
    """End the turn; returns what was heard in it."""
    peer.say("input_audio_buffer.commit")
    text: str = (await peer.read(COMPLETED))["transcript"]
    return text


async def at_rest(choir: Choir, count: int) -> Voice:
    """The worker of the session, once it has heard so many events."""
    await until(lambda: any(len(v.heard) > len(v.ends) for v in choir.voices))
    await until(lambda: len(choir.at().heard[-1]) == count)
    return choir.at()


async def moved(choir: Choir, old: Voice) -> Voice:
    """The worker that has taken the session over."""
    await until(lambda: any(len(v.heard) > len(v.ends) for v in choir.voices if v is not old))
    [new] = [v for v in choir.voices if v is not old and len(v.heard) > len(v.ends)]
    return new


# --- a worker that leaves -------------------------------------------------------------------------


@PLANES
async def test_an_idle_session_leaves_a_worker_that_stops(kind: str, tmp_path: Path) -> None:
    """At once: the worker's stop does not wait for it; its client sees nothing of that."""
    async with open_choir(tmp_path, kind, workers=2, drain=300.0) as choir:
        async with talking(choir.app, "") as peer:
            with trio.fail_after(PATIENCE):
                await select(peer)
                append(peer, "AAAA")
                append(peer, "BBBB")
                old = await at_rest(choir, 3)
                old.lifecycle.request_stop("rolled")
                await old.lifecycle.wait_stopped()
                new = await moved(choir, old)
                assert await transcribe(peer) == "AAAABBBB"
                assert new.heard[0][:3] == old.heard[0]
        assert peer.types() == ["session.created", "session.updated", COMMITTED, DELTA, COMPLETED]
        assert choir.outcomes() == {"cancelled": 1}


@PLANES
async def test_a_worker_that_is_lost_is_replaced(kind: str, tmp_path: Path) -> None:
    async with open_choir(tmp_path, kind, workers=2) as choir:
        async with talking(choir.app, "model=voice") as peer:
            with trio.fail_after(PATIENCE):
                append(peer, "AAAA")
                old = await at_rest(choir, 2)
                old.scope.cancel("it dies")
                await moved(choir, old)
                append(peer, "BBBB")
                assert await transcribe(peer) == "AAAABBBB"
        assert peer.types() == ["session.created", COMMITTED, DELTA, COMPLETED]


async def test_turns_that_are_over_are_not_repeated(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=2) as choir, talking(choir.app, "") as peer:
        await select(peer, "transcription")
        append(peer, "AAAA")
        assert await transcribe(peer) == "AAAA"
        append(peer, "BBBB")
        old = await at_rest(choir, 4)
        old.lifecycle.request_stop("rolled")
        new = await moved(choir, old)
        assert await transcribe(peer) == "BBBB"
        assert new.types() == [
            "session.update",
            "input_audio_buffer.append",
            "input_audio_buffer.commit",
        ]


async def test_a_turn_that_is_asked_for_is_asked_for_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=2) as choir, talking(choir.app, "") as peer:
        await select(peer)
        old = choir.at()
        old.deaf = True
        append(peer, "AAAA")
        peer.say("input_audio_buffer.commit")
        await trio.sleep(1)
        old.lifecycle.request_stop("rolled")
        assert (await peer.read(COMPLETED))["transcript"] == "AAAA"
        assert peer.types().count(COMPLETED) == 1


async def test_a_session_in_the_middle_of_a_turn_moves_behind_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=2, drain=300.0) as choir:
        async with talking(choir.app, "") as peer:
            await select(peer, "transcription")
            peer.say("say.something")
            assert (await peer.read())["of"] == "say.something"
            old = choir.at()
            old.lifecycle.request_stop("rolled")
            await trio.sleep(20)
            append(peer, "AAAA")
            peer.say("input_audio_buffer.commit")
            assert (await peer.read(COMPLETED))["transcript"] == "AAAA"
            assert choir.at() is old
            await old.lifecycle.wait_stopped()
            assert await transcribe(peer) == ""
            assert choir.at() is not old


async def test_a_conversation_stays_to_the_limit_and_is_told_its_end(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=2, drain=7.0) as choir:
        async with talking(choir.app, "") as peer:
            await select(peer)
            peer.say("say.something")
            assert (await peer.read())["of"] == "say.something"
            start = trio.current_time()
            choir.at().lifecycle.request_stop("rolled")
            await trio.sleep(6)
            peer.say("say.more")
            assert (await peer.read())["of"] == "say.more"
            notice = await peer.read(NOTICE)
            assert (notice["reason"], notice["deadline"]) == ("engine_shutdown", 0)
            assert notice["session"] == {"type": "realtime", "model": "voice"}
            assert await closed(peer) == (RESTART, "engine_shutdown")
            assert 7 <= trio.current_time() - start < 8
        assert choir.outcomes() == {"unavailable": 1}


async def test_more_than_is_kept_does_not_move(autojump_clock: MockClock, tmp_path: Path) -> None:
    frame = "A" * (kept.MIB // 2)
    async with open_choir(tmp_path, workers=2, drain=3.0) as choir:
        async with talking(choir.app, "") as peer:
            await select(peer)
            for _ in range(8):
                append(peer, frame)
            old = await at_rest(choir, 9)
            assert choir.frontend.kept.used < 200
            old.lifecycle.request_stop("rolled")
            assert (await closed(peer))[0] == RESTART


async def test_without_another_worker_it_stays(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_choir(tmp_path, drain=60.0) as choir, talking(choir.app, "") as peer:
        await select(peer)
        old = choir.at()
        old.lifecycle.request_stop("rolled")
        await trio.sleep(10)
        assert choir.at() is old
        append(peer, "AAAA")
        new = await choir.start("another")  # and goes when there is one
        await old.lifecycle.wait_stopped()
        assert choir.at() is new
        assert await transcribe(peer) == "AAAA"


# --- workers that fail ----------------------------------------------------------------------------


async def test_what_kills_workers_is_not_handed_to_all(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=8) as choir, talking(choir.app, "") as peer:
        await select(peer)
        append(peer, "POISON")
        assert (await peer.read(NOTICE))["reason"] == "engine_shutdown"
        assert await closed(peer) == (RESTART, "engine_shutdown")
        assert sum(len(voice.heard) for voice in choir.voices) == 4
        assert peer.types() == ["session.created", "session.updated", NOTICE]


async def test_a_full_worker_is_passed_over(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_choir(tmp_path, workers=2) as choir:
        for voice in choir.voices[:1]:
            voice.lifecycle.work.pause()
        for _ in range(2):
            async with talking(choir.app, "") as peer:
                await select(peer)
        assert [len(voice.heard) for voice in choir.voices] == [0, 2]


@pytest.mark.parametrize("limit", [None, 30.0])
async def test_a_worker_that_takes_nothing_is_given_up(
    limit: float | None, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, workers=2) as choir, talking(choir.app, "") as peer:
        choir.frontend.stalls.limit = limit
        await select(peer)
        start, old = trio.current_time(), choir.at()
        old.deaf = True
        for number in range(300):
            peer.say("input_audio_buffer.append", audio="", number=number)
        await trio.sleep((limit or 120) - 1)
        assert choir.at() is old
        new = await moved(choir, old)
        assert trio.current_time() - start == pytest.approx(limit or 120, abs=1)
        await until(lambda: len(new.heard[0]) == 301)
        assert [event["number"] for event in new.heard[0][1:]] == list(range(300))


async def test_a_worker_that_only_speaks_is_not_given_up(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        choir.frontend.stalls.limit = 10.0
        await select(peer)
        peer.slowness = 1.0
        for number in range(300):
            peer.say("hello", number=number)
        await trio.sleep(250)
        assert choir.voices[0].ends == []
        peer.slowness = 0.0


@pytest.mark.parametrize("kind", ["mem", "mux"])
async def test_a_rolling_restart_loses_no_frame(kind: str, tmp_path: Path) -> None:
    """Five workers leave one after the other while a client sends."""
    async with open_choir(tmp_path, kind, workers=2, drain=60.0) as choir:
        async with talking(choir.app, "model=voice") as peer, trio.open_nursery() as nursery:
            sent: list[str] = []
            rolled = False

            async def send() -> None:
                while not rolled:
                    sent.append(f"<{len(sent)}>")
                    append(peer, sent[-1])
                    await trio.sleep(0.001)

            with trio.fail_after(PATIENCE):
                nursery.start_soon(send)
                for number in range(5):
                    await until(lambda: any(len(v.heard) > len(v.ends) for v in choir.voices))
                    old = choir.at()
                    await choir.start(f"new {number}")
                    before = len(sent)
                    await until(lambda: len(sent) > before + 20)  # noqa: B023 - at once
                    old.lifecycle.request_stop("rolled")
                    await old.lifecycle.wait_stopped()
                    await moved(choir, old)
                rolled = True
                assert await transcribe(peer) == "".join(sent)
        assert peer.types() == ["session.created", COMMITTED, DELTA, COMPLETED]


def test_the_bounds_are_those_of_the_docs() -> None:
    bounds: dict[str, Any] = {"one": kept.MOST_KEPT, "all": room.MOST}
    assert bounds == {"one": 4 * 2**20, "all": 256 * 2**20}
