"""A frontend at the end of its patience: endless streams of each protocol, and those that are idle.

To the second this is held in virtual time (tests/frontend/test_front_drain.py). Here are the real
sockets and the real exit: who is told what, in which order, and what the report says of it.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from tests.frontend.fronts import Http2Client, Stream, events
from tests.programs.conftest import MODEL, models, wait_instances
from tests.programs.crowd import Reader
from tests.programs.talkers import TRANSCRIBED, Talker, append_and_commit, ask_for_much
from tests.standalone.harness import PATIENCE, chat, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

CHAT = "/v1/chat/completions"
ENDLESS = json.dumps(chat(8000, model=MODEL)).encode()
VOICE = "examples/realtime_worker.py"


def start(fleet: Fleet, limit: str) -> Server:
    """A frontend with a model that chats, and one that listens."""
    fleet.worker("--itl-ms", "20", ready=False)
    fleet.run(sys.executable, VOICE, "serve")
    settings: dict[str, Any] = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": limit}
    frontend = fleet.frontend(**settings)
    wait_until(lambda: {MODEL, "ear"} == {*models(frontend.port)}, "both models are offered")
    wait_instances(frontend, 2)
    return frontend


@attrs.define(eq=False)
class Everybody:
    """Clients of each kind, and the order in which they came to their end."""

    port: int
    http1: Reader = attrs.field(init=False)
    http2: list[Stream] = attrs.field(init=False)
    idle: Talker = attrs.field(factory=lambda: Talker(MODEL))
    busy: Talker = attrs.field(factory=lambda: Talker(MODEL, ask_for_much))
    heard: Talker = attrs.field(factory=lambda: Talker("ear", append_and_commit, TRANSCRIBED))
    ends: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.http1 = Reader(self.port, ENDLESS)

    async def run(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Begin all of it, stop the frontend, and wait for the end of each."""
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                self.http2 = [await nursery.start(self._http2, window) for window in (65_535, 0)]
                nursery.start_soon(self._end, "http1", self.http1.run)
                await self.http1.wait_begun()
                for name in ("idle", "busy", "heard"):
                    talker: Talker = getattr(self, name)
                    nursery.start_soon(self._end, name, partial(talker.run, self.port))
                    await talker.begun.wait()
                await stop()

    async def _http2(
        self, window: int, *, task_status: trio.TaskStatus[Stream] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """``window`` is as for :meth:`Front.http2`: 0 lets nothing of a body come."""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            client = Http2Client(stream, window)
            await client.begin()
            task_status.started(await client.send("POST", CHAT, ENDLESS))
            await client.read()
        self.ends.append("http2")

    async def _end(self, name: str, client: Callable[[], Awaitable[None]]) -> None:
        await client()
        self.ends.append(name)

    def check(self, reason: str) -> None:
        """Each was told as its protocol has it."""
        assert self.ends[0] == "idle"
        assert self.http1.ending() == "cut"
        read, unread = self.http2
        assert (read.status, read.whole, events(read.body)[-1]["error"]["code"]) == (
            200,
            True,
            "cut",
        )
        assert (unread.whole, unread.body) == (False, b"")
        assert {talker.code for talker in (self.idle, self.busy, self.heard)} == {1012}
        assert self.idle.notices == [("draining", True)]
        assert self.busy.notices[-1] == self.heard.notices[-1] == (reason, True)
        (response,) = [e["response"] for e in self.busy.heard if e["type"] == "response.done"]
        assert (response["status"], response["status_details"]["reason"]) == ("incomplete", "cut")


@pytest.mark.parametrize("hurried", [False, True], ids=["at the limit", "at a second SIGINT"])
async def test_who_is_endless_is_told_and_the_exit_follows(fleet: Fleet, hurried: bool) -> None:
    limit = 120 if hurried else 1
    frontend = await trio.to_thread.run_sync(start, fleet, str(limit))
    everybody = Everybody(frontend.port)

    async def stop() -> None:
        frontend.kill(signal.SIGINT)
        if hurried:
            await trio.to_thread.run_sync(frontend.wait_log, "phase draining")
            while everybody.idle.code is None:  # noqa: ASYNC110 - no event says so
                await trio.sleep(0.01)
            frontend.kill(signal.SIGINT)

    await everybody.run(stop)
    assert await trio.to_thread.run_sync(frontend.end) == 0
    everybody.check("escalated" if hurried else "drain_limit")
    report = frontend.report
    steps = {step["step"]: step["outcome"] for step in report["steps"]}
    assert steps["http_drain"] == ("cancelled" if hurried else "timed_out")
    # Of the realtime models both the session and what it asked for; the idle one is no loss.
    told = {how: count for how, count in report["requests"].items() if count}
    assert told == {"finished": 1, "cut": 7}
    assert report["leftovers"] == report["errors"] == []
    assert report["seconds"] < 10 * (1 + 2)
