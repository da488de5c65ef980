"""An app with a few routes; each does one thing that a real one does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import PayloadTooLarge
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, send_json, stream_response, watch_disconnect
from dynamo_trio.http.sinks import SinkOutcome, open_sink
from dynamo_trio.lifecycle.admission import Admission, CutReason, Gate

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.http.sinks import BodySink
    from tests.http.harness import Running


LIMITS = HttpLimits(body_bytes=300_000, linger_time=2, write_time=20)


@attrs.define(eq=False)
class App:
    """A few routes; each does one thing that a real one does."""

    gate: Gate = attrs.field(factory=lambda: Gate("http"))
    left: list[str] = attrs.field(factory=list)
    streams: list[BodySink] = attrs.field(factory=list)
    outcomes: list[SinkOutcome | None] = attrs.field(factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/echo":
                await send_json(scope, send, 200, await read_body(scope, receive, LIMITS))
            case "/early":
                await send_json(scope, send, 503, b'"early"')
            case "/early-close":
                await send_json(scope, send, 503, b'"early"', close=True)
            case "/big":
                await self.big(scope, receive, send)
            case "/wait":
                await self.wait(scope, receive, send)
            case "/stream":
                await self.stream(scope, receive, send)
            case "/raise":
                raise RuntimeError("a handler that raises")
            case "/raise-late":
                await self.raise_late(send)
            case "/raise-in-nursery":
                await self.raise_in_nursery()
            case _:
                await send_json(scope, send, 200, b'"hello"')

    async def big(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_body(scope, receive, LIMITS)
        except PayloadTooLarge as exc:
            await send_json(scope, send, exc.status, exc.message.encode())

    async def wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        with self.gate.admit(scope["path"]) as admission:
            cut = partial(admission.cut, CutReason.CLIENT_LEFT)
            async with watch_disconnect(scope, receive, cut):
                with admission.scope:
                    await trio.sleep_forever()
            self.left.append(str(admission.reason))
            await send_json(scope, send, 503, b'"cut"')

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        sink = open_sink(scope, send)
        self.streams.append(sink)

        async def work() -> None:
            await sink.start(200, [(b"content-type", b"text/event-stream")])
            await sink.serve()

        with self.gate.admit(scope["path"]) as admission:
            cut = partial(admission.cut, CutReason.CLIENT_LEFT)
            async with watch_disconnect(scope, receive, cut):
                farewell = partial(farewell_to, admission)
                self.outcomes.append(
                    await stream_response(sink, admission, work, farewell=farewell)
                )

    async def raise_late(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a handler that raises in the middle")

    async def raise_in_nursery(self) -> None:
        async def fail() -> None:
            raise RuntimeError("a handler that raises in a nursery")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)


def farewell_to(admission: Admission) -> bytes | None:
    return None if admission.reason is CutReason.CLIENT_LEFT else b"bye"


async def finish_stream(server: Running, data: bytes = b"data") -> None:
    app = server.server.app
    assert isinstance(app, App)
    await server.wait_until(lambda: bool(app.streams) and app.streams[-1].started)
    sink = app.streams.pop()
    sink.feed(data)
    sink.finish(SinkOutcome.STOP)
