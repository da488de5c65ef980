"""Sessions that are handed to a worker as they are: what comes through, and every end."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.client import Client
from dynamo_trio.errors import CannotConnect, ModelNotFound
from dynamo_trio.frontend.realtime import inbox
from dynamo_trio.frontend.realtime.socket import RESTART
from tests.frontend.realtime_peer import talking
from tests.frontend.voices import NOTICE, PATIENCE, append, closed, open_choir, select, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock


PLANES = pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])


# --- what comes through ------------------------------------------------------------------------


@PLANES
async def test_events_go_both_ways_as_they_are(kind: str, tmp_path: Path) -> None:
    event = {"type": "x.y", "n": 1.5, "text": "é\u2028", "deep": [{"a": None}, True, 2**63]}
    async with open_choir(tmp_path, kind) as choir:
        with trio.fail_after(PATIENCE):
            async with talking(choir.app, "") as peer:
                await select(peer)
                peer.text(json.dumps(event))
                echo = await peer.read()
                assert (echo["of"], echo["event"], echo["by"]) == ("x.y", event, "voice 0")
            await until(lambda: choir.voices[0].ends == [(True, False)])
        assert choir.voices[0].heard == [[choir.voices[0].heard[0][0], event]]
        assert choir.frontend.kept.used == 0
        assert choir.outcomes() == {"cancelled": 1}


async def test_the_url_may_name_the_model(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Workers are told so in a first event, unless the client sends one; the client is not."""
    async with open_choir(tmp_path) as choir:
        async with talking(choir.app, "model=voice") as peer:
            created = await peer.read()
            assert created["session"] == {"type": "realtime", "model": "voice"}
            await trio.sleep(1)
            assert choir.voices[0].heard == []  # an idle client costs no worker anything
            peer.say("my.event")
            assert (await peer.read())["of"] == "my.event"
        update = {"type": "session.update", "session": {"type": "realtime", "model": "voice"}}
        assert choir.voices[0].heard[0][0] == update
        async with talking(choir.app, "model=voice") as peer:
            peer.say("session.update", session={"type": "transcription"})
            assert (await peer.read("session.updated"))["session"] == {"type": "transcription"}
            assert peer.types() == ["session.created", "session.updated"]


