"""hypercorn's HTTP/1.1, with answers in place of the bare statuses that it has of its own.

It knows them for what is no request (:mod:`dynamo_trio.http.reading`), for an upgrade that is none,
and for an app that has failed without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h11
from hypercorn.events import Closed
from hypercorn.protocol.events import EndBody, Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream

from dynamo_trio.http.reading import Reader
from dynamo_trio.http.refused import error_of, refusal

if TYPE_CHECKING:
    from hypercorn.protocol.events import Event

    from dynamo_trio.http.asgi import Headers

#: The headers by which hypercorn answers of its own accord, with no body behind them.
ENGINES_OWN = [(b"content-length", b"0"), (b"connection", b"close")]
#: RFC 6455, 4.2.
BAD_UPGRADE = "a WebSocket needs sec-websocket-version 13 and a sec-websocket-key"
OUR_VERSION = (b"sec-websocket-version", b"13")


class SpokenHttp1(H11Protocol):
    """HTTP/1.1, and WebSockets over it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader = Reader(self.config.h11_max_incomplete_size)
        self.connection = self._reader
        #: An upgrade was refused: hypercorn, having said so, would leave the connection open.
        self._refused = False

    async def stream_send(self, event: Event) -> None:
        if isinstance(event, Response) and event.headers == ENGINES_OWN:
            await self._answer_for_stream(event.status_code)
        else:
            await super().stream_send(event)
        if isinstance(event, EndBody) and self._refused:
            await self.send(Closed())

    async def _answer_for_stream(self, status: int) -> None:
        self._refused = isinstance(self.stream, WSStream)
        if self._refused:
            await self._refuse(status, BAD_UPGRADE, OUR_VERSION)
        else:
            await self._refuse(status, "")

    async def _send_error_response(self, status_code: int) -> None:
        await self._refuse(status_code, str(self._reader.complaint))
        await self._send_h11_event(h11.EndOfMessage())

    async def _refuse(self, status: int, complaint: str, *more: tuple[bytes, bytes]) -> None:
        headers, body = refusal(error_of(status, complaint))
        head: Headers = [*headers, *more, (b"connection", b"close")]
        await self._send_h11_event(h11.Response(status_code=status, headers=head))
        if not self._reader.asked_for_head:
            await self._send_h11_event(h11.Data(data=body))
