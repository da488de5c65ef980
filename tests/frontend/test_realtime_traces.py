"""The trace of a session: a span of its own, and one below it for each response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.frontend.realtime_peer import talking
from tests.frontend.test_frontend_traces import SPAN, TRACE, Lines, attributes, lines, recorded
from tests.frontend.voices import open_choir, select, until

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan
    from trio.testing import MockClock

    from tests.frontend.conftest import Opener
    from tests.frontend.realtime_peer import Peer

__all__ = ["lines"]  # a fixture

HEADERS = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"x-request-id", b"mine-1")]


def most(tokens: int) -> dict[str, Any]:
    return {"max_output_tokens": tokens}


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    return f"{span.context.span_id:016x}"


async def test_each_response_is_a_span_of_its_session_and_its_workers_parent(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    with recorded() as memory:
        async with open_site() as site, talking(site.client.app, headers=HEADERS) as peer:
            created = await peer.read("session.created")
            answers = []
            for number in (3, 5):
                peer.user("hello")
                answers.append(await peer.ask(response=most(number)))
            worker = str(site.runtime.instance_id)
    by_name = [span.name for span in memory.get_finished_spans()]
    assert by_name == ["handle_payload", "realtime-response"] * 2 + ["http-request"]
    *_, session = spans = memory.get_finished_spans()
    assert parent_of(session) == SPAN
    for answer, back, front in zip(answers, spans[0:4:2], spans[1:4:2], strict=True):
        assert parent_of(front) == id_of(session)
        assert parent_of(back) == id_of(front)
        assert front.status.is_ok
        told = attributes(front)
        assert told.pop("ttft_ms") >= 0
        assert told.pop("avg_itl_ms") == pytest.approx(100)
        assert told == {
            "request_id": answer["id"],
            "model": "sim",
            "request_type": "stream",
            "input_tokens": answer["usage"]["input_tokens"],
            "output_tokens": answer["usage"]["output_tokens"],
            "worker_id": worker,
            "response.status": "incomplete",
            "request.outcome": "success",
        }
        assert attributes(back)["request_id"] == answer["id"]
    assert attributes(session) == {
        "method": "GET",
        "uri": "/v1/realtime",
        "version": "1.1",
        "endpoint": "realtime",
        "request_id": created["session"]["id"],
        "model": "sim",
        "request.outcome": "success",
    }


async def test_the_span_of_a_response_that_fails_says_why_and_the_sessions_does_not(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    with recorded() as memory:
        async with open_site() as site, talking(site.client.app) as peer:
            peer.user("hello")
            peer.say("response.create", response=most(50))
            await peer.read("response.output_text.delta")
            peer.say("response.cancel")
            await peer.read("response.done")
            site.frontend.slots.most = 0
            peer.say("response.create", response=most(50))
            await peer.read("error")
    *responses, session = [s for s in memory.get_finished_spans() if s.name != "handle_payload"]
    cancelled, refused = map(attributes, responses)
    assert (cancelled["error_type"], cancelled["response.status"]) == ("cancelled", "cancelled")
    assert cancelled["output_tokens"] > 0
    assert (refused["error_type"], refused["request.outcome"]) == ("overload", "error")
    assert "response.status" not in refused
    assert [span.status.description for span in responses] == ["cancelled", "overloaded"]
    assert attributes(session)["request.outcome"] == "success"
    assert session.status.is_ok


async def test_without_a_tracer_the_log_lines_say_the_same(
    open_site: Opener, autojump_clock: MockClock, lines: Lines
) -> None:
    async with open_site() as site, talking(site.client.app, headers=HEADERS) as peer:
        for _ in range(2):
            peer.user("hello")
            await peer.ask(response=most(3))
    fronts = [e for e in lines.of("dynamo_trio.frontend") if "realtime response" in e["message"]]
    backs = lines.of("dynamo_trio.endpoint")
    assert len(fronts) == len(backs) == 2
    assert {e["trace_id"] for e in (*fronts, *backs)} == {TRACE}
    assert {e["x_request_id"] for e in (*fronts, *backs)} == {"mine-1"}
    for front, back in zip(fronts, backs, strict=True):
        assert front["request_id"] == back["request_id"]
        assert back["parent_id"] == front["span_id"]
    # Both are below the session's, which is not the client's.
    [session] = {e["parent_id"] for e in fronts}
    assert session != SPAN
    assert len({e["span_id"] for e in fronts}) == 2


# --- a worker that speaks the events itself ---------------------------------------------------


def say(peer: Peer, kind: str, response: Any = None) -> None:
    """Let the worker say this."""
    peer.say("say", say=kind, fields={} if response is None else {"response": response})


async def test_a_passed_through_response_is_a_span_made_of_what_its_worker_says(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    with recorded() as memory:
        async with open_choir(tmp_path) as choir:
            worker = str(choir.voices[0].instance_id)
            async with talking(choir.app, "", headers=HEADERS) as peer:
                await select(peer)
                say(peer, "response.created", {"id": "resp_1"})
                usage = {"input_tokens": 7, "output_tokens": 4}
                done = {"id": "resp_1", "status": "completed", "usage": usage}
                say(peer, "response.done", done)
                say(peer, "response.done", done)  # never begun
                for nonsense in (None, 1, {}, {"id": 2}, {"id": "resp_2"}):
                    say(peer, "response.created", nonsense)
                say(peer, "response.done", {"id": "resp_2", "status": "failed", "usage": [1]})
                say(peer, "response.created", {"id": "resp_3"})
                for _ in range(9):
                    await peer.read()
            await until(lambda: bool(choir.voices[0].ends))
    spans = {attributes(s).get("request_id"): s for s in memory.get_finished_spans()}
    [session] = [s for s in memory.get_finished_spans() if s.name == "http-request"]
    [back] = [s for s in memory.get_finished_spans() if s.name == "handle_payload"]
    assert parent_of(back) == id_of(session)
    assert {parent_of(spans[name]) for name in ("resp_1", "resp_2", "resp_3")} == {id_of(session)}
    assert attributes(spans["resp_1"]) == {
        "request_id": "resp_1",
        "model": "voice",
        "request_type": "stream",
        "worker_id": worker,
        "input_tokens": 7,
        "output_tokens": 4,
        "response.status": "completed",
        "request.outcome": "success",
    }
    assert [attributes(spans[name])["error_type"] for name in ("resp_2", "resp_3")] == [
        "internal",
        "cancelled",
    ]
    assert "output_tokens" not in attributes(session)
    assert attributes(session)["model"] == "voice"
    assert len(spans) == 4  # these, and those of the session and its worker, of one id


async def test_a_worker_that_ends_no_response_gets_no_crowd_of_spans(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    with recorded() as memory:
        async with open_choir(tmp_path) as choir, talking(choir.app, "") as peer:
            await select(peer)
            for number in range(50):
                say(peer, "response.created", {"id": f"resp_{number}"})
                await peer.read()
            choir.voices[0].scope.cancel()
            await trio.sleep(1)
    begun = [span for span in memory.get_finished_spans() if span.name == "realtime-response"]
    assert len(begun) == 16
    assert {attributes(span)["error_type"] for span in begun} == {"unavailable"}