async def test_the_model_is_for_sessions_only(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_choir(tmp_path) as choir:
        model = choir.frontend.find("voice")
        assert (model.speaks_realtime, model.context_length) == (True, 0)
        assert [m.name for m in choir.frontend.catalog.models()] == ["voice"]
        with pytest.raises(ModelNotFound, match="served at /v1/realtime only"):
            model.require_text()


@PLANES
async def test_a_worker_that_does_not_read_holds_its_client_back(kind: str, tmp_path: Path) -> None:
    count, audio = 1000, "A" * 20_000
    async with open_choir(tmp_path, kind) as choir:
        [voice] = choir.voices
        async with talking(choir.app, "") as peer:
            with trio.fail_after(PATIENCE):
                await select(peer)
                voice.deaf = True
                for number in range(count):
                    peer.say("input_audio_buffer.append", audio=audio, number=number)
                left = -1
                while left != len(peer._inbox):
                    left = len(peer._inbox)
                    await trio.sleep(0.2)
                # Over tcp the kernel, too, holds as many as there is room for.
                assert left > (100 if kind == "tcp" else count - 3 * inbox.MOST_FRAMES)
                assert left < count - inbox.MOST_FRAMES
                voice.deaf = False
                await until(lambda: len(voice.heard[0]) == count + 1)
                assert [event["number"] for event in voice.heard[0][1:]] == list(range(count))


@PLANES
async def test_a_client_that_reads_nothing_holds_its_worker_back(kind: str, tmp_path: Path) -> None:
    async with open_choir(tmp_path, kind) as choir:
        async with talking(choir.app, "") as peer:
            with trio.fail_after(PATIENCE):
                await select(peer)
                peer.slowness = 0.2
                append(peer, "FLOOD")
                await trio.sleep(0.5)
                [admission] = choir.frontend.lifecycle.http.admissions(1)
                assert not admission.outcome
                assert len(peer.events) < 100
                peer.slowness = 0.0
                floods = [(await peer.read("flood"))["number"] for _ in range(2000)]
                assert floods == list(range(2000))


async def test_large_frames_are_bounded_by_their_bytes(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        choir.voices[0].deaf = True
        for _ in range(200):
            append(peer, "A" * 200_000)
        await trio.sleep(1)
        taken = 200 - len(peer._inbox)
        choir.voices[0].deaf = False
        assert taken <= 66 + inbox.MOST_BYTES // 200_000 + 1


# --- bad frames --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "close"),
    [
        ("not json", (1007, "malformed JSON frame")),
        ("", (1007, "malformed JSON frame")),
        (b"\x00", (1003, "binary frames not supported")),
    ],
)
async def test_what_is_no_json_ends_the_session(
    frame: str | bytes, close: tuple[int, str], autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir:
        async with talking(choir.app, "") as peer:
            await select(peer)
            peer.binary(frame) if isinstance(frame, bytes) else peer.text(frame)
            assert await closed(peer) == close
        assert [stopped for stopped, _ in choir.voices[0].ends] == [True]
        assert choir.outcomes() == {"validation": 1}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("7", "must be a JSON object"),
        ('{"type": "x", "n": 1e400}', "cannot be read"),
        ('{"type": "x", "n": 123456789012345678901234567890}', "cannot be handed on"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)
async def test_other_bad_frames_give_an_error(
    frame: str, message: str, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        peer.text(frame)
        error = (await peer.read("error"))["error"]
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]
        for event in ({}, {"type": 5}, {"type": "bogus"}):  # these are the worker's to judge
            peer.text(json.dumps(event))
            assert (await peer.read())["event"] == event


async def test_a_flood_of_bad_frames_waits_for_its_client(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        peer.slowness = 10.0
        for _ in range(10_000):
            peer.text("[1]")
        await trio.sleep(1)
        assert len(peer._inbox) > 9000
        peer.slowness = 0.0


# --- the worker's side of the end -----------------------------------------------------------------


@PLANES
async def test_a_worker_that_ends_the_session(kind: str, tmp_path: Path) -> None:
    async with open_choir(tmp_path, kind) as choir:
        async with talking(choir.app, "") as peer:
            with trio.fail_after(PATIENCE):
                await select(peer)
                peer.say("end")
                assert await closed(peer) == (1000, "stream complete")
        assert choir.voices[0].ends == [(False, False)]
        assert choir.outcomes() == {"success": 1}


@PLANES
async def test_a_worker_that_fails(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_choir(tmp_path, kind) as choir:
        async with talking(choir.app, "") as peer:
            with trio.fail_after(PATIENCE):
                await select(peer)
                append(peer, "RAISE")
                error = (await peer.read("error"))["error"]
                assert (error["type"], error["message"]) == (
                    "server_error",
                    "Internal server error.",
                )
                assert await closed(peer) == (1000, "stream complete")
        assert choir.outcomes() == {"internal": 1}
    assert "realtime session of voice by" in caplog.text
    assert "failed, 2 events in, 1 out" in caplog.text


async def test_what_is_no_event_is_told_and_passed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        append(peer, "BAD")
        assert (await peer.read())["error"]["type"] == "server_error"
        peer.say("hello")
        assert (await peer.read())["of"] == "hello"


# --- the client's side ----------------------------------------------------------------------------


async def test_a_worker_may_finish_behind_its_client(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """It is stopped at once; if it does not end, it is cancelled after five seconds."""
    async with open_choir(tmp_path) as choir:
        [voice] = choir.voices
        async with talking(choir.app, "") as peer:
            await select(peer)
            voice.deaf = True
            peer.say("hello")
            await trio.sleep(1)
            start = trio.current_time()
            peer.leave()
            await peer.over.wait()
            assert trio.current_time() - start == pytest.approx(5)
        assert voice.ends == [(True, True)]
        assert choir.outcomes() == {"cancelled": 1}


@pytest.mark.parametrize(
    ("code", "owed", "outcome"),
    [
        (1000, [], "success"),
        (1001, ["response.create", "response.created", "response.done"], "success"),
        (1005, ["input_audio_buffer.commit"], "success"),
        (1000, ["response.create"], "cancelled"),
        (1000, ["response.created"], "cancelled"),
        (1002, [], "cancelled"),
        (1006, [], "cancelled"),
    ],
)
async def test_how_a_session_counts_that_its_client_ends(
    code: int, owed: list[str], outcome: str, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """A success is one that is closed in good order while its worker owes it nothing."""
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        for kind in owed:
            said = kind if kind == "response.create" else "say"
            peer.say(kind if "commit" in kind else said, say=kind)
            await peer.read()
        await trio.sleep(1)
        peer.leave(code)
        await peer.over.wait()
        assert choir.outcomes() == {outcome: 1}


async def test_a_client_that_leaves_a_full_session_is_noticed(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir:
        async with talking(choir.app, "model=voice") as peer:
            await peer.read("session.created")
        await peer.over.wait()
        assert (peer.close, choir.voices[0].heard) == (None, [])
        assert choir.lifecycle.http.count == 0


# --- nobody there ---------------------------------------------------------------------------------


async def test_without_a_worker_it_can_be_tried_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "model=voice") as peer:
        await peer.read("session.created")
        choir.voices[0].lifecycle.request_stop("it goes")
        await choir.voices[0].lifecycle.wait_stopped()
        await trio.sleep(1)
        peer.say("hello")
        assert (await peer.read("error"))["error"]["code"] == "no_worker"
        assert await closed(peer) == (1013, "no_worker")


async def test_of_a_worker_that_takes_no_session_on_its_own_failure_is_told(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that there is no other: the client has not heard of a first one."""

    @asynccontextmanager
    async def unreachable(*args: Any, instance_id: int) -> AsyncIterator[None]:
        if instance_id in choir.instances:
            raise CannotConnect("nobody listens at 127.0.0.1:9")
        yield

    async with open_choir(tmp_path) as choir, talking(choir.app, "model=voice") as peer:
        monkeypatch.setattr(Client, "bidirectional", unreachable)
        peer.say("hello")
        error = (await peer.read("error"))["error"]
        assert (error["code"], error["message"]) == ("cannot_connect", "nobody listens at …")
        assert await closed(peer) == (1013, "cannot_connect")


async def test_of_a_worker_that_loses_a_session_its_own_failure_is_told(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
        await select(peer)
        append(peer, "POISON")
        notice = await peer.read(NOTICE)
        assert (notice["reason"], notice["deadline"]) == ("engine_shutdown", 0)
        assert await closed(peer) == (1012, "engine_shutdown")


async def test_limits_of_admission_hold_for_sessions(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir:
        choir.frontend.slots.most = 1
        async with talking(choir.app, "") as one, talking(choir.app, "model=voice") as other:
            await select(one)
            other.say("hello")
            assert (await other.read("error"))["error"]["code"] == "overloaded"
            assert await closed(other) == (1013, "overloaded")
            one.say("hello")
            assert (await one.read())["of"] == "hello"


# --- a drain of the frontend ----------------------------------------------------------------------


async def test_a_drain_tells_it_at_once_and_ends_it_at_the_limit(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path, http_drain=5.0) as choir:
        async with talking(choir.app, "") as peer:
            await select(peer)
            start = trio.current_time()
            choir.lifecycle.request_stop("now")
            notice = await peer.read(NOTICE)
            assert (notice["reason"], notice["deadline"]) == ("draining", 5.0)
            assert notice["session"] == {"type": "realtime", "model": "voice"}
            peer.say("hello")  # it is busy, as far as we know
            assert (await peer.read())["of"] == "hello"
            assert (await peer.read(NOTICE))["deadline"] == 0
            assert (await closed(peer))[0] == RESTART
            assert 5 <= trio.current_time() - start < 6
        assert choir.voices[0].ends == [(True, True)]


async def test_a_session_without_a_worker_is_idle(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_choir(tmp_path) as choir, talking(choir.app, "model=voice") as peer:
        await peer.read("session.created")
        start = trio.current_time()
        choir.lifecycle.request_stop("now")
        assert (await closed(peer))[0] == RESTART
        assert trio.current_time() == pytest.approx(start, abs=0.1)
