"""What a session may hold, and all together: what is in a conversation can be told again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.lifecycle import Outcome
from dynamo_trio.wire.openai.realtime.conversation import ANSWER_TEXT, MAX_ITEMS, MAX_TEXT
from dynamo_trio.wire.openai.realtime.events import DRAINING
from tests.frontend.realtime_peer import talking

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.frontend.conftest import Opener
    from tests.frontend.realtime_peer import Event, Peer

FEW: dict[str, Any] = {"max_output_tokens": 2}


async def code(peer: Peer) -> str:
    return str((await peer.read("error"))["error"]["code"])


async def fill(peer: Peer, items: int) -> None:
    for _ in range(items):
        peer.user("x")
        await peer.read("conversation.item.done")


async def test_an_answer_needs_a_place_and_the_notice_fits_elsewhere(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    own = {"input": [{"type": "message", "role": "user", "content": []}], **FEW}
    async with open_site(itl_ms=1) as site, talking(site.client.app) as peer:
        peer.say("session.update", session={"instructions": "Be kind."})
        await fill(peer, MAX_ITEMS - 1)
        answer = await peer.ask(response=own)
        assert answer["conversation_id"].startswith("conv_")
        peer.say("response.create", response=own)
        assert await code(peer) == "payload_too_large"
        assert (await peer.ask(response={**own, "conversation": "none"}))["output"]
        site.lifecycle.request_stop("test")
        notice = await peer.read(DRAINING)
        assert len(notice["items"]) == MAX_ITEMS
    async with open_site() as site, talking(site.client.app) as again:
        for item in notice["items"]:
            again.say("conversation.item.create", item=item)
            await again.read("conversation.item.done")
        assert "error" not in again.types()


async def test_an_answer_keeps_its_place_while_it_runs(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        peer.user("x" * (MAX_TEXT - ANSWER_TEXT - 1), role="system", id="long")
        await peer.read("conversation.item.done")
        own = {"input": [{"type": "message", "role": "user", "content": []}]}
        peer.say("response.create", response={**own, "max_output_tokens": 20})
        await peer.read("response.output_text.delta")
        peer.user("xx")
        assert await code(peer) == "payload_too_large"
        await peer.read("response.done")
        peer.user("xx")
        await peer.read("conversation.item.done")


async def test_an_answer_ends_where_there_is_no_more_room(
    open_site: Opener, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "dynamo_trio.wire.openai.realtime.conversation"
    monkeypatch.setattr(f"{where}.MAX_TEXT", 100)
    monkeypatch.setattr(f"{where}.ANSWER_TEXT", 10)
    async with open_site(itl_ms=1) as site, talking(site.client.app) as peer:
        peer.user("x" * 50)
        answer = await peer.ask(response={"max_output_tokens": 80})
        assert answer["status"] == "failed"
        assert answer["status_details"]["error"]["code"] == "payload_too_large"
        text = answer["output"][0]["content"][0]["text"]
        assert 10 < len(text) <= 50
        assert text == peer.deltas()
        await trio.testing.wait_all_tasks_blocked()
        assert site.lifecycle.work.count == 0  # its worker does not go on


async def test_all_conversations_together_are_bounded(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        site.frontend.conversations.most = 100_000
        async with talking(site.client.app) as one, talking(site.client.app) as other:
            one.user("é" * 20_000)
            await one.read("conversation.item.done")
            other.user("x" * 30_000)
            error = (await other.read("error"))["error"]
            assert (error["code"], "100000 bytes" in error["message"]) == ("overloaded", True)
            other.say("session.update", session={"instructions": "x" * 30_000})
            assert await code(other) == "overloaded"
            other.user("x")
            await other.read("conversation.item.done")
            one.leave()
            await one.over.wait()
            other.say("session.update", session={"instructions": "x" * 30_000})
            await other.read("session.updated")
            other.user("x" * 30_000)
            await other.read("conversation.item.done")
        await other.over.wait()
        assert site.frontend.conversations.used == 0


async def test_json_that_cannot_be_taken_is_named(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    reasons = {
        '{"a":' + "[" * 3000 + "]" * 3000 + "}": "The event is nested too deeply.",
        '{"a": 1e999}': "The event cannot be read",
        '{"a": "\\ud800"}': "The event holds half of a surrogate pair",
        '{"a": "\\uDC00 "}': "The event holds half of a surrogate pair",
        "[]": "The event must be a JSON object",
        '{"a": "\\ud800"': "malformed JSON frame",
    }
    async with open_site() as site, talking(site.client.app) as peer:
        for text, reason in reasons.items():
            peer.text(text)
            error = (await peer.read("error"))["error"]
            assert error["message"].startswith(reason), text[:20]


async def test_an_item_that_was_deleted_is_not_told_of(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        peer.user("hello")
        peer.say("response.create", response={"max_output_tokens": 10})
        item = (await peer.read("response.output_item.added"))["item"]
        peer.say("conversation.item.delete", item_id=item["id"])
        await peer.read("conversation.item.deleted")
        peer.skip()
        before = len(peer.events)
        await peer.read("response.done")
        later: list[Event] = peer.events[before:]
        assert "response.output_item.done" in [event["type"] for event in later]
        assert "conversation.item.done" not in [event["type"] for event in later]


@pytest.mark.parametrize("query", ["model=sim", ""])
async def test_an_idle_session_loses_nothing_by_a_stop_without_a_drain(
    open_site: Opener, autojump_clock: MockClock, query: str
) -> None:
    async with open_site(http_drain=0.0) as site, talking(site.client.app, query) as peer:
        await peer.read("session.created")
        site.lifecycle.request_stop("test")
        await peer.over.wait()
        assert peer.events[-1]["type"] == DRAINING
        assert peer.close is not None
        assert peer.close[0] == 1012
        await site.stopped()
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 1}
