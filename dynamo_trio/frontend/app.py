"""The frontend as an ASGI application: routes, rejections and the error edge.

It is plain ASGI and runs under any server; under our own it also gets early word of
clients that leave, and the raw socket for streamed bodies.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import attrs

from dynamo_trio.console.logs import request_id
from dynamo_trio.errors import (
    Cancelled,
    Draining,
    DynamoException,
    MethodNotAllowed,
    NoWorker,
    Overloaded,
    RouteNotFound,
    Unknown,
)
from dynamo_trio.frontend import metrics
from dynamo_trio.frontend.catalog import Catalog, ServedModel
from dynamo_trio.frontend.generate import Kind, generate
from dynamo_trio.frontend.health import LIVE, Stage, health
from dynamo_trio.frontend.http_limits import HttpLimits
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.respond import send_bytes, send_json
from dynamo_trio.lifecycle import Lifecycle, Phase
from dynamo_trio.wire.openai_response import (
    ModelEntry,
    error_body,
    error_headers,
    model_entry,
    models_list,
    public_error,
)

if TYPE_CHECKING:
    from dynamo_trio.frontend.asgi import Headers, Receive, Scope, Send

logger = logging.getLogger("dynamo_trio.frontend")

#: A client's own request id is taken over if it is harmless in a header and in a log line.
_REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")

Route = Callable[["Frontend", "Exchange"], Awaitable[None]]


@attrs.frozen(eq=False)
class Exchange:
    """One HTTP request as a route sees it."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str

    def response_headers(self) -> Headers:
        """What every answer carries."""
        return [(b"x-request-id", self.request_id.encode())]


@attrs.define(eq=False)
class Frontend:
    """An OpenAI-compatible frontend over the models of a catalogue."""

    lifecycle: Lifecycle
    catalog: Catalog = attrs.field(factory=Catalog)
    metrics: FrontendMetrics = attrs.field(factory=FrontendMetrics)
    limits: HttpLimits = attrs.field(factory=HttpLimits)
    overload_status: int = 529  # DYN_HTTP_OVERLOAD_STATUS_CODE
    #: Set by the program once it wants traffic.
    ready: bool = False

    @property
    def draining(self) -> bool:
        """Are new requests refused?"""
        return not self.lifecycle.http.is_open

    @property
    def stage(self) -> Stage:
        """For ``/health``."""
        if self.lifecycle.phase >= Phase.STOPPING:
            return "stopping"
        if self.draining:
            return "draining"
        return "ready" if self.ready else "starting"

    def find(self, model: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: it was never here.
            NoWorker: nobody serves it now, or this process is still starting.
        """
        if not self.ready:
            raise NoWorker("The server is starting; no model is loaded yet.")
        return self.catalog.find(model)

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
        exchange = Exchange(scope, receive, send, _request_id(scope))
        request_id.set(exchange.request_id)  # for every log line of this request's tasks
        try:
            await self._route(scope)(self, exchange)
        except Cancelled:
            return  # nobody is there to be answered
        except DynamoException as exc:
            await self._answer_error(exchange, exc)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await self._answer_error(exchange, Unknown("Internal server error."))

    def _route(self, scope: Scope) -> Route:
        path, method = scope["path"], scope["method"]
        if self.draining and (path == "/v1" or path.startswith("/v1/")):
            raise Draining("The server is shutting down and takes no new requests.")
        methods = _find(path)
        if methods is None:
            raise RouteNotFound(f"There is no {method} {path} here.")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{path} takes {', '.join(methods)}, not {method}.")
        return route

    async def _answer_error(self, exchange: Exchange, exc: DynamoException) -> None:
        error = public_error(exc)
        status = self.overload_status if isinstance(error, Overloaded) else error.status
        await send_json(
            exchange.scope,
            exchange.send,
            status,
            error_body(error),
            [*_without_type(error_headers(error)), *exchange.response_headers()],
            close=self.draining,
            limits=self.limits,
        )

    # --- WebSocket ------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """There is no WebSocket endpoint yet; the upgrade is refused like any other request."""
        del receive
        error: DynamoException = RouteNotFound(f"There is no WebSocket at {scope['path']}.")
        if self.draining:
            error = Draining("The server is shutting down and takes no new requests.")
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1012 if self.draining else 1008})
            return
        body = error_body(error)
        headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
        start = {"type": "websocket.http.response.start", "headers": headers}
        await send({**start, "status": error.status})
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return str(uuid.uuid4())


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


async def _health(frontend: Frontend, exchange: Exchange) -> None:
    instances = [
        instance for model in frontend.catalog.models() for instance in model.client.instances()
    ]
    status, body = health(frontend.stage, instances)
    await send_json(exchange.scope, exchange.send, status, body, limits=frontend.limits)


async def _live(frontend: Frontend, exchange: Exchange) -> None:
    await send_json(exchange.scope, exchange.send, 200, LIVE, limits=frontend.limits)


async def _metrics(frontend: Frontend, exchange: Exchange) -> None:
    text = frontend.metrics.exposition()
    await send_bytes(exchange.scope, exchange.send, 200, text, metrics.CONTENT_TYPE)


async def _models(frontend: Frontend, exchange: Exchange) -> None:
    body = models_list([_entry(model) for model in frontend.catalog.models()])
    headers = exchange.response_headers()
    await send_json(exchange.scope, exchange.send, 200, body, headers, limits=frontend.limits)


async def _model(frontend: Frontend, exchange: Exchange) -> None:
    name = unquote(exchange.scope["path"].removeprefix(_MODEL_PREFIX))
    body = model_entry(_entry(frontend.find(name)))
    headers = exchange.response_headers()
    await send_json(exchange.scope, exchange.send, 200, body, headers, limits=frontend.limits)


def _entry(model: ServedModel) -> ModelEntry:
    return ModelEntry(model.name, model.created, model.context_length or None)


_MODEL_PREFIX = "/v1/models/"

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
