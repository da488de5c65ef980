"""The status server of a worker: probes, metrics, drain, the model's files, and engine routes.

It is plain ASGI, to be served by :func:`dynamo_trio.http.server.serve_http`. What it tells of
the process is :mod:`dynamo_trio.worker.status`, and :mod:`dynamo_trio.worker.drain_api`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import msgspec

from dynamo_trio.errors import Cancelled, DynamoException, FileUnusable, InvalidArgument
from dynamo_trio.http.limits import MIB, HttpLimits
from dynamo_trio.http.respond import read_body
from dynamo_trio.worker.drain_api import DrainApi
from dynamo_trio.worker.status_request import Handler, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.worker.status import WorkerStatus

logger = logging.getLogger("dynamo_trio.worker")

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OCTETS = b"application/octet-stream"
#: Whoever asks here asks for little and takes it at once; a probe must always find room, and
#: a stop ends all of them one by one.
LIMITS = HttpLimits(
    max_connections=256,
    head_time=5.0,
    body_bytes=16 * MIB,  # of what an engine route takes
    idle_time=40.0,
    write_time=5.0,
    stall_time=1.0,
    h2_streams=16,
)
_ENGINE = "/engine/"
_FILES = "/v1/metadata/"


@attrs.frozen(eq=False)
class StatusApp:
    """The ASGI application of one worker's status server."""

    status: WorkerStatus
    health_path: str = "/health"  # DYN_SYSTEM_HEALTH_PATH
    live_path: str = "/live"  # DYN_SYSTEM_LIVE_PATH
    drain: DrainApi = attrs.field(kw_only=True)
    limits: HttpLimits = LIMITS

    @drain.default
    def _drain_default(self) -> DrainApi:
        return DrainApi(self.status)

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
            elif not (handlers := self._find(path)):
                await request.fail(404, "Route not found", f"Route {path[:200]} not found")
            elif (handler := handlers.get("GET" if method == "HEAD" else method)) is None:
                await _refuse_method(request, handlers)
            else:
                await handler(request)
        except Cancelled:
            return  # the client has left
        except Exception:
            logger.exception("%s %s failed", method, path)
            await request.fail(500, "Internal error", "the status server failed")

    def _find(self, path: str) -> Mapping[str, Handler]:
        """Method -> handler; empty where there is nothing."""
        if path.startswith(_FILES):
            return {"GET": self._file}
        reads = {
            "/metrics": self._metrics,
            "/metadata": self._metadata,
            # Last: a path that an operator has chosen wins.
            self.health_path: self._health,
            self.live_path: self._live,
        }
        return {"GET": reads[path]} if path in reads else self.drain.routes.get(path, {})

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


async def _refuse_method(request: Request, handlers: Mapping[str, Handler]) -> None:
    allowed = [name for method in handlers for name in _with_head(method)]
    path, method = request.scope["path"], request.scope["method"]
    message = f"{path[:200]} takes {' and '.join(handlers)}, not {method}"
    allow = ", ".join(allowed).encode()
    await request.fail(405, "Method not allowed", message, allow=allow)


def _with_head(method: str) -> tuple[str, ...]:
    return ("GET", "HEAD") if method == "GET" else (method,)


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
