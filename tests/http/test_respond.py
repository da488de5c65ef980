"""Requests read and answered, under our own server's rules and under foreign ASGI servers."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import hypercorn.config
import hypercorn.trio
import pytest
import trio
import trio.testing

from dynamo_trio.errors import Cancelled, InvalidArgument, PayloadTooLarge
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import (
    read_body,
    send_bytes,
    send_json,
    stream_response,
    watch_disconnect,
)
from dynamo_trio.http.sinks import QueueSink, SinkOutcome, open_sink
from dynamo_trio.lifecycle.admission import CutReason, Gate
from tests.http.harness import PATIENCE, Http1Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Message, Receive, Scope, Send
    from dynamo_trio.http.sinks import BodySink

LIMITS = HttpLimits(body_bytes=10, write_time=30)


def http_scope(version: str = "1.1", **headers: str) -> Scope:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "http_version": version, "headers": pairs}


def receiving(*messages: Message) -> Receive:
    left = list(messages)

    async def receive() -> Message:
        await trio.lowlevel.checkpoint()
        if not left:
            await trio.sleep_forever()
        return left.pop(0)

    return receive


def part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_is_read_to_its_end() -> None:
    receive = receiving(part(b"ab"), part(b"c"), part(b"", more=False))
    assert await read_body(http_scope(), receive, LIMITS) == b"abc"


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"x" * 6), part(b"x" * 5), part(b"", more=False)],
        [part(b"x" * 11, more=False)],
    ],
)
async def test_a_long_body_is_refused_as_soon_as_it_is_too_long(messages: list[Message]) -> None:
    with pytest.raises(PayloadTooLarge):
        await read_body(http_scope(), receiving(*messages), LIMITS)


async def test_a_body_that_is_announced_as_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(PayloadTooLarge):
        await read_body(http_scope(content_length="11"), receiving(), LIMITS)
    with pytest.raises(InvalidArgument):
        await read_body(http_scope(content_length="-1"), receiving(), LIMITS)


async def test_a_client_that_leaves_in_the_middle_of_its_body_has_cancelled() -> None:
    with pytest.raises(Cancelled):
        await read_body(http_scope(), receiving(part(b"a"), {"type": "http.disconnect"}), LIMITS)


@pytest.mark.parametrize("version", ["1.0", "1.1", "2"])
async def test_an_answer_closes_the_connection_where_that_can_be_said(version: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    extra = [(b"retry-after", b"1")]
    assert await send_json(http_scope(version), send, 503, b"{}", extra, close=True)
    start, body = sent
    assert start["status"] == 503
    assert start["headers"][:3] == [
        (b"content-type", b"application/json"),
        (b"content-length", b"2"),
        (b"retry-after", b"1"),
    ]
    assert ((b"connection", b"close") in start["headers"]) == (version != "2")
    assert body == {"type": "http.response.body", "body": b"{}", "more_body": False}


async def test_an_empty_body_and_other_types_are_answers_too() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    assert await send_bytes(http_scope(), send, 200, b"", b"text/plain")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert dict(sent[0]["headers"])[b"content-type"] == b"text/plain"


async def test_an_answer_to_nobody_is_reported() -> None:
    async def send(message: Message) -> None:
        raise OSError("the client left")

    assert not await send_json(http_scope(), send, 200, b"{}")


async def test_an_answer_that_nobody_takes_is_given_up(autojump_clock: MockClock) -> None:
    async def send(message: Message) -> None:
        await trio.sleep_forever()

    assert not await send_json(http_scope(), send, 200, b"{}", limits=LIMITS)
    assert trio.current_time() == LIMITS.write_time


async def test_the_block_under_a_watch_raises_its_own_exception(autojump_clock: MockClock) -> None:
    """Not a group: the nursery of the watch is nobody's business."""

    async def watched() -> None:
        async with watch_disconnect(http_scope(), receiving(), lambda: None):
            await trio.sleep(1)
            raise KeyError

    with pytest.raises(KeyError):
        await watched()


