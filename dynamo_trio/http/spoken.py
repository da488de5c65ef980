"""hypercorn's HTTP/1.1, with answers in place of the bare statuses that it has of its own.

It knows them for what is no request (:mod:`dynamo_trio.http.reading`), for an upgrade that is none,
and for an app that has failed without a word.

Plain requests, and the frame of a streamed answer, go past most of what hypercorn and h11 do for
each; what these believe is the same afterwards.
"""

from __future__ import annotations

import re
from functools import lru_cache
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import h11
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import EndBody, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.protocol.ws_stream import WSStream

from dynamo_trio.http.reading import Reader
from dynamo_trio.http.refused import error_of, refusal

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.events import Event as ConnectionEvent
    from hypercorn.protocol.events import Event

    from dynamo_trio.http.asgi import Headers, Scope
    from dynamo_trio.http.plain import PlainHead

#: The headers by which hypercorn answers of its own accord, with no body behind them.
ENGINES_OWN = [(b"content-length", b"0"), (b"connection", b"close")]
#: RFC 6455, 4.2.
BAD_UPGRADE = "a WebSocket needs sec-websocket-version 13 and a sec-websocket-key"
OUR_VERSION = (b"sec-websocket-version", b"13")
#: Header fields that are sent as they are (RFC 9112, 5), and those on which more depends.
_FIELDS = re.compile(rb"(?:[-!#$%&'*+.^_`|~0-9a-zA-Z]+: [\x21-\x7e]+(?: [\x21-\x7e]+)*\r\n)*")
_OF_THE_FRAME = frozenset({b"connection", b"content-length", b"transfer-encoding"})


@lru_cache(maxsize=1)
def _own_fields(config: Config, second: int) -> bytes:
    """What hypercorn adds to every head; it tells the ``second``."""
    return b"".join([b"%b: %b\r\n" % field for field in config.response_headers("h11")])


class SpokenHttp1(H11Protocol):
    """HTTP/1.1, and WebSockets over it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader = Reader(self.config.h11_max_incomplete_size)
        self.connection = self._reader
        #: An upgrade was refused: hypercorn, having said so, would leave the connection open.
        self._refused = False

    # --- past hypercorn -------------------------------------------------------------------

    async def handle(self, event: ConnectionEvent) -> None:
        plain = None
        if isinstance(event, RawData) and self.stream is None and not self.config.server_names:
            plain = self._reader.take_plain(event.data) if self.connection is self._reader else None
        if plain is None:
            await super().handle(event)
        else:
            await self._begin_plain(*plain)

    async def _begin_plain(self, head: PlainHead, body: bytes | None) -> None:
        """As hypercorn does for a request that it has read."""
        stream = self.stream = HTTPStream(
            *(self.app, self.config, self.context, self.task_group, self.ssl),
            *(self.client, self.server, self.stream_send, STREAM_ID),
        )
        stream.start_time = time()
        scope: Any = self._plain_scope(head, stream.scheme)
        stream.scope = scope
        stream.app_put = await self.task_group.spawn_app(
            self.app, self.config, scope, stream.app_send
        )
        self.keep_alive_requests += 1
        await self.context.mark_request()
        if body is None:
            await self._handle_events()
        else:
            await stream.app_put({"type": "http.request", "body": body, "more_body": False})

    def _plain_scope(self, head: PlainHead, scheme: str) -> Scope:
        path, _, query = head.target.partition(b"?")
        return {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": head.method.decode(),
            "scheme": scheme,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": self.config.root_path,
            "headers": head.headers,
            "client": self.client,
            "server": self.server,
            "state": self.connection_state.copy(),
            "extensions": {},
        }

    def begin_chunked(self, stream: object, headers: Headers) -> bytes | None:
        """The head of an answer with status 200 and a body in chunks, to be sent by the caller.

        None: nothing was done, and it is to be made by ``send``.
        """
        if not isinstance(stream, HTTPStream) or stream is not self.stream:
            return None
        fields = b"".join([b"%b: %b\r\n" % field for field in headers])
        plain = _OF_THE_FRAME.isdisjoint([name.lower() for name, _ in headers])
        last = self.keep_alive_requests >= self.config.keep_alive_max_requests
        plain = plain and not last and stream.state is ASGIHTTPState.REQUEST
        if not (plain and _FIELDS.fullmatch(fields) and self._reader.begin_chunked()):
            return None
        response: Any = {"status": 200, "headers": headers}
        stream.response = response
        stream.state = ASGIHTTPState.RESPONSE
        own = _own_fields(self.config, int(time()))
        return b"HTTP/1.1 200 OK\r\n%b%bTransfer-Encoding: chunked\r\n\r\n" % (fields, own)

    async def end_chunked(self, stream: object) -> bool:
        """The end of such an answer has left. False: nothing was done, ``send`` is to be told."""
        if not isinstance(stream, HTTPStream) or stream is not self.stream:
            return False
        if stream.state is not ASGIHTTPState.RESPONSE or not self._reader.end_chunked():
            return False
        stream.state = ASGIHTTPState.CLOSED
        await self._maybe_recycle()
        return True

    # --- through hypercorn ----------------------------------------------------------------

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
