"""The frontend as an ASGI application: routes, rejections and the error edge.

It is plain ASGI and runs under any server; under our own it also gets early word of
clients that leave, and the raw socket for streamed bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.console.logs import request_id
from dynamo_trio.errors import (
    Cancelled,
    Draining,
    DynamoException,
    MethodNotAllowed,
    Overloaded,
    RouteNotFound,
    Unknown,
)
from dynamo_trio.frontend import metrics
from dynamo_trio.frontend.generate import Kind, generate
from dynamo_trio.frontend.health import LIVE, health
from dynamo_trio.frontend.state import Frontend, HttpCall
from dynamo_trio.http.respond import send_bytes, send_json
from dynamo_trio.wire.openai.response import (
    ModelEntry,
    error_body,
    error_headers,
    model_entry,
    models_list,
    public_error,
)

if TYPE_CHECKING:
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.http.asgi import Headers, Receive, Scope, Send

logger = logging.getLogger("dynamo_trio.frontend")

Route = Callable[[Frontend, HttpCall], Awaitable[None]]


@attrs.frozen(eq=False)
class App:
    """The ASGI application of one frontend."""

    frontend: Frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)

    # --- HTTP -----------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _COUNTED.get(scope["path"], "")
        call = HttpCall.of(scope, receive, send, endpoint=endpoint)
        request_id.set(call.request_id)  # for every log line of this request's tasks
        try:
            await self._route(scope)(self.frontend, call)
        except DynamoException as exc:
            if not call.attempt.admitted:
                self.frontend.refusals.note(call.attempt, exc)
            if not isinstance(exc, Cancelled):  # nobody is there to be answered
                await self._answer_error(call, exc)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await self._answer_error(call, Unknown("Internal server error."))

    def _route(self, scope: Scope) -> Route:
        path, method = scope["path"], scope["method"]
        if self.frontend.draining and (path == "/v1" or path.startswith("/v1/")):
            raise Draining("The server is shutting down and takes no new requests.")
        methods = _find(path)
        if methods is None:
            raise RouteNotFound(f"There is no {method} {path} here.")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{path} takes {', '.join(methods)}, not {method}.")
        return route

    async def _answer_error(self, call: HttpCall, exc: DynamoException) -> None:
        error = public_error(exc)
        status = self.frontend.overload_status if isinstance(error, Overloaded) else error.status
        await send_json(
            call.scope,
            call.send,
            status,
            error_body(error),
            [*_without_type(error_headers(error)), *call.response_headers()],
            close=self.frontend.draining,
            limits=self.frontend.limits,
        )

    # --- WebSocket ------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """There is no WebSocket endpoint yet; the upgrade is refused like any other request."""
        del receive
        error: DynamoException = RouteNotFound(f"There is no WebSocket at {scope['path']}.")
        if self.frontend.draining:
            error = Draining("The server is shutting down and takes no new requests.")
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send(
                {"type": "websocket.close", "code": 1012 if self.frontend.draining else 1008}
            )
            return
        body = error_body(error)
        headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
        start = {"type": "websocket.http.response.start", "headers": headers}
        await send({**start, "status": error.status})
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _without_type(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name != b"content-type"]


async def _lifespan(receive: Receive, send: Send) -> None:
    """A server may announce its start and end; our own lifecycle does not depend on it."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


# --- routes -----------------------------------------------------------------------------


async def _health(frontend: Frontend, call: HttpCall) -> None:
    instances = [
        instance for model in frontend.catalog.models() for instance in model.client.instances()
    ]
    status, body = health(frontend.stage, instances)
    await send_json(call.scope, call.send, status, body, limits=frontend.limits)


async def _live(frontend: Frontend, call: HttpCall) -> None:
    await send_json(call.scope, call.send, 200, LIVE, limits=frontend.limits)


async def _metrics(frontend: Frontend, call: HttpCall) -> None:
    text = frontend.metrics.exposition()
    await send_bytes(call.scope, call.send, 200, text, metrics.CONTENT_TYPE)


async def _models(frontend: Frontend, call: HttpCall) -> None:
    body = models_list([_entry(model) for model in frontend.catalog.models()])
    headers = call.response_headers()
    await send_json(call.scope, call.send, 200, body, headers, limits=frontend.limits)


async def _model(frontend: Frontend, call: HttpCall) -> None:
    name = call.scope["path"].removeprefix(_MODEL_PREFIX)  # ASGI has decoded it
    body = model_entry(_entry(frontend.find(name)))
    headers = call.response_headers()
    await send_json(call.scope, call.send, 200, body, headers, limits=frontend.limits)


def _entry(model: ServedModel) -> ModelEntry:
    return ModelEntry(model.name, model.created, model.context_length or None)


_MODEL_PREFIX = "/v1/models/"

#: Path -> Dynamo's metric label "endpoint".
_COUNTED = {
    "/v1/chat/completions": Kind.CHAT.label,
    "/v1/completions": Kind.COMPLETION.label,
}

_ROUTES: dict[str, dict[str, Route]] = {
    "/health": {"GET": _health},
    "/live": {"GET": _live},
    "/metrics": {"GET": _metrics},
    "/v1/models": {"GET": _models},
    "/v1/chat/completions": {"POST": partial(generate, Kind.CHAT)},
    "/v1/completions": {"POST": partial(generate, Kind.COMPLETION)},
}


def _find(path: str) -> dict[str, Route] | None:
    if path.startswith(_MODEL_PREFIX) and path != _MODEL_PREFIX:
        return {"GET": _model}
    return _ROUTES.get(path)
