"""A whole front in virtual time: the app on our own server, clients on pairs of UNIX sockets.

What one end of such a pair sends is there at once, so that no clock jumps past it; and they are
real sockets, so that streamed answers take the way that they take in a process.
"""

from __future__ import annotations

import json
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import h2.config
import h2.connection
import h2.events
import h2.settings
import h11
import trio
import trio_websocket

from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.serve import answering
from dynamo_trio.frontend.teardown import Teardown
from dynamo_trio.http.server import HttpServer
from dynamo_trio.wire.openai.sse import EventParser
from tests.http.harness import Http1Client

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from tests.frontend.conftest import Opener, Site

#: What each end of a connection holds for the other.
BUFFER = 4096


@attrs.frozen
class Ends:
    """The TLS contexts of server and clients."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@attrs.define(eq=False)
class Front:
    """A site behind a server, and when it was over."""

    site: Site
    server: HttpServer
    services: trio.Nursery
    clients: trio.Nursery
    _ends: list[trio.SocketStream]
    tls: Ends | None = None
    #: The end of the process, by Trio's clock.
    exited: float = -1.0

    def connect(self) -> trio.SocketStream:
        """The client's end of a new connection."""
        pair = socket.socketpair()
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in pair)
        self.services.start_soon(self.server.serve_stream, theirs)
        self._ends.append(ours)
        return ours

    async def secure(self, protocol: str) -> trio.SSLStream[trio.SocketStream]:
        """The client's end of a new TLS connection."""
        assert self.tls is not None
        self.tls.client.set_alpn_protocols([protocol])
        stream = trio.SSLStream(self.connect(), self.tls.client, server_hostname="localhost")
        await stream.do_handshake()
        return stream

    def http1(self) -> Http1Client:
        return Http1Client(self.connect())

    async def https(self) -> Http1Client:
        stream: Any = await self.secure("http/1.1")
        return Http1Client(stream)

    async def http2(self, *, window: int = 65_535) -> Http2Client:
        """``window``: of each stream, in bytes; 0 lets no byte of a body come."""
        stream = self.connect() if self.tls is None else await self.secure("h2")
        client = Http2Client(stream, window)
        await client.begin()
        self.clients.start_soon(client.read)
        return client

    async def websocket(self, path: str = "/v1/realtime") -> trio_websocket.WebSocketConnection:
        return await trio_websocket.wrap_client_stream(self.clients, self.connect(), "test", path)


@attrs.define(eq=False)
class Stream:
    """One request on an HTTP/2 connection."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    done: trio.Event = attrs.field(factory=trio.Event)
    #: Its end was the proper one: no reset, and no connection that broke.
    whole: bool = False


@attrs.define(eq=False)
class Http2Client:
    """One connection with prior knowledge."""

    stream: trio.abc.Stream
    window: int
    parser: h2.connection.H2Connection = attrs.field(init=False)
    streams: dict[int, Stream] = attrs.field(factory=dict)
    _sending: trio.Lock = attrs.field(factory=trio.Lock)

    def __attrs_post_init__(self) -> None:
        config = h2.config.H2Configuration(header_encoding="utf-8")
        self.parser = h2.connection.H2Connection(config)
        code = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
        self.parser.local_settings = h2.settings.Settings(
            client=True, initial_values={code: self.window}
        )

    async def begin(self) -> None:
        self.parser.initiate_connection()
        await self._flush()

    async def send(self, method: str, path: str, body: bytes = b"", *, end: bool = True) -> Stream:
        number = self.parser.get_next_available_stream_id()
        self.streams[number] = stream = Stream()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "t")]
        self.parser.send_headers(number, head, end_stream=end and not body)
        if body:
            self.parser.send_data(number, body, end_stream=end)
        await self._flush()
        return stream

    async def read(self) -> None:
        """Take what comes, until the connection ends."""
        while data := await self._receive():
            for event in self.parser.receive_data(data):
                self._take(event)
            await self._flush()
        for stream in self.streams.values():
            stream.done.set()

    async def _receive(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some())
        except trio.BrokenResourceError:
            return b""

    async def _flush(self) -> None:
        async with self._sending:
            if data := self.parser.data_to_send():
                with suppress(trio.BrokenResourceError):  # read() sees it
                    await self.stream.send_all(data)

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=int(number), headers=list(pairs)):
                head = {str(name): str(value) for name, value in pairs}
                self.streams[number].status = int(head.pop(":status"))
                self.streams[number].headers = head
            case h2.events.DataReceived(stream_id=int(number), data=bytes(data)):
                self.streams[number].body += data
                self.parser.acknowledge_received_data(event.flow_controlled_length or 0, number)
            case h2.events.StreamEnded(stream_id=int(number)):
                self.streams[number].whole = True
                self.streams[number].done.set()
            case h2.events.StreamReset(stream_id=int(number)):
                self.streams[number].done.set()


@asynccontextmanager
async def open_front(
    open_site: Opener, *, tls: Ends | None = None, **limits: Any
) -> AsyncIterator[Front]:
    """A site with a server before it. The block may stop it; it is over behind the block."""
    ends: list[trio.SocketStream] = []
    try:
        async with trio.open_nursery() as clients:
            async with trio.open_nursery() as services:
                async with open_site(**limits) as site:
                    server = HttpServer(
                        App(site.frontend), site.frontend.limits, tls.server if tls else None
                    )
                    site.lifecycle.on_abort(partial(server.abort_all, "the process stops"))
                    front = Front(site, server, services, clients, ends, tls)
                    cleanup = Teardown(site.lifecycle).cleanup
                    async with answering(site.frontend, server, services, cleanup):
                        yield front
                        site.lifecycle.request_stop("the test is over")
                        await site.lifecycle.wait_stopped()
                services.cancel_scope.cancel("everything inside has ended")
            front.exited = trio.current_time()
            clients.cancel_scope.cancel("the test is over")
    finally:
        for end in ends:
            end.socket.close()


async def read_all(client: Http1Client) -> tuple[int, dict[str, str], bytes, bool]:
    """Status, headers and body of an answer, and whether it has its proper end."""
    status, headers, body = 0, {}, b""
    try:
        while not isinstance(event := await client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {k.decode().lower(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return status, headers, body, False
    except (h11.RemoteProtocolError, trio.BrokenResourceError):
        return status, headers, body, False
    return status, headers, body, True


def events(body: bytes) -> list[Any]:
    """The server-sent events of a body, decoded; ``[DONE]`` as it is."""
    return [e.data if e.is_done else json.loads(e.data) for e in EventParser().feed(body)]
