"""The frontend's answers: OpenAI's shapes, the rejections, and one outcome per request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.frontend.calls import OpenCalls
from dynamo_trio.frontend.generate import PARSE_INLINE_BYTES, Kind, parse_body
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.testing import Fault
from dynamo_trio.wire.openai.request import CompletionRequest, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return {"model": "sim", "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


async def test_a_unary_chat_answer(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", CHAT, chat(), {"x-request-id": "mine-1"})
        body = answer.json()
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "mine-1"
        assert body["object"] == "chat.completion"
        assert len(body["choices"][0]["message"]["content"]) == 8
        assert body["choices"][0]["finish_reason"] == "length"
        usage = body["usage"]
        assert usage["completion_tokens"] == 8
        assert usage["total_tokens"] == usage["prompt_tokens"] + 8
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 1}
        assert site.lifecycle.work.tally == {Outcome.FINISHED: 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streamed_and_unary_answers_are_the_same_text(
    open_site: Opener, autojump_clock: MockClock, path: str
) -> None:
    body = chat(max_tokens=40) if path == CHAT else {"prompt": "Once", "model": "sim"}
    async with open_site() as site:
        unary = (await site.client.ask("POST", path, body)).json()["choices"][0]
        streamed = await site.client.ask("POST", path, {**body, "stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        text = unary["text"] if path == COMPLETIONS else unary["message"]["content"]
        assert streamed.text() == text
        assert streamed.events()[-1] == "[DONE]"
        assert streamed.ended


async def test_a_stream_arrives_token_by_token(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(itl_ms=100, prefill_ms=500) as site:
        answer = site.client.start("POST", CHAT, chat(stream=True))
        await trio.sleep(0.45)
        assert not answer.status  # an error would still have its own status
        await trio.sleep(0.4)
        assert answer.status == 200
        early = len(answer.text())
        assert 1 <= early < 8
        await answer.done.wait()
        assert len(answer.text()) == 8


async def test_include_usage_adds_a_chunk_without_choices(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        body = chat(stream=True, stream_options={"include_usage": True})
        *_, usage, done = (await site.client.ask("POST", CHAT, body)).events()
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_work(
    open_site: Opener, autojump_clock: MockClock, stream: bool
) -> None:
    async with open_site() as site:
        whole = (await site.client.ask("POST", CHAT, chat(max_tokens=60))).json()
        text = whole["choices"][0]["message"]["content"]
        stop = text[10:13]
        answer = await site.client.ask("POST", CHAT, chat(max_tokens=60, stop=stop, stream=stream))
        got = answer.text() if stream else answer.json()["choices"][0]["message"]["content"]
        assert got == text[: text.index(stop)]
        await site.lifecycle.work.wait_empty()
        await site.engine.drain()
        assert site.engine.stats.running == 0


async def test_the_same_seed_gives_the_same_answer(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        bodies = [chat(temperature=1.0, seed=7) for _ in range(2)]
        texts = [(await site.client.ask("POST", CHAT, body)).body[60:] for body in bodies]
    answers = [text.split(b'"choices"')[1].split(b'"usage"')[0] for text in texts]
    assert answers[0] == answers[1]


async def test_many_at_once(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        answers = [site.client.start("POST", CHAT, chat(stream=True)) for _ in range(50)]
        for answer in answers:
            await answer.done.wait()
        assert {answer.text() for answer in answers} == {answers[0].text()}
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 50}


async def test_two_requests_may_have_the_same_request_id(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(itl_ms=100) as site:
        headers = {"x-request-id": "twice"}
        answers = [site.client.start("POST", CHAT, chat(), headers) for _ in range(2)]
        for answer in answers:
            await answer.done.wait()
            assert (answer.status, answer.headers["x-request-id"]) == (200, "twice")
        assert site.lifecycle.work.tally == {Outcome.FINISHED: 2}


async def test_only_a_long_body_is_parsed_in_a_thread() -> None:
    def parse(body: bytes) -> GenerationRequest:
        return CompletionRequest(model="m", prompt="", stream=trio.lowlevel.in_trio_run())

    kind, limiter = attrs.evolve(Kind.COMPLETION, parse=parse), trio.CapacityLimiter(1)
    assert (await parse_body(kind, b"x" * PARSE_INLINE_BYTES, limiter)).stream
    assert not (await parse_body(kind, b"x" * (PARSE_INLINE_BYTES + 1), limiter)).stream


async def test_long_bodies_are_parsed_one_at_a_time() -> None:
    """Each holds the GIL; two at once would hold it twice as long."""
    running: list[int] = []
    most = 0

    def parse(body: bytes) -> GenerationRequest:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        time.sleep(0.02)
        running.pop()
        return CompletionRequest(model="m", prompt="")

    kind, limiter = attrs.evolve(Kind.COMPLETION, parse=parse), OpenCalls().parsing
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(parse_body, kind, b"x" * (PARSE_INLINE_BYTES + 1), limiter)
    assert most == 1


# --- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("GET", "/nowhere", None, 404, "not_found"),
        ("GET", "/v1", None, 404, "not_found"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("POST", "/health", None, 405, "method_not_allowed"),
        ("POST", CHAT, b"{", 400, "invalid_request"),
        ("POST", CHAT, b"", 400, "invalid_request"),
        ("POST", CHAT, b"\xff\xfe", 400, "invalid_request"),
        ("POST", CHAT, chat(temperature=3), 400, "invalid_request"),
        ("POST", CHAT, chat(n=2), 400, "invalid_request"),
        ("POST", CHAT, chat(model="nobody"), 404, "model_not_found"),
        ("POST", CHAT, chat(model="n" * 5000), 404, "model_not_found"),
        ("GET", "/v1/models/nobody", None, 404, "model_not_found"),
        ("GET", "/v1/models/si%6d", None, 404, "model_not_found"),  # a path is decoded once
        ("POST", CHAT, chat(max_tokens=100_000), 400, "context_length_exceeded"),
        ("POST", COMPLETIONS, {"model": "sim", "prompt": [99999]}, 400, "invalid_request"),
    ],
)
async def test_a_refusal_says_why_in_openais_envelope(
    open_site: Opener,
    autojump_clock: MockClock,
    method: str,
    path: str,
    body: object,
    status: int,
    reason: str,
) -> None:
    async with open_site() as site:
        answer = await site.client.ask(method, path, body)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (status, reason)
        assert set(error) == {"message", "type", "code", "param"}
        assert 0 < len(error["message"]) < 400
        assert answer.headers["x-dynamo-reason"] == reason
        assert site.lifecycle.http.count == 0


async def test_a_body_that_is_too_large_is_refused(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        headers = {"content-length": str(site.frontend.limits.body_bytes + 1)}
        answer = await site.client.ask("POST", CHAT, b"{}", headers)
        assert (answer.status, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_a_frontend_that_starts_is_live_but_not_ready(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        site.frontend.ready = False
        health = await site.client.ask("GET", "/health")
        assert (health.status, health.json()["stage"]) == (503, "starting")
        assert (await site.client.ask("GET", "/live")).status == 200
        answer = await site.client.ask("POST", CHAT, chat())
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker")
        site.frontend.ready = True


async def test_a_model_whose_worker_left_is_503_and_not_404(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        (model,) = site.frontend.catalog.models()
        (instance,) = model.client.instances()
        await site.runtime.unregister(instance)
        await trio.testing.wait_all_tasks_blocked()
        answer = await site.client.ask("POST", CHAT, chat())
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker")
        assert (await site.client.ask("GET", "/v1/models")).json()["data"] == []


async def test_models_are_listed(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        (entry,) = (await site.client.ask("GET", "/v1/models")).json()["data"]
        assert (entry["id"], entry["context_window"]) == ("sim", 512)
        assert (await site.client.ask("GET", "/v1/models/sim")).json() == entry


# --- clients that leave, engines that break ---------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0.1, 1.5])
async def test_a_client_that_leaves_frees_the_engine(
    open_site: Opener, autojump_clock: MockClock, stream: bool, after: float
) -> None:
    async with open_site(prefill_ms=1000) as site:
        answer = site.client.start("POST", CHAT, chat(max_tokens=400, stream=stream))
        await trio.sleep(after)
        answer.leave()
        await answer.done.wait()
        assert trio.current_time() < after + 0.2
        await site.engine.drain()
        assert site.engine.stats.kv_blocks_used == 0
        assert site.lifecycle.http.tally == {Outcome.CANCELLED: 1}
        assert site.lifecycle.work.tally == {Outcome.CANCELLED: 1}
        text = (await site.client.ask("GET", "/metrics")).body.decode()
        assert 'status="error"' in text
        assert 'error_type="cancelled"' in text


async def test_an_engine_that_dies_is_told_to_every_client(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        begun = site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
        await trio.sleep(1)
        site.core.arm(Fault.DIE)
        fresh = site.client.start("POST", CHAT, chat(stream=True))
        unary = site.client.start("POST", CHAT, chat())
        await site.stopped()
        assert begun.ended  # a proper end of the body, without [DONE]
        *tokens, last = begun.events()
        assert (last["error"]["code"], "[DONE]" in tokens) == ("engine_dead", False)
        for answer in (fresh, unary):  # nothing was sent yet: the status tells
            assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert site.lifecycle.http.tally == {Outcome.CUT: 3}
        assert site.lifecycle.exit_code() == 1


async def test_an_engine_that_hangs_is_noticed_at_the_step_limit(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        site.core.arm(Fault.HANG)
        answer = site.client.start("POST", CHAT, chat())
        stopped = await site.stopped()
        assert 30 <= stopped < 37  # the limit of the step, or of the health check that waits for it
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_hung")
        assert site.lifecycle.exit_code() == 1


# --- the drain ---------------------------------------------------------------------------------


async def test_the_drain_refuses_new_and_finishes_old(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(http_drain=120.0) as site:
        running = [site.client.start("POST", CHAT, chat(stream=True, max_tokens=32))]
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nowhere")]:
            refused = await site.client.ask(method, path, chat() if method == "POST" else None)
            assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
        health = await site.client.ask("GET", "/health")
        assert (health.status, health.json()["stage"]) == (503, "draining")
        assert (await site.client.ask("GET", "/live")).status == 200
        assert (await site.client.ask("GET", "/metrics")).status == 200
        for answer in running:
            await answer.done.wait()
            assert answer.events()[-1] == "[DONE]"
            assert len(answer.text()) == 32
        finished = trio.current_time()
        assert await site.stopped() - finished < 0.5  # promptly
        assert site.lifecycle.exit_code() == 0


async def test_at_the_limit_a_stream_gets_its_farewell(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(http_drain=1.0) as site:
        answer = site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        assert await site.stopped() <= 0.5 + 1.0 + 1.0
        assert answer.done.is_set()
        assert answer.ended
        *tokens, last = answer.events()
        assert last["error"]["code"] == "cut"
        assert "[DONE]" not in tokens
        assert len(answer.text()) == 15
        assert site.lifecycle.http.tally == {Outcome.CUT: 1}


async def test_at_the_limit_a_unary_request_gets_an_error(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(http_drain=1.0) as site:
        answer = site.client.start("POST", CHAT, chat(max_tokens=400))
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        await site.stopped()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "cut")
        assert site.lifecycle.http.tally == {Outcome.CUT: 1}


async def test_a_client_that_never_reads_does_not_hold_the_exit(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(http_drain=5.0) as site:
        site.client.slowness = None
        site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
        await trio.sleep(2)
        site.lifecycle.request_stop("SIGTERM")
        assert await site.stopped() <= 2 + 5 + 2
        assert site.lifecycle.http.tally == {Outcome.LOST: 1}  # it was never told


async def test_an_idle_site_stops_at_once(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.lifecycle.request_stop("SIGTERM")
        assert await site.stopped() == 0


async def test_started_equals_success_plus_error_when_idle(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        await site.client.ask("POST", CHAT, chat())
        leaver = site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
        await trio.sleep(1)
        leaver.leave()
        await leaver.done.wait()
        await site.client.ask("POST", CHAT, chat(temperature=3))
        ended = sum(
            sample.value
            for metric in site.frontend.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "dynamo_frontend_requests_total"
        )
        started = sum(
            sample.value
            for metric in site.frontend.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "dynamo_frontend_requests_started_total"
        )
        assert started == ended == 3
