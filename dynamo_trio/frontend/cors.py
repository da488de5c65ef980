"""Cross-origin requests: whether the scripts of other origins may call the API (CORS).

Off by default: no answer has a header of it, so a browser shows an answer to no page of
another origin. With ``DYN_TRIO_CORS_ORIGINS`` pages of those origins may. A preflight
(the Fetch standard's question before the request proper) is answered while the process drains,
too: only then the page sees the 503 itself, and when to try again.

A browser lets any page open a WebSocket anywhere, and send a POST of plain text, and CORS covers
neither: it only hides the answer. So an upgrade, or a request that does more than to read, that
names a foreign origin is refused (:meth:`Cors.check`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import OriginNotAllowed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_trio.http.asgi import Headers, Message, Scope, Send

ANY = "*"
#: Seconds for which a browser may remember the answer to a preflight.
MAX_AGE = 600
#: Headers of an answer that a page may read beyond the few that it always may.
EXPOSED = b"retry-after, x-dynamo-reason, x-request-id"
_TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(\s*,\s*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
_VARY = (b"vary", b"origin")
#: Methods that change nothing, and start nothing.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@attrs.frozen
class Cors:
    """``origins``: as browsers write them (``https://example.com``); ``*`` is every one."""

    origins: tuple[str, ...] = ()

    def headers(self, scope: Scope) -> Headers:
        """What the answer to this request carries."""
        if not self.origins:
            return []
        origin = _one(scope, b"origin")
        if origin is None or not self._allows(origin):
            return [] if ANY in self.origins else [_VARY]
        return [*self._allowed(origin), (b"access-control-expose-headers", EXPOSED)]

    def preflight(self, scope: Scope, methods: Iterable[str]) -> Headers | None:
        """The headers of the answer; None: it is no preflight.

        A page that may not ask gets an answer that does not allow it.
        """
        origin = _one(scope, b"origin")
        asked = _one(scope, b"access-control-request-method")
        if not self.origins or scope["method"] != "OPTIONS" or origin is None or asked is None:
            return None
        if not self._allows(origin):
            return [_VARY]
        # Named one by one: a "*" would leave out Authorization.
        wanted = _one(scope, b"access-control-request-headers") or b""
        headers = [(b"access-control-allow-headers", wanted)] if _TOKENS.fullmatch(wanted) else []
        return [
            *self._allowed(origin),
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            *headers,
            (b"access-control-max-age", b"%d" % MAX_AGE),
        ]

    def check(self, scope: Scope) -> None:
        """Refuse a WebSocket, or a request that is none for reading, to a page of another origin.

        Programs that are no browsers send no ``Origin``, or that of the server itself.

        Raises:
            OriginNotAllowed: it is neither the server's own nor one of those allowed.
        """
        if scope["type"] == "http" and scope["method"] in _READING:
            return
        origins = [value for key, value in scope["headers"] if key == b"origin"]
        if not origins or ANY in self.origins:
            return
        origin = origins[0]
        known = self._allows(origin) or _host(origin) == _one(scope, b"host")
        if known and len(origins) == 1:
            return
        raise OriginNotAllowed(
            f"A page of {origin[:200].decode('latin-1')!r} may not ask here; the server's"
            " DYN_TRIO_CORS_ORIGINS can allow it."
        )

    def _allows(self, origin: bytes) -> bool:
        return ANY in self.origins or origin.decode("latin-1") in self.origins

    def _allowed(self, origin: bytes) -> Headers:
        if ANY in self.origins:
            return [(b"access-control-allow-origin", b"*")]
        return [(b"access-control-allow-origin", origin), _VARY]


def with_headers(send: Send, headers: Headers) -> Send:
    """``send``, but the head of the response has these headers, too."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return sending


def _one(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header; None if it is missing, or there is more than one."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


def _host(origin: bytes) -> bytes:
    """``HOST:PORT`` of an origin, as a Host header has it."""
    return origin.partition(b"://")[2]
