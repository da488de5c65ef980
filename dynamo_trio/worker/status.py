"""The status server of a worker: probes, metrics, the model's files, and engine routes.

``/live`` asks only whether the event loop turns: 200 from the moment at which the port opens
until the process ends. ``/health`` asks whether to send requests here: 503 while the engine
loads and from the first instant of a stop. (In Dynamo 1.5.1 both are the same, and the port
closes when a stop begins; bodies have its fields, and a stage besides.)

It is plain ASGI, to be served by :func:`dynamo_trio.http.server.serve_http`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import attrs
import msgspec

from dynamo_trio.errors import Cancelled, DynamoException, FileUnusable, InvalidArgument
from dynamo_trio.http.limits import MIB, HttpLimits
from dynamo_trio.http.respond import read_body, send_bytes, send_json
from dynamo_trio.lifecycle import Lifecycle, Phase
from dynamo_trio.worker.card_server import CardServer

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.runtime import DistributedRuntime, EngineRoute

logger = logging.getLogger("dynamo_trio.worker")

Stage = Literal["loading", "ready", "grace", "draining", "stopping", "drained"]

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OCTETS = b"application/octet-stream"
_ENGINE = "/engine/"
_FILES = "/v1/metadata/"
_READS = ("GET", "HEAD")

_STAGES: dict[Phase, Stage] = {
    Phase.SERVING: "grace",  # a stop has been requested this very moment
    Phase.GRACE: "grace",
    Phase.DRAINING: "draining",
    Phase.STOPPING: "stopping",
    Phase.STOPPED: "drained",
}


@attrs.define(eq=False)
class WorkerStatus:
    """What a process with endpoints tells about itself; its runtime is attached once it is open."""

    lifecycle: Lifecycle
    #: None until it is open: then there are no endpoints, metrics and engine routes yet.
    runtime: DistributedRuntime | None = None
    cards: CardServer = attrs.field(factory=CardServer)
    #: Where other machines reach the status server; None: it has no port.
    url: str | None = None
    #: When the process began, by time.monotonic().
    began: float = attrs.field(factory=time.monotonic)

    def attach(self, runtime: DistributedRuntime) -> None:
        """The runtime is open; called once."""
        self.runtime = runtime
        runtime.status_url = self.url
        runtime.offer_card = self.cards.offer
        runtime.metrics.began = self.began

    @property
    def stage(self) -> Stage:
        """For ``/health``."""
        if self.lifecycle.stopping:
            return _STAGES[self.lifecycle.phase]
        return "ready" if self.ready else "loading"

    @property
    def ready(self) -> bool:
        """Is an endpoint served that others could find? It may have left discovery since."""
        return self.runtime is not None and self.runtime.was_found and bool(self.endpoints())

    def endpoints(self) -> dict[str, bool]:
        """Name of each endpoint -> does it want requests?"""
        return {} if self.runtime is None else self.runtime.endpoint_states()

    def engine_route(self, name: str) -> EngineRoute | None:
        """The callback registered as ``name``."""
        return None if self.runtime is None else self.runtime.engine_routes.get(name)

    def health(self) -> tuple[int, bytes]:
        """HTTP status and JSON body of ``/health``."""
        endpoints = self.endpoints()
        ready = self.stage == "ready" and all(endpoints.values())
        return (200 if ready else 503), self._body("ready" if ready else "notready", endpoints)

    def live(self) -> bytes:
        """JSON body of ``/live``."""
        return self._body("live", self.endpoints())

    def _body(self, status: str, endpoints: dict[str, bool]) -> bytes:
        age = time.monotonic_ns() - round(self.began * 1e9)
        body = {
            "status": status,
            "stage": self.stage,
            "uptime": {"secs": age // 10**9, "nanos": age % 10**9},
            "endpoints": {name: _word(ready) for name, ready in endpoints.items()},
        }
        return msgspec.json.encode(body)


def _word(ready: bool) -> str:
    return "ready" if ready else "notready"


Handler = Callable[["Request"], Awaitable[None]]


@attrs.frozen(eq=False)
class Request:
    """One HTTP request and the ways to answer it."""

    scope: Scope
    receive: Receive
    send: Send
    limits: HttpLimits

    async def json(self, status: int, body: bytes, *, allow: bytes = b"") -> None:
        """Answer with a whole JSON body."""
        headers = [(b"allow", allow)] if allow else []
        await send_json(self.scope, self.send, status, body, headers, limits=self.limits)

    async def fail(self, status: int, error: str, message: str, *, allow: bytes = b"") -> None:
        """Answer with an error, in the form that Dynamo's engine routes give it."""
        body = msgspec.json.encode({"error": error, "message": message})
        await self.json(status, body, allow=allow)

    async def bytes(self, body: bytes, content_type: bytes) -> None:
        """Answer 200 with a whole body."""
        await send_bytes(self.scope, self.send, 200, body, content_type, limits=self.limits)


