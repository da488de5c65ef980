"""What a session hears of a stop, and how a client goes on elsewhere; in virtual time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.lifecycle import Outcome
from dynamo_trio.wire.openai.realtime.events import DRAINING
from tests.frontend.realtime_peer import talking

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.frontend.conftest import Opener

MOST: dict[str, Any] = {"max_output_tokens": 30}


@pytest.mark.parametrize("query", ["model=sim", ""])
async def test_an_idle_session_is_closed_at_once(
    open_site: Opener, autojump_clock: MockClock, query: str
) -> None:
    async with open_site() as site, talking(site.client.app, query) as peer:
        await peer.read("session.created")
        began = trio.current_time()
        site.lifecycle.request_stop("test")
        await peer.over.wait()
        notice = peer.events[-1]
        assert (notice["type"], notice["deadline"], notice["items"]) == (DRAINING, 0, [])
        assert peer.close == (1012, "draining")
        assert await site.stopped() == began
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 1}


async def test_an_upgrade_is_refused(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site, talking(site.client.app) as busy:
        busy.user("hello")
        busy.say("response.create", response=MOST)
        await busy.read("response.output_text.delta")
        site.lifecycle.request_stop("test")
        async with talking(site.client.app) as late:
            await late.over.wait()
        assert (late.status, json.loads(late.body)["error"]["code"]) == (503, "draining")
        async with talking(site.client.app, extensions={}) as late:
            await late.over.wait()
        assert (late.status, late.close) == (0, (1012, ""))


async def test_a_busy_session_is_closed_after_its_response(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        peer.user("hello")
        peer.say("response.create", response=MOST)  # 3 s
        await peer.read("response.output_text.delta")
        site.lifecycle.request_stop("test")
        notice = await peer.read(DRAINING)
        assert (notice["deadline"], notice["reason"], len(notice["items"])) == (5, "draining", 1)
        peer.say("response.cancel", response_id="no such")  # it is still served
        await peer.read("error")
        response = (await peer.read("response.done"))["response"]
        assert response["usage"]["output_tokens"] == 30
        last = await peer.read(DRAINING)
        assert (last["deadline"], last["items"][1]) == (0, response["output"][0])
        await peer.over.wait()
        assert peer.close == (1012, "draining")
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 2}


async def test_at_the_limit_a_busy_session_is_told_and_closed(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(context_tokens=100_000) as site, talking(site.client.app) as peer:
        peer.user("hello")
        peer.say("response.create")
        await peer.read("response.output_text.delta")
        began = trio.current_time()
        site.lifecycle.request_stop("test")
        response = (await peer.read("response.done"))["response"]
        assert trio.current_time() == began + 5
        assert response["status"] == "incomplete"
        assert response["status_details"]["error"]["code"] == "cut"
        last = await peer.read()
        assert (last["type"], last["reason"], last["deadline"]) == (DRAINING, "drain_limit", 0)
        assert last["items"][1]["content"][0]["text"] == peer.deltas()
        await peer.over.wait()
        assert peer.close == (1012, "drain_limit")
        assert await site.stopped() == began + 5
        assert site.lifecycle.http.tally == {Outcome.CUT: 2}


@pytest.mark.parametrize("busy", [True, False])
async def test_a_client_that_takes_nothing_does_not_hold_the_stop(
    open_site: Opener, autojump_clock: MockClock, busy: bool
) -> None:
    async with open_site(context_tokens=100_000) as site, talking(site.client.app) as peer:
        peer.user("hello")
        await peer.read("conversation.item.done")
        if busy:
            peer.say("response.create")
            await peer.read("response.output_text.delta")
        peer.slowness = None
        began = trio.current_time()
        site.lifecycle.request_stop("test")
        assert await site.stopped() <= began + 5 + 1 + 1e-9
        assert peer.close is None


async def test_an_escalated_stop_says_farewell_at_once(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(context_tokens=100_000) as site, talking(site.client.app) as peer:
        peer.user("hello")
        peer.say("response.create")
        await peer.read("response.output_text.delta")
        began = trio.current_time()
        site.lifecycle.escalate("test")
        await peer.over.wait()
        assert trio.current_time() == began
        assert (peer.events[-1]["type"], peer.events[-1]["reason"]) == (DRAINING, "escalated")
        assert peer.close == (1012, "escalated")


async def test_the_notice_is_all_that_is_needed_elsewhere(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as first, talking(first.client.app) as peer:
        peer.say("session.update", session={"instructions": "Be kind.", "temperature": 0.5})
        for text in ("one", "two"):
            peer.user(text)
            await peer.ask(response=MOST)
        first.lifecycle.request_stop("test")
        notice = await peer.read(DRAINING)
        await peer.over.wait()
    async with open_site() as second, talking(second.client.app, "") as again:
        again.say("session.update", session=notice["session"])
        for item in notice["items"]:
            again.say("conversation.item.create", item=item)
        again.user("three")
        answer = await again.ask(response=MOST)
        assert answer["usage"]["output_tokens"] == 30
        assert "error" not in again.types()
        second.lifecycle.request_stop("test")
        later = await again.read(DRAINING)
        assert later["session"] == notice["session"]
        assert later["items"][:4] == notice["items"]
        assert len(later["items"]) == 6
