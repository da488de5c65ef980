"""hypercorn's protocols, with what they lack towards clients that do not mean well.

* HTTP/1.1: ``Upgrade: h2c`` is left alone, as RFC 9113 has it since it was made obsolete. The
  only way to HTTP/2 without TLS is prior knowledge, from the first byte of the connection, so
  that every byte of HTTP/2 goes through the gate (:mod:`dynamo_trio.http.frames`).
* HTTP/2: what hypercorn takes for granted of a request's head is looked at before it does, so
  that one bad request ends itself and not all others on its connection; and so is what h2, below,
  takes for the whole connection's fault (:mod:`dynamo_trio.http.malformed`). What hypercorn
  answers of its own accord is put in our words. And its streams take turns
  (:mod:`dynamo_trio.http.turns`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from h2.errors import ErrorCodes
from h2.events import StreamReset
from h2.exceptions import ProtocolError
from hypercorn.protocol.events import Response
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.ws_stream import WSStream

from dynamo_trio.http.frames import RESET_RATE, Budget, SentAway
from dynamo_trio.http.malformed import Connection, MalformedRequest
from dynamo_trio.http.refused import error_of, refusal
from dynamo_trio.http.spoken import BAD_UPGRADE, ENGINES_OWN, OUR_VERSION, SpokenHttp1
from dynamo_trio.http.turns import Turns

if TYPE_CHECKING:
    import h11
    from h2.events import Event, RequestReceived
    from hypercorn.protocol.events import Event as StreamEvent
    from priority.priority import PriorityTree

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.http.asgi import Headers


class Http1(SpokenHttp1):
    """HTTP/1.1, and WebSockets over it."""

    async def _check_protocol(self, event: h11.Request) -> None:
        # hypercorn's own changes to HTTP/2 here.
        if event.method == b"PRI":
            raise SentAway("it begins HTTP/2 in the middle of HTTP/1.1")


class Http2(H2Protocol):
    """HTTP/2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.priority = cast("PriorityTree", Turns())
        self.connection.__class__ = Connection  # hypercorn has made it, with its settings
        #: Requests that run and are reset here for what the client sends: they cost it as little
        #: as those that it takes back.
        self._faults = Budget(2 * self.config.h2_max_concurrent_streams, RESET_RATE)

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and event.headers == ENGINES_OWN:
            await self._answer_for_stream(event.stream_id, event.status_code)
        else:
            await super().stream_send(event)

    async def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            ours = isinstance(event, StreamReset) and not event.remote_reset
            if ours and not self._faults.spend():
                raise SentAway("too many of its requests are no good HTTP")
        await super()._handle_events(events)

    async def _create_stream(self, request: RequestReceived) -> None:
        complaint = self._complaint(request)
        if complaint is None:
            await super()._create_stream(request)
            return
        self._refuse(request.stream_id, error_of(*complaint), head=_asks_for_head(request.headers))

    def _complaint(self, request: RequestReceived) -> tuple[int, str] | None:
        """A status and what is wrong, if hypercorn is not to see it."""
        # RFC 9113, 6.5.2: so the size is reckoned that was announced as the limit.
        size = sum(len(name) + len(value) + 32 for name, value in request.headers)
        if size > self.config.h2_max_header_list_size:
            return 431, ""
        if isinstance(request, MalformedRequest):
            return 400, request.complaint
        fields = dict(request.headers)
        if b":path" not in fields:  # RFC 9113, 8.5
            return 501, "CONNECT, which is for proxies"
        if not (fields[b":path"].isascii() and fields[b":method"].isascii()):
            return 400, "path and method are to be ASCII"
        return None

    async def _answer_for_stream(self, number: int, status: int) -> None:
        """hypercorn would answer with a status alone. Waits for no window: it may be reading."""
        stream = self.streams[number]
        with suppress(ProtocolError):  # the client has left
            if isinstance(stream, WSStream):
                self._refuse(number, error_of(status, BAD_UPGRADE), OUR_VERSION)
            else:
                head = stream.scope["method"] == "HEAD"
                self._refuse(number, error_of(status, ""), head=head)
        await self.stream_buffers[number].close()  # for the end, which hypercorn still sends
        await self._flush()
        if isinstance(stream, WSStream):  # hypercorn, having said so, would keep it
            await self._close_stream(number)

    def _refuse(
        self, number: int, error: DynamoException, *more: tuple[bytes, bytes], head: bool = False
    ) -> None:
        headers, body = refusal(error)
        told: Headers = [(b":status", b"%d" % error.status), *headers, *more]
        self.connection.send_headers(number, told, end_stream=head)
        if not head and self.connection.local_flow_control_window(number) >= len(body):
            self.connection.send_data(number, body, end_stream=True)
        # What more there is of the request, and what the client has no window for, is given up.
        if not self.connection.streams[number].closed:
            self.connection.reset_stream(number, ErrorCodes.NO_ERROR)


def _asks_for_head(fields: list[tuple[bytes, bytes]]) -> bool:
    return (b":method", b"HEAD") in fields