@attrs.frozen(eq=False)
class StatusApp:
    """The ASGI application of one worker's status server."""

    status: WorkerStatus
    health_path: str = "/health"  # DYN_SYSTEM_HEALTH_PATH
    live_path: str = "/live"  # DYN_SYSTEM_LIVE_PATH
    #: Also bounds the body that an engine route takes.
    limits: HttpLimits = attrs.field(factory=lambda: HttpLimits(body_bytes=16 * MIB))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._answer(Request(scope, receive, send, self.limits))

    async def _answer(self, request: Request) -> None:
        path, method = request.scope["path"], request.scope["method"]
        try:
            if path.startswith(_ENGINE) and path != _ENGINE:
                await self._engine(request, path.removeprefix(_ENGINE))
            elif (handler := self._find(path)) is None:
                await request.fail(404, "Route not found", f"Route {path[:200]} not found")
            elif method not in _READS:
                message = f"{path[:200]} takes GET, not {method}"
                await request.fail(405, "Method not allowed", message, allow=b"GET, HEAD")
            else:
                await handler(request)
        except Cancelled:
            return  # the client has left
        except Exception:
            logger.exception("%s %s failed", method, path)
            await request.fail(500, "Internal error", "the status server failed")

    def _find(self, path: str) -> Handler | None:
        if path.startswith(_FILES):
            return self._file
        handlers = {
            "/metrics": self._metrics,
            "/metadata": self._metadata,
            # Last: a path that an operator has chosen wins.
            self.health_path: self._health,
            self.live_path: self._live,
        }
        return handlers.get(path)

    async def _health(self, request: Request) -> None:
        await request.json(*self.status.health())

    async def _live(self, request: Request) -> None:
        await request.json(200, self.status.live())

    async def _metrics(self, request: Request) -> None:
        runtime = self.status.runtime
        text = b"" if runtime is None else runtime.metrics.exposition()
        await request.bytes(text, METRICS_TYPE)

    async def _metadata(self, request: Request) -> None:
        """Dynamo's, for discovery by Kubernetes."""
        await request.fail(404, "Not found", "Discovery metadata not available")

    async def _file(self, request: Request) -> None:
        path = self.status.cards.find(request.scope["path"])
        if path is None:
            await request.fail(404, "Not found", "this is no file of a model card")
            return
        try:
            async with self.status.cards.content(path) as content:
                await request.bytes(content, OCTETS)
        except FileUnusable as exc:
            logger.error("a frontend wants a file of our card: %s", exc)
            await request.fail(404, "Not found", "the file cannot be read any more")

    async def _engine(self, request: Request, name: str) -> None:
        callback = self.status.engine_route(name)
        if callback is None:
            message = f"Route {_ENGINE}{name[:200]} not found"
            await request.fail(404, "Route not found", message)
            return
        try:
            body = _object(await read_body(request.scope, request.receive, self.limits))
        except Cancelled:
            raise
        except DynamoException as exc:
            error = "Invalid JSON" if exc.status == 400 else "Bad request"
            await request.fail(exc.status, error, exc.message)
            return
        try:
            answer = msgspec.json.encode(await callback(body))
        except Exception as exc:
            logger.exception("the engine route %s failed", name)
            # The callback is the operator's, and so is whoever asks: the reason is no secret.
            message = f"Python callback failed: {type(exc).__name__}: {exc}"
            await request.fail(500, "Handler error", message)
            return
        await request.json(200, answer)


def _object(body: bytes) -> dict[str, object]:
    """The request of an engine route; an empty body is an empty object.

    Raises:
        InvalidArgument: it is no JSON object.
    """
    if not body:
        return {}
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(str(exc)) from exc
    if not isinstance(value, dict):
        raise InvalidArgument("the body must be a JSON object")
    return value
