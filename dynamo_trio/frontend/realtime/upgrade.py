"""The WebSocket upgrade: refused in HTTP like any other request, or the way into a session."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from dynamo_trio.config.checks import REALTIME
from dynamo_trio.errors import Draining, DynamoException, InvalidArgument, RouteNotFound, Unknown
from dynamo_trio.frontend.access import check_upgrade
from dynamo_trio.frontend.realtime.session import Session
from dynamo_trio.frontend.realtime.socket import RESTART, RealtimeSocket
from dynamo_trio.frontend.refusals import Attempt, required_headers
from dynamo_trio.frontend.state import clients_request_id
from dynamo_trio.frontend.trace import session_span
from dynamo_trio.http.websocket import watched
from dynamo_trio.wire.openai.response import error_body, error_headers

if TYPE_CHECKING:
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.http.asgi import Receive, Scope, Send

#: What OpenAI's browser clients offer, beside what carries their key.
SUBPROTOCOL = "realtime"


async def serve_upgrade(frontend: Frontend, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one WebSocket to its end, or refuse it."""
    session_id = f"sess_{secrets.token_hex(8)}"
    known_as = clients_request_id(scope) or session_id
    try:
        model = _admissible(frontend, scope)
        with (
            session_span(scope, known_as),
            frontend.lifecycle.http.admit(f"connection of {session_id}") as admission,
            watched(scope, frontend.frames) as watch,
        ):
            socket = RealtimeSocket(scope, receive, send, frontend.limits, watch)
            offered = scope.get("subprotocols") or ()
            headers = [(b"x-request-id", known_as.encode())]
            await socket.accept(headers, SUBPROTOCOL if SUBPROTOCOL in offered else None)
            await Session(session_id, frontend, socket, admission).run(model)
    except DynamoException as exc:
        await refuse(frontend, scope, send, exc, known_as)


def _admissible(frontend: Frontend, scope: Scope) -> ServedModel | None:
    """The model that the URL names (as OpenAI's SDK does), if it names one.

    Raises:
        DynamoException: the upgrade is to be refused with this.
    """
    check_upgrade(frontend, scope)
    if scope["path"] != REALTIME:
        raise RouteNotFound(f"There is no WebSocket at {scope['path'][:200]}.")
    try:
        query = parse_qs(scope["query_string"].decode(), strict_parsing=False, max_num_fields=32)
    except ValueError:
        raise InvalidArgument("The query string cannot be read.") from None
    names = query.get("model", [])
    return frontend.find(names[0]) if names else None


async def refuse(
    frontend: Frontend, scope: Scope, send: Send, exc: DynamoException, known_as: str
) -> None:
    """Answer the upgrade with an HTTP error; where the server cannot, with a Close code."""
    frontend.refusals.note(Attempt(f"WebSocket {scope['path'][:200]}"), exc)
    if "websocket.http.response" not in scope.get("extensions", {}):
        code = RESTART if isinstance(exc, Draining) else 1011 if isinstance(exc, Unknown) else 1008
        await send({"type": "websocket.close", "code": code})
        return
    body = error_body(exc)
    headers = [
        *(*error_headers(exc), *required_headers(exc, scope)),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", known_as.encode()),
    ]
    if scope["http_version"] in ("1.0", "1.1"):  # servers give up such a connection, and so do ours
        headers.append((b"connection", b"close"))
    start = {"type": "websocket.http.response.start", "headers": headers, "status": exc.status}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})
