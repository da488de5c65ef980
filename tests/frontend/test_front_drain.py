"""The drain of a whole front in virtual time: each protocol, each kind of client, to the second.

A stop begins at ``t``. Whoever may be waited for is waited for until the limit, ``t + LIMIT``;
whoever is cut then has a second for a last word; nothing lasts longer than ``t + LIMIT + 2``.
"""

from __future__ import annotations

import json
import ssl
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import pytest
import trio
import trio_websocket
from prometheus_client.parser import text_string_to_metric_families

from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.tls import server_context
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.tokenizers.preprocess import INLINE_BYTES
from tests.frontend.fronts import Ends, Front, events, open_front, read_all
from tests.plane.tls_files import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    from tests.frontend.conftest import Opener
    from tests.http.harness import Http1Client

    Site = Callable[..., AbstractAsyncContextManager[Front]]

LIMIT = 5.0
CHAT = "/v1/chat/completions"
#: How long a client that is told goodbye, but takes nothing, is borne with.
FAREWELL = HttpLimits().farewell_time


@pytest.fixture
def site(open_site: Opener) -> Site:
    return partial(open_front, open_site, http_drain=LIMIT, context_tokens=100_000)


def chat(max_tokens: int, *, stream: bool = True, text: str = "Why?") -> bytes:
    messages = [{"role": "user", "content": text}]
    more = {"max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    return json.dumps({"model": "sim", "messages": messages, **more}).encode()


ENDLESS = chat(90_000)


def stop(front: Front) -> float:
    front.site.lifecycle.request_stop("SIGTERM")
    return trio.current_time()


async def first_words(client: Http1Client) -> bytes:
    """Read on until the first piece of an answer's body is there."""
    while not (data := getattr(await client.next_event(), "data", b"")):
        pass
    return bytes(data)


def check_farewell(body: bytes) -> None:
    *said, last = events(body)
    assert last["error"]["code"] == "cut"
    assert said
    assert "[DONE]" not in said
    assert all("choices" in event for event in said)


# --- who is waited for ------------------------------------------------------------------------


async def test_streams_that_end_in_time_are_whole_and_the_exit_follows(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        http1, http2 = front.http1(), await front.http2()
        await http1.send("POST", CHAT, chat(20))
        stream = await http2.send("POST", CHAT, chat(20))
        begun = await first_words(http1)
        stopped = stop(front)
        _, _, body, whole = await read_all(http1)
        await stream.done.wait()
        ended = trio.current_time()
        assert whole
        assert stream.whole
        assert events(begun + body)[-1] == events(stream.body)[-1] == "[DONE]"
    assert stopped < ended < stopped + 2.5
    assert front.exited == pytest.approx(ended, abs=0.01)
    assert front.site.lifecycle.http.tally == {Outcome.FINISHED: 2}


async def test_an_answer_that_begins_in_the_drain_closes_its_connection(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        clients = {stream: front.http1() for stream in (True, False)}
        for stream, client in clients.items():
            await client.send("POST", CHAT, chat(4, stream=stream))
        while front.site.lifecycle.http.count < len(clients):
            await trio.lowlevel.checkpoint()
        stop(front)
        answers = {stream: await read_all(client) for stream, client in clients.items()}
    for status, headers, _, whole in answers.values():
        assert (status, headers["connection"], whole) == (200, "close", True)
    assert events(answers[True][2])[-1] == "[DONE]"


async def test_endless_streams_say_farewell_at_the_limit(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        http1, http2 = front.http1(), await front.http2()
        await http1.send("POST", CHAT, ENDLESS)
        streams = [await http2.send("POST", CHAT, ENDLESS) for _ in range(3)]
        begun = await first_words(http1)
        await trio.sleep(1)
        stopped = stop(front)
        status, _, body, whole = await read_all(http1)
        assert trio.current_time() == pytest.approx(stopped + LIMIT, abs=0.01)
        assert front.site.frontend.catalog.models()  # what routes requests ends after them
        assert (status, whole) == (0, True)  # its head was read before
        check_farewell(begun + body)
        for stream in streams:
            await stream.done.wait()
            assert (stream.status, stream.whole) == (200, True)
            check_farewell(stream.body)
    assert front.exited == pytest.approx(stopped + LIMIT, abs=0.01)
    assert front.site.lifecycle.http.tally == {Outcome.CUT: 4}


async def test_a_unary_request_is_told_by_its_status(site: Site, autojump_clock: MockClock) -> None:
    async with site() as front:
        http1, http2 = front.http1(), await front.http2()
        await http1.send("POST", CHAT, chat(90_000, stream=False))
        stream = await http2.send("POST", CHAT, chat(90_000, stream=False))
        await trio.sleep(0.5)
        stopped = stop(front)
        status, headers, body, whole = await read_all(http1)
        await stream.done.wait()
        assert whole
        assert stream.whole
        for code, fields, said in (
            (status, headers, body),
            (stream.status, stream.headers, stream.body),
        ):
            assert (code, json.loads(said)["error"]["code"]) == (503, "cut")
            assert fields["x-dynamo-reason"] == "cut"
        assert headers["connection"] == "close"
    assert front.exited == pytest.approx(stopped + LIMIT, abs=0.01)
    assert front.site.lifecycle.http.tally == {Outcome.CUT: 2}


async def test_a_prompt_that_is_still_being_tokenised_is_cut_like_any_other(
    site: Site, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    async with site() as front:
        (model,) = front.site.frontend.catalog.models()
        monkeypatch.setattr(type(model.preprocessor), "chat", lambda *_: release.wait())
        client = front.http1()
        await client.send("POST", CHAT, chat(4, text="x" * (INLINE_BYTES + 1)))
        await wait_admitted(front)
        stopped = stop(front)
        status, _, body, _ = await read_all(client)
        assert (status, json.loads(body)["error"]["code"]) == (503, "cut")
        release.set()
    assert front.exited == pytest.approx(stopped + LIMIT, abs=0.01)
    assert front.site.lifecycle.http.tally == {Outcome.CUT: 1}


async def wait_admitted(front: Front) -> None:
    while not front.site.lifecycle.http.count:  # noqa: ASYNC110 - no event says it
        await trio.sleep(0.01)


# --- who takes nothing --------------------------------------------------------------------------


async def stalled_http1(front: Front) -> None:
    client = front.http1()
    await client.send("POST", CHAT, ENDLESS)


async def stalled_http2(front: Front) -> None:
    client = await front.http2(window=0)
    await client.send("POST", CHAT, ENDLESS)


async def untaken_http2(front: Front) -> None:
    """A whole answer that is there, and does not leave."""
    client = await front.http2(window=0)
    await client.send("POST", CHAT, chat(4, stream=False))


@pytest.mark.parametrize("stall", [stalled_http1, stalled_http2, untaken_http2])
async def test_a_client_that_takes_nothing_holds_nothing(
    site: Site, autojump_clock: MockClock, stall: Callable[[Front], Awaitable[None]]
) -> None:
    async with site(itl_ms=1) as front:
        await stall(front)
        await trio.sleep(2)  # by now nothing goes any more
        assert front.site.lifecycle.http.count == 1
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped + LIMIT + FAREWELL, abs=0.01)
    assert front.site.lifecycle.http.count == 0
    assert front.site.lifecycle.exit_code() == 0


async def test_an_answer_that_no_drain_waits_for_has_a_second(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        client = front.http1()
        for _ in range(8):  # more than the buffers take; all of them are begun at once
            await client.stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await trio.sleep(1)
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped + 1, abs=0.01)


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    identity = authority.identity("localhost")
    client = ssl.create_default_context(cafile=authority.file)
    return Ends(server_context(identity.cert, identity.key), client)


async def test_over_tls_streams_say_farewell_at_the_limit(
    site: Site, autojump_clock: MockClock, ends: Ends
) -> None:
    async with site(tls=ends) as front:
        http1, http2 = await front.https(), await front.http2()
        await http1.send("POST", CHAT, ENDLESS)
        stream = await http2.send("POST", CHAT, ENDLESS)
        begun = await first_words(http1)
        await trio.sleep(1)
        stopped = stop(front)
        _, _, body, whole = await read_all(http1)
        await stream.done.wait()
        assert whole
        assert stream.whole
        check_farewell(begun + body)
        check_farewell(stream.body)
    assert front.exited == pytest.approx(stopped + LIMIT, abs=0.01)


async def stalled_https(front: Front) -> None:
    await (await front.https()).send("POST", CHAT, ENDLESS)


@pytest.mark.parametrize("stall", [stalled_https, stalled_http2])
async def test_over_tls_too_who_takes_nothing_holds_nothing(
    site: Site,
    autojump_clock: MockClock,
    ends: Ends,
    stall: Callable[[Front], Awaitable[None]],
) -> None:
    async with site(tls=ends, itl_ms=1) as front:
        await stall(front)
        await trio.sleep(2)
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped + LIMIT + FAREWELL, abs=0.01)


async def test_a_handshake_holds_nothing(site: Site, autojump_clock: MockClock, ends: Ends) -> None:
    async with site(tls=ends) as front:
        await front.connect().send_all(b"\x16\x03\x01")
        await trio.sleep(0.5)
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped, abs=0.01)


# --- who is not waited for --------------------------------------------------------------------


async def fresh(front: Front) -> None:
    front.connect()


async def idle_http1(front: Front) -> None:
    assert (await front.http1().ask("GET", "/live")).status == 200


async def idle_http2(front: Front) -> None:
    stream = await (await front.http2()).send("GET", "/live")
    await stream.done.wait()
    assert stream.status == 200


async def half_a_head(front: Front) -> None:
    await front.connect().send_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")


HALF = [("host", "x"), ("content-length", "1000")]


async def half_a_body(front: Front) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    await front.connect().send_all(head)


async def half_a_body_http2(front: Front) -> None:
    await (await front.http2()).send("POST", CHAT, b"{", end=False)


async def idle_websocket(front: Front) -> None:
    socket = await front.websocket()
    assert json.loads(await socket.get_message())["type"] == "session.created"


IDLE = [fresh, idle_http1, idle_http2, half_a_head, idle_websocket]


@pytest.mark.parametrize("begin", IDLE)
async def test_nobody_else_holds_the_exit(
    site: Site, autojump_clock: MockClock, begin: Callable[[Front], Awaitable[None]]
) -> None:
    async with site() as front:
        await begin(front)
        await trio.sleep(0.5)
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped, abs=0.01)
    assert not front.server.connections


@pytest.mark.parametrize("begin", [half_a_body, half_a_body_http2])
async def test_who_takes_no_answer_to_half_a_request_holds_the_exit_for_a_moment(
    site: Site, autojump_clock: MockClock, begin: Callable[[Front], Awaitable[None]]
) -> None:
    async with site() as front:
        await begin(front)
        await trio.sleep(0.5)
        stopped = stop(front)
    assert stopped <= front.exited <= stopped + 1.01
    assert not front.server.connections


async def test_a_half_sent_request_is_answered_although_nothing_else_holds_the_exit(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        client, client2 = front.http1(), await front.http2()
        await client.stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        )
        client.parser.send(h11.Request(method="POST", target=CHAT, headers=HALF))
        stream = await client2.send("POST", CHAT, b"{", end=False)
        await trio.sleep(0.5)
        stopped = stop(front)
        status, headers, body, whole = await read_all(client)
        assert (status, json.loads(body)["error"]["code"], whole) == (503, "draining", True)
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        await stream.done.wait()
        assert (stream.status, stream.headers["retry-after"]) == (503, "1")
        assert json.loads(stream.body)["error"]["code"] == "draining"
        assert trio.current_time() == stopped
        await client.stream.aclose()
    assert front.exited == pytest.approx(stopped, abs=0.01)


async def test_a_half_sent_request_is_refused_while_its_client_can_go_elsewhere(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site() as front:
        client, running = front.http1(), front.http1()
        await running.send("POST", CHAT, ENDLESS)
        await client.stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        )
        client.parser.send(h11.Request(method="POST", target=CHAT, headers=HALF))
        await first_words(running)
        stopped = stop(front)
        status, headers, body, whole = await read_all(client)
        assert trio.current_time() == stopped
        assert (status, json.loads(body)["error"]["code"], whole) == (503, "draining", True)
        assert headers["retry-after"] == "1"
        assert front.site.lifecycle.http.count == 1


# --- who comes during the drain --------------------------------------------------------------

NEW = [
    ("POST", CHAT, chat(4)),
    ("POST", "/v1/completions", b'{"model": "sim", "prompt": "x"}'),
    ("GET", "/v1/models", b""),
    ("GET", "/v1/models/sim", b""),
    ("GET", "/v1/realtime", b""),
    ("POST", "/v1/embeddings", b"{}"),
    ("GET", "/v1/whatever", b""),
    ("GET", "/v1", b""),
]


@pytest.mark.parametrize(("method", "path", "body"), NEW)
async def test_every_new_request_is_refused(
    site: Site, autojump_clock: MockClock, method: str, path: str, body: bytes
) -> None:
    async with site() as front:
        running, http1, http2 = front.http1(), front.http1(), await front.http2()
        await running.send("POST", CHAT, ENDLESS)
        await first_words(running)
        stop(front)
        await http1.send(method, path, body)
        status, headers, said, whole = await read_all(http1)
        assert (status, json.loads(said)["error"]["code"], whole) == (503, "draining", True)
        assert (headers["retry-after"], headers["x-dynamo-reason"]) == ("1", "draining")
        assert headers["connection"] == "close"
        stream = await http2.send(method, path, body)
        await stream.done.wait()
        assert (stream.status, stream.headers["retry-after"]) == (503, "1")
        assert json.loads(stream.body)["error"]["code"] == "draining"
        assert front.site.lifecycle.http.count == 1


UPGRADE = {
    "connection": "upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


async def test_the_upgrade_is_refused(site: Site, autojump_clock: MockClock) -> None:
    async with site() as front:
        running, late = front.http1(), front.http1()
        await running.send("POST", CHAT, ENDLESS)
        await first_words(running)
        stop(front)
        await late.send("GET", "/v1/realtime?model=sim", b"", **UPGRADE)
        status, headers, said, whole = await read_all(late)
        assert (status, json.loads(said)["error"]["code"], whole) == (503, "draining", True)
        assert (headers["retry-after"], headers["x-dynamo-reason"]) == ("1", "draining")
        assert headers["content-type"] == "application/json"


async def poll(front: Front, path: str, seen: list[tuple[int, Any]]) -> None:
    """Ask every 50 ms, on one connection, until it is closed."""
    client = front.http1()
    while True:
        try:
            answer = await client.ask("GET", path)
        except Exception:
            return
        seen.append((answer.status, answer.body))
        await trio.sleep(0.05)


async def test_probes_are_answered_from_the_first_instant_to_the_last(
    site: Site, autojump_clock: MockClock
) -> None:
    health: list[tuple[int, Any]] = []
    live: list[tuple[int, Any]] = []
    async with site() as front:
        running = front.http1()
        await running.send("POST", CHAT, ENDLESS)
        front.clients.start_soon(poll, front, "/health", health)
        front.clients.start_soon(poll, front, "/live", live)
        await first_words(running)
        await trio.sleep(1)
        before = len(health)
        assert {status for status, _ in health} == {200}
        stopped = stop(front)
        assert (await front.http1().ask("GET", "/health")).status == 503
    assert {status for status, _ in health[before:]} == {503}
    stages = [json.loads(body)["stage"] for _, body in health[before:]]
    assert stages[0] == "draining"
    assert {status for status, _ in live} == {200}
    polls = (front.exited - stopped) / 0.05
    assert len(health) - before == pytest.approx(polls, abs=2)
    assert len(live) == pytest.approx(len(health), abs=2)


# --- hurried, and watched ----------------------------------------------------------------------


async def test_an_escalation_cuts_now(site: Site, autojump_clock: MockClock) -> None:
    async with site(itl_ms=1) as front:
        http1, stalled, http2 = front.http1(), front.http1(), await front.http2(window=0)
        await stalled.send("POST", CHAT, ENDLESS)
        await http2.send("POST", CHAT, ENDLESS)
        await trio.sleep(2)
        await http1.send("POST", CHAT, ENDLESS)
        begun = await first_words(http1)
        stop(front)
        front.clients.start_soon(_escalate_after, front, 0.5)
        _, _, body, whole = await read_all(http1)
        escalated = trio.current_time()
        assert whole
        check_farewell(begun + body)
    assert front.exited <= escalated + 1.01
    assert front.site.lifecycle.http.count == 0
    assert front.site.lifecycle.exit_code() == 0


async def _escalate_after(front: Front, seconds: float) -> None:
    await trio.sleep(seconds)
    front.site.lifecycle.escalate("SIGINT")


async def scrape(front: Front) -> dict[str, float]:
    text = (await front.http1().ask("GET", "/metrics")).body.decode()
    return {
        " ".join(
            [sample.name.removeprefix("dynamo_frontend_shutdown_"), *sample.labels.values()]
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("dynamo_frontend_shutdown_")
    }


async def test_prometheus_sees_the_whole_stop(site: Site, autojump_clock: MockClock) -> None:
    async with site() as front:
        running = front.http1()
        await running.send("POST", CHAT, ENDLESS)
        await first_words(running)
        assert await scrape(front) == {"remaining_seconds": float("inf"), "inflight_requests": 1}
        stop(front)
        for second in range(5):
            assert await scrape(front) == {
                "remaining_seconds": pytest.approx(LIMIT - second, abs=0.01),
                "inflight_requests": 1,
                "stage_seconds skipped router_grace": 0,
            }
            await trio.sleep(1)
    # Behind the block nothing is served any more: what the series were at the end.
    value = front.site.frontend.metrics.registry.get_sample_value
    in_flight = {"stage": "in_flight", "reason": "timed_out"}
    spent = value("dynamo_frontend_shutdown_stage_seconds", in_flight)
    assert spent == pytest.approx(LIMIT, abs=0.01)
    assert value("dynamo_frontend_shutdown_inflight_requests") == 0


# --- WebSockets ---------------------------------------------------------------------------------


async def collect(socket: trio_websocket.WebSocketConnection) -> AsyncIterator[Any]:
    """Every event, and then the code of the Close frame."""
    try:
        while True:
            yield json.loads(await socket.get_message())
    except trio_websocket.ConnectionClosed as closed:
        yield closed.reason.code if closed.reason is not None else None


async def test_a_busy_websocket_has_until_the_limit(site: Site, autojump_clock: MockClock) -> None:
    async with site() as front:
        socket = await front.websocket("/v1/realtime?model=sim")
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Why?"}],
        }
        await socket.send_message(json.dumps({"type": "conversation.item.create", "item": item}))
        response = {"max_output_tokens": 4096}
        await socket.send_message(json.dumps({"type": "response.create", "response": response}))
        await trio.sleep(1)
        stopped = stop(front)
        seen = [event async for event in collect(socket)]
        closed = trio.current_time()
    assert closed == pytest.approx(stopped + LIMIT, abs=0.01)
    assert seen[-1] == 1012
    kinds = [event["type"] for event in seen[:-1]]
    assert kinds[0] == "session.created"
    assert "response.done" in kinds
    assert front.exited == pytest.approx(stopped + LIMIT, abs=0.05)


async def test_a_websocket_that_takes_nothing_holds_nothing(
    site: Site, autojump_clock: MockClock
) -> None:
    async with site(itl_ms=1) as front:
        socket = await front.websocket("/v1/realtime?model=sim")
        for text in ("Why?", "And then?"):
            content = [{"type": "input_text", "text": text}]
            item = {"type": "message", "role": "user", "content": content}
            create = {"type": "conversation.item.create", "item": item}
            await socket.send_message(json.dumps(create))
        await socket.send_message(json.dumps({"type": "response.create"}))
        # trio_websocket holds one message of each kind for whoever reads them, and then stops.
        await trio.sleep(2)
        stopped = stop(front)
    assert front.exited == pytest.approx(stopped + LIMIT + FAREWELL, abs=0.01)