async def test_the_block_under_a_watch_can_be_cancelled(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1) as limit:
        async with watch_disconnect(http_scope(), receiving(), lambda: None):
            await trio.sleep_forever()
    assert limit.cancelled_caught


# --- under a foreign server ------------------------------------------------------------------


@attrs.define(eq=False)
class App:
    """Knows nothing of its server but ASGI."""

    gate: Gate = attrs.field(factory=lambda: Gate("http"))
    sinks: list[BodySink] = attrs.field(factory=list)
    outcomes: list[SinkOutcome | None] = attrs.field(factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["path"] == "/":
            body = await read_body(scope, receive, HttpLimits())
            await send_json(scope, send, 200, body or b"{}")
        else:
            await read_body(scope, receive, HttpLimits())
            await self.stream(scope, receive, send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        for _ in range(2):
            message = await receive()
            await send({"type": message["type"] + ".complete"})

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = open_sink(scope, send)
        self.sinks.append(sink)

        async def work() -> None:
            await sink.start(200, [])
            await sink.serve()

        with self.gate.admit(scope["path"]) as admission:

            def farewell() -> bytes | None:
                return None if admission.reason is CutReason.CLIENT_LEFT else b"bye"

            cut = partial(admission.cut, CutReason.CLIENT_LEFT)
            async with watch_disconnect(scope, receive, cut):
                self.outcomes.append(
                    await stream_response(sink, admission, work, farewell=farewell)
                )


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def foreign(app: App, nursery: trio.Nursery) -> AsyncIterator[int]:
    """The app under hypercorn's own ``serve``; yields the port."""
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = logging.getLogger("test.hypercorn")
    config.graceful_timeout = 0.1
    config.keep_alive_timeout = 0.1
    stop = trio.Event()
    serve = partial(hypercorn.trio.serve, cast("Any", app), config, shutdown_trigger=stop.wait)
    done = trio.Event()

    async def serve_until_stopped(*, task_status: trio.TaskStatus[list[str]]) -> None:
        await serve(task_status=task_status)
        done.set()

    binds = await nursery.start(serve_until_stopped)
    yield int(binds[0].rsplit(":", 1)[1])
    stop.set()
    with trio.fail_after(PATIENCE):
        await done.wait()


async def wait_until_started(app: App) -> BodySink:
    with trio.fail_after(PATIENCE):
        while not (app.sinks and app.sinks[-1].started):  # noqa: ASYNC110 - polled in the test
            await trio.sleep(0.001)
    return app.sinks[-1]


async def test_foreign_whole_answers_and_streams(app: App, foreign: int) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", foreign) as stream:
        client = Http1Client(stream)
        assert (await client.ask("POST", "/", b"[1]")).body == b"[1]"
        await client.send("POST", "/stream", b"{}")
        sink = await wait_until_started(app)
        assert isinstance(sink, QueueSink)
        sink.feed(b"x" * 100_000)
        sink.finish(SinkOutcome.STOP)
        assert (await client.answer()).body == b"x" * 100_000
        await app.gate.wait_idle()
        assert app.outcomes == [SinkOutcome.STOP]
        assert sink.complete


async def test_foreign_a_cut_says_farewell(app: App, foreign: int) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", foreign) as stream:
        client = Http1Client(stream)
        await client.send("POST", "/stream", b"{}")
        sink = await wait_until_started(app)
        sink.feed(b"text ")
        app.gate.cut_all(CutReason.DRAIN_LIMIT)
        assert (await client.answer()).body == b"text bye"
        await app.gate.wait_idle()
        assert app.outcomes == [SinkOutcome.CUT]


async def test_foreign_a_client_that_leaves_is_noticed(app: App, foreign: int) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", foreign) as stream:
        await Http1Client(stream).send("POST", "/stream", b"{}")
        await wait_until_started(app)
    with trio.fail_after(PATIENCE):
        await app.gate.wait_idle()
    assert app.outcomes == [SinkOutcome.GONE]
