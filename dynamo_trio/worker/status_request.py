"""One request to the status server, and the ways to answer it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import msgspec

from dynamo_trio.http.respond import send_bytes, send_json

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send
    from dynamo_trio.http.limits import HttpLimits

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
