"""A text session, event by event, in virtual time."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio.discovery import Instance
from dynamo_trio.errors import Disconnected, Draining, RequestRejected
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.plane import INITIAL_CREDIT
from dynamo_trio.wire.openai.realtime.conversation import MAX_ITEMS, MAX_TEXT
from tests.frontend.realtime_peer import talking
from tests.frontend.test_placement import GENERATE, TEXT, WELL, Deed, open_scene

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.frontend.conftest import Opener, Site

#: The events of one response, without its deltas.
RESPONSE = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


def total(site: Site, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for metric in site.frontend.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == f"dynamo_frontend_{name}" and labels.items() <= sample.labels.items()
    )


def most(tokens: int) -> dict[str, Any]:
    return {"max_output_tokens": tokens}


# --- the session ---------------------------------------------------------------------------


async def test_a_conversation(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        async with talking(site.client.app) as peer:
            created = await peer.read("session.created")
            assert created["session"]["type"] == "realtime"
            assert created["session"]["model"] == "sim"
            peer.user("hello")
            added, done = await peer.read(), await peer.read()
            assert [added["type"], done["type"]] == RESPONSE[2:7:4]
            assert added["item"] == done["item"]
            response = await peer.ask(response={**most(5), "metadata": {"topic": "x"}})
            answer = response["output"][0]
            assert response["status_details"]["reason"] == "max_output_tokens"
            assert response["metadata"] == {"topic": "x"}
            assert response["usage"]["output_tokens"] == 5
            assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 5
            assert answer["content"] == [{"type": "output_text", "text": peer.deltas()}]
            others = [kind for kind in peer.types()[3:] if kind != "response.output_text.delta"]
            assert others == RESPONSE
            first = response["usage"]["input_tokens"]
            peer.user("and now?")
            assert (await peer.read("conversation.item.added"))["previous_item_id"] == answer["id"]
            response = await peer.ask(response=most(3))
            assert response["usage"]["input_tokens"] > first + 5  # it is asked with all of it
            ids = [event["event_id"] for event in peer.events]
            assert len(set(ids)) == len(ids)
        await peer.over.wait()
        assert total(site, "requests_total", endpoint="realtime", status="success") == 2
        assert total(site, "active_requests") == 0
        assert site.lifecycle.http.tally[Outcome.FINISHED] == 3  # the session is one, too
        assert site.lifecycle.http.count == 0


async def test_a_model_selected_by_an_update(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site, talking(site.client.app, "") as peer:
        assert (await peer.read())["session"] == {"type": "realtime"}
        peer.text("{")
        peer.binary(b"x")
        peer.user("too early")
        peer.say("session.update", session={"type": "realtime"}, event_id="mine")
        peer.say("session.update", session={"type": "realtime", "model": "nope"})
        errors = [(await peer.read("error"))["error"] for _ in range(5)]
        assert [error["message"] for error in errors] == [
            "malformed JSON frame",
            "binary frames not supported",
            "expected session.update before engine is selected",
            "session.model required",
            "unknown model: nope",
        ]
        assert errors[2]["param"] == "session.update"
        assert (errors[3]["event_id"], errors[4]["code"]) == ("mine", "model_not_found")
        peer.say("session.update", session={"model": "sim", "instructions": "Be brief."})
        session = (await peer.read("session.updated"))["session"]
        assert (session["model"], session["instructions"]) == ("sim", "Be brief.")
        assert (await peer.ask(response=most(2)))["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [("model=nope", 404, "model_not_found"), ("model=%00", 404, "model_not_found")],
)
async def test_an_upgrade_is_refused_in_http(
    open_site: Opener, autojump_clock: MockClock, query: str, status: int, code: str
) -> None:
    async with open_site() as site, talking(site.client.app, query) as peer:
        await peer.over.wait()
        assert (peer.status, json.loads(peer.body)["error"]["code"]) == (status, code)
        assert site.lifecycle.http.tally == {}


async def test_a_browsers_subprotocol_is_answered(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    offered = ["realtime", "openai-insecure-api-key.secret"]
    async with open_site() as site, talking(site.client.app, subprotocols=offered) as peer:
        await peer.read("session.created")
        assert peer.accepted["subprotocol"] == "realtime"


# --- what is refused, by an event ------------------------------------------------------------

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
AUDIO_PART = {**USER, "content": [{"type": "input_audio", "audio": "aaaa"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "bogus.event"}, "type"),
    ({"type": 7}, "type"),
    ({}, "type"),
    ({"type": "input_audio_buffer.append", "audio": "aaaa"}, "type"),
    ({"type": "conversation.item.truncate", "item_id": "x"}, "type"),
    ({"type": "session.update"}, "session"),
    ({"type": "session.update", "session": {"model": "other"}}, "session.model"),
    ({"type": "session.update", "session": {"output_modalities": ["audio"]}},
     "session.output_modalities"),
    ({"type": "session.update", "session": {"audio": {"input": {}}}}, "session.audio"),
    ({"type": "session.update", "session": {"tools": [{"type": "function"}]}}, "session.tools"),
    ({"type": "session.update", "session": {"speed": 2}}, "session.speed"),
    ({"type": "session.update", "session": {"type": "transcription"}}, "session.type"),
    ({"type": "conversation.item.create"}, "item"),
    ({"type": "conversation.item.create", "item": AUDIO_PART}, "item.content[0].type"),
    ({"type": "conversation.item.create", "item": CALL}, "item.type"),
    ({"type": "conversation.item.create", "item": USER, "previous_item_id": "no"},
     "previous_item_id"),
    ({"type": "conversation.item.delete", "item_id": "no"}, "item_id"),
    ({"type": "conversation.item.retrieve"}, "item_id"),
    ({"type": "response.create", "response": {"tools": [CALL]}}, "response.tools"),
    ({"type": "response.create", "response": {"conversation": "x"}}, "response.conversation"),
    ({"type": "response.create", "response": {"max_output_tokens": 0}},
     "response.max_output_tokens"),
    ({"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "no"}]}},
     "response.input[0].id"),
    ({"type": "response.create", "response": {"metadata": {"k": 1}}}, "response.metadata.k"),
]  # fmt: skip


async def test_what_is_wrong_is_named_and_the_session_goes_on(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        for number, (event, param) in enumerate(REFUSED):
            peer.text(json.dumps({**event, "event_id": f"mine-{number}"}))
            error = (await peer.read("error"))["error"]
            assert (error["event_id"], error["param"]) == (f"mine-{number}", param), event
            assert error["type"] == "invalid_request_error"
        for text in ("{", '{"type":', "\ud800"):
            peer.text(text)
            assert (await peer.read("error"))["error"]["message"] == "malformed JSON frame"
        peer.binary(b"{}")
        assert (await peer.read("error"))["error"]["message"] == "binary frames not supported"
        peer.say("response.create")
        assert "empty" in (await peer.read("error"))["error"]["message"]
        peer.user("hello")
        assert (await peer.ask(response=most(2)))["usage"]["output_tokens"] == 2


async def test_a_conversation_is_bounded(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        peer.user("x" * MAX_TEXT)
        item = (await peer.read("conversation.item.done"))["item"]
        peer.user("x")
        assert (await peer.read("error"))["error"]["code"] == "payload_too_large"
        peer.text("x" * (2 * MAX_TEXT + 1))
        assert "characters" in (await peer.read("error"))["error"]["message"]
        peer.say("conversation.item.delete", item_id=item["id"])
        await peer.read("conversation.item.deleted")
        for _ in range(MAX_ITEMS + 1):
            peer.user("x")
        assert str(MAX_ITEMS) in (await peer.read("error"))["error"]["message"]
        assert peer.types().count("conversation.item.done") == MAX_ITEMS + 1


async def test_a_prompt_that_is_too_long_fails_its_response(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(context_tokens=64) as site, talking(site.client.app) as peer:
        peer.user("x" * 100_000)
        response = await peer.ask()
        assert (response["status"], response["output"]) == ("failed", [])
        assert response["status_details"]["error"]["code"] == "context_length_exceeded"
        assert total(site, "requests_total", error_type="validation") == 1


# --- responses -------------------------------------------------------------------------------


async def test_a_response_is_cancelled(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site(context_tokens=100_000) as site, talking(site.client.app) as peer:
        peer.user("hello")
        peer.say("response.create")
        await peer.read("response.output_text.delta")
        peer.say("response.create", event_id="second")
        error = (await peer.read("error"))["error"]
        assert error["code"] == "conversation_already_has_active_response"
        assert error["event_id"] == "second"
        peer.say("response.cancel", response_id="another")
        assert (await peer.read("error"))["error"]["code"] == "response_cancel_not_active"
        peer.say("response.cancel")
        response = (await peer.read("response.done"))["response"]
        assert response["status_details"]["reason"] == "client_cancelled"
        assert response["status"] == "cancelled"
        item = response["output"][0]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", peer.deltas())
        peer.say("response.cancel")
        assert (await peer.read("error"))["error"]["code"] == "response_cancel_not_active"
        await trio.sleep(1)
        assert site.lifecycle.work.count == 0
        assert total(site, "requests_total", error_type="cancelled") == 1
        assert (await peer.ask(response=most(2)))["usage"]["output_tokens"] == 2


async def test_a_client_that_leaves_ends_its_response(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(context_tokens=100_000) as site:
        async with talking(site.client.app) as peer:
            peer.user("hello")
            peer.say("response.create")
            await peer.read("response.output_text.delta")
        await trio.sleep(1)
        assert site.lifecycle.work.count == 0
        assert site.lifecycle.http.count == 0
        assert total(site, "requests_total", error_type="cancelled") == 1
        assert site.lifecycle.http.tally == {Outcome.CANCELLED: 2}  # the session, too


async def test_a_response_beside_the_conversation(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site, talking(site.client.app) as peer:
        peer.user("hello", id="mine")
        reference, more = {"type": "item_reference", "id": "mine"}, dict(USER)
        beside = {**most(3), "conversation": "none", "input": [reference, more]}
        response = await peer.ask(response={**beside, "instructions": "Be brief."})
        assert response["conversation_id"] is None
        assert peer.types().count("conversation.item.added") == 1
        peer.say("conversation.item.retrieve", item_id=response["output"][0]["id"])
        assert (await peer.read("error"))["error"]["param"] == "item_id"
        peer.say("conversation.item.retrieve", item_id="mine")
        item = (await peer.read("conversation.item.retrieved"))["item"]
        assert item["content"] == [{"type": "input_text", "text": "hello"}]


async def test_a_slow_client_holds_back_its_worker(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    """And what waited for it comes in fewer, longer deltas."""
    async with open_site(itl_ms=1) as site:
        site.frontend.limits = attrs.evolve(site.frontend.limits, high_water=50, low_water=10)
        async with talking(site.client.app) as peer:
            peer.slowness = 2.0
            peer.user("hello")
            peer.say("response.create")
            await peer.read("response.created")
            await trio.sleep(1)  # a second is enough for all, but nobody has taken the first
            assert site.lifecycle.work.count == 1
            response = (await peer.read("response.done"))["response"]
            text = response["output"][0]["content"][0]["text"]
            assert peer.deltas() == text
            assert INITIAL_CREDIT < response["usage"]["output_tokens"] < 1000
            assert 2 <= peer.types().count("response.output_text.delta") <= 10


async def test_a_client_that_takes_nothing_is_given_up(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(context_tokens=1_000_000) as site:
        async with talking(site.client.app) as peer:
            await peer.read("session.created")
            peer.slowness = None
            peer.user("hello")
            peer.say("response.create")
            began = trio.current_time()
            await peer.over.wait()
            assert trio.current_time() - began == site.frontend.limits.write_time
            assert (peer.close, site.lifecycle.http.count) == (None, 0)


# --- its workers -----------------------------------------------------------------------------


async def test_an_untouched_response_is_asked_of_another_worker(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(error=Disconnected("why")), WELL) as scene:
        async with talking(scene.caller.app, "model=m") as peer:
            peer.user("hi")
            response = await peer.ask()
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == TEXT.decode()
            assert scene.asked == ["w1", "w2"]
            assert peer.types().count("response.created") == 1


async def test_a_response_that_was_begun_fails_and_the_next_goes_elsewhere(
    autojump_clock: MockClock,
) -> None:
    broken = Deed(tokens=b"half of", error=Disconnected("why"))
    async with open_scene(broken, WELL) as scene, talking(scene.caller.app, "model=m") as peer:
        peer.user("hi")
        response = await peer.ask()
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "disconnected"
        assert response["output"][0]["content"][0]["text"] == "half of"
        assert (await peer.ask())["status"] == "completed"
        assert scene.asked == ["w1", "w2"]
        assert b"half of" in scene.workers.bodies[0] or len(scene.workers.bodies) == 2


async def test_a_request_that_no_worker_takes_fails(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(RequestRejected("too odd"))) as scene:
        async with talking(scene.caller.app, "model=m") as peer:
            peer.user("hi")
            response = await peer.ask()
            assert response["status_details"]["error"]["message"] == "too odd"
            assert (response["status"], response["output"]) == ("failed", [])


async def test_a_session_outlives_its_workers(autojump_clock: MockClock) -> None:
    async with open_scene(WELL) as scene, talking(scene.caller.app, "model=m") as peer:
        peer.user("first")
        assert (await peer.ask())["status"] == "completed"
        await scene.worker(2, WELL)
        scene.workers.deeds["w1"] = Deed(Draining("stopping"))
        peer.user("second")
        assert (await peer.ask())["status"] == "completed"
        await scene.discovery.unregister(Instance(GENERATE, 1, {"fake": "w1"}))
        await trio.sleep(1)
        scene.asked.clear()
        for _ in range(3):
            assert (await peer.ask())["status"] == "completed"
        assert scene.asked == ["w2"] * 3
        await scene.discovery.unregister(Instance(GENERATE, 2, {"fake": "w2"}))
        await trio.sleep(1)
        peer.say("response.create", event_id="mine")
        error = (await peer.read("error"))["error"]
        assert (error["code"], error["event_id"]) == ("no_worker", "mine")
        await scene.worker(3, WELL)
        assert (await peer.ask())["status"] == "completed"


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_that_a_client_says_closes_its_session(
    open_site: Opener, autojump_clock: MockClock, seed: int
) -> None:
    random = Random(seed)
    async with open_site(itl_ms=1) as site, talking(site.client.app) as peer:
        for _ in range(500):
            peer.text(json.dumps(anything(random)))
            if random.random() < 0.2:
                await trio.sleep(random.random() / 100)
        await trio.sleep(60)
        assert not peer.over.is_set()
        peer.skip()
        peer.say("session.update", session={"max_output_tokens": "inf", "instructions": "x"})
        await peer.read("session.updated")
        last = await peer.ask(response={**most(3), "input": [USER]})  # the conversation is long
        assert last["usage"]["output_tokens"] == 3
        assert peer.types().count("response.created") == peer.types().count("response.done")


def anything(random: Random) -> Any:
    """An event, or what looks a little like one."""
    event = deepcopy(random.choice([event for event, _ in REFUSED] + GOOD))
    for _ in range(random.choice([0, 0, 0, 1, 2])):
        values: list[Any] = [
            None,
            True,
            -1,
            1e300,
            "",
            "x" * 50,
            [],
            {},
            [{}],
            "auto",
            "none",
            "root",
        ]
        holder = random.choice([event, *(v for v in event.values() if isinstance(v, dict))])
        key = random.choice([*holder, "item", "item_id", "response", "session", "input", "id"])
        holder[key] = random.choice(values)
    return event


GOOD: list[dict[str, Any]] = [
    {"type": "conversation.item.create", "item": USER},
    {"type": "response.create"},
    {"type": "response.create", "response": {"max_output_tokens": 3, "input": [USER]}},
    {"type": "response.cancel"},
    {"type": "session.update", "session": {"instructions": "x", "max_output_tokens": "inf"}},
]
