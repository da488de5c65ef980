"""hypercorn's protocols, with what they lack towards clients that do not mean well.

* HTTP/1.1: ``Upgrade: h2c`` is left alone, as RFC 9113 has it since it was made obsolete. The
  only way to HTTP/2 without TLS is prior knowledge, from the first byte of the connection, so
  that every byte of HTTP/2 goes through the gate (:mod:`dynamo_trio.http.frames`).
* HTTP/2: what hypercorn takes for granted of a request's head is looked at before it does, so
  that one bad request ends itself and not all others on its connection. h2, below, has rules of
  its own, and takes some faults of one stream (RFC 9113, 8.1.1) for the whole connection's.
  And its streams take turns (:mod:`dynamo_trio.http.turns`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from h2.errors import ErrorCodes
from hypercorn.protocol.h2 import H2Protocol

from dynamo_trio.http.frames import SentAway
from dynamo_trio.http.refused import error_of, refusal
from dynamo_trio.http.spoken import SpokenHttp1
from dynamo_trio.http.turns import Turns

if TYPE_CHECKING:
    import h11
    from h2.events import RequestReceived
    from priority.priority import PriorityTree

    from dynamo_trio.errors import DynamoException


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

    async def _create_stream(self, request: RequestReceived) -> None:
        complaint = self._complaint(request.headers)
        if complaint is None:
            await super()._create_stream(request)
            return
        self._refuse(request.stream_id, error_of(*complaint))

    def _complaint(self, head: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """A status and what is wrong, if hypercorn is not to see it."""
        # RFC 9113, 6.5.2: so the size is reckoned that was announced as the limit.
        size = sum(len(name) + len(value) + 32 for name, value in head)
        if size > self.config.h2_max_header_list_size:
            return 431, ""
        fields = dict(head)
        if b":path" not in fields:  # RFC 9113, 8.5
            return 501, "CONNECT, which is for proxies"
        if not (fields[b":path"].isascii() and fields[b":method"].isascii()):
            return 400, "path and method are to be ASCII"
        return None

    def _refuse(self, number: int, error: DynamoException) -> None:
        headers, body = refusal(error)
        self.connection.send_headers(number, [(b":status", b"%d" % error.status), *headers])
        if self.connection.local_flow_control_window(number) >= len(body):
            self.connection.send_data(number, body, end_stream=True)
        # What more there is of the request, and what the client has no window for, is given up.
        if not self.connection.streams[number].closed:
            self.connection.reset_stream(number, ErrorCodes.NO_ERROR)
