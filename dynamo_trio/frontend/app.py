"""The frontend as an ASGI application: routes, rejections and the error edge.

It is plain ASGI and runs under any server; under our own it also gets early word of
clients that leave, and the raw socket for streamed bodies.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import (
    Cancelled,
    DynamoException,
    Overloaded,
    Unknown,
    forget_frames,
)
from dynamo_trio.frontend.access import check_call
from dynamo_trio.frontend.cors import with_headers
from dynamo_trio.frontend.metrics import error_type
from dynamo_trio.frontend.realtime.upgrade import serve_upgrade
from dynamo_trio.frontend.refusals import required_headers
from dynamo_trio.frontend.routes import Routes
from dynamo_trio.frontend.state import Frontend, HttpCall
from dynamo_trio.frontend.trace import note_refusal
from dynamo_trio.http.respond import send_empty, send_json
from dynamo_trio.wire.openai.response import error_body, error_headers, public_error

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Headers, Receive, Scope, Send

logger = logging.getLogger("dynamo_trio.frontend")


@attrs.frozen(eq=False)
class App:
    """The ASGI application of one frontend."""

    frontend: Frontend
    routes: Routes = attrs.field(init=False)

    @routes.default
    def _routes_default(self) -> Routes:
        return Routes(self.frontend.paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                with self.frontend.calls.inside():
                    await self._http(scope, receive, send)
            case "websocket":
                with self.frontend.calls.inside():
                    await self._websocket(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)

    # --- HTTP -----------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if headers := self.frontend.cors.headers(scope):
            send = with_headers(send, headers)
        call = HttpCall.of(scope, receive, send, endpoint=self.routes.label(scope["path"]))
        call.enter()
        try:
            if not (self.frontend.cors.origins and await self._preflight(call)):
                check_call(self.frontend, scope)
                await self.routes.find(scope["method"], scope["path"])(self.frontend, call)
        except DynamoException as exc:
            call.span.fail(exc.reason)
            if not call.attempt.admitted:
                self.frontend.refusals.note(call.attempt, exc)
                note_refusal(call.span, call.attempt, error_type(exc))
            if not isinstance(exc, Cancelled):  # nobody is there to be answered
                await self._answer_error(call, exc)
            forget_frames(exc)
        except Exception:
            logger.exception("%s failed", call.attempt.name)
            call.span.fail("internal")
            await self._answer_error(call, Unknown("Internal server error."))
        finally:
            call.span.end()

    async def _preflight(self, call: HttpCall) -> bool:
        """Answer a browser that asks whether it may ask. Returns False if this is another one."""
        methods = self.routes.methods(call.scope["path"]) or {}
        headers = self.frontend.cors.preflight(call.scope, methods)
        if headers is None:
            return False
        await send_empty(call.scope, call.send, 204, [*headers, *call.response_headers()])
        return True

    async def _answer_error(self, call: HttpCall, exc: DynamoException) -> None:
        error = public_error(exc)
        status = self.frontend.overload_status if isinstance(error, Overloaded) else error.status
        await send_json(
            call.scope,
            call.send,
            status,
            error_body(error),
            [
                *_without_type(error_headers(error)),
                *required_headers(error, call.scope),
                *call.response_headers(),
            ],
            close=self.frontend.draining,
            limits=self.frontend.limits,
        )

    # --- WebSocket ------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_upgrade(self.frontend, scope, receive, send)


def _without_type(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name != b"content-type"]


async def _lifespan(receive: Receive, send: Send) -> None:
    """A server may announce its start and end; our own lifecycle does not depend on it."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
