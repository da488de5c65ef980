"""Who is let in: what is judged of a request by its head alone.

In this order: a process that drains refuses what is new, then a request without a key learns
nothing more, not even which paths there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import ConnectionsFull, Draining, TooManyHeaders
from dynamo_trio.http.exchange import exchange_of

if TYPE_CHECKING:
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.http.asgi import Scope

#: Header fields of one request. Browsers and SDKs send thirty at most; the server bounds the
#: bytes of all of them.
MAX_HEADERS = 200


def check_call(frontend: Frontend, scope: Scope) -> None:
    """Refuse an HTTP request that may not come in.

    Raises:
        TooManyHeaders, Draining, ConnectionsFull, OriginNotAllowed, InvalidApiKey: that is why.
    """
    _check_headers(scope)
    path = scope["path"]
    if frontend.paths.is_probe(path):
        return
    if frontend.draining and frontend.paths.is_api(path):
        raise draining()
    _check_room(scope)
    frontend.cors.check(scope)
    _check_key(frontend, scope)


def check_upgrade(frontend: Frontend, scope: Scope) -> None:
    """Refuse a WebSocket that may not come in.

    Raises:
        TooManyHeaders, Draining, ConnectionsFull, OriginNotAllowed, InvalidApiKey: that is why.
    """
    _check_headers(scope)
    if frontend.draining:
        raise draining()
    _check_room(scope)
    frontend.cors.check(scope)
    _check_key(frontend, scope)


def draining() -> Draining:
    """What a process that stops says to all that is new."""
    return Draining("The server is shutting down and takes no new requests.")


def _check_headers(scope: Scope) -> None:
    if len(scope["headers"]) > MAX_HEADERS:
        raise TooManyHeaders(f"A request may have at most {MAX_HEADERS} header fields.")


def _check_room(scope: Scope) -> None:
    exchange = exchange_of(scope)
    if exchange is not None and exchange.connection.reserve:
        raise ConnectionsFull("The server has as many connections as it takes.")


def _check_key(frontend: Frontend, scope: Scope) -> None:
    if frontend.keys is not None:
        frontend.keys.check(scope)
