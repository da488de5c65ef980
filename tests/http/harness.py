"""What the HTTP tests share: a server on a loopback port, a client of raw bytes, memory sockets."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import h2.connection
import h2.settings
import h11
import trio
import trio.testing

from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.server import HttpServer, open_listeners, serve_http

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.http.asgi import App

#: Real-clock tests: no wait takes longer unless something hangs.
PATIENCE = 20.0


@attrs.define(eq=False)
class Running:
    """A server in a nursery of the test."""

    server: HttpServer
    port: int
    nursery: trio.Nursery

    async def connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            # Or a window that is smaller than a segment leaves the kernel waiting on its timers.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
        await sock.connect(("127.0.0.1", self.port))
        return trio.SocketStream(sock)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
                await trio.sleep(0.001)


@asynccontextmanager
async def running(
    app: App,
    limits: HttpLimits | None = None,
    *,
    send_buffer: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Running]:
    """``app`` served on a free port of the loopback interface while the block runs."""
    listeners = await open_listeners("127.0.0.1", 0)
    if send_buffer is not None:  # accepted sockets inherit it
        listeners[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_http, app, listeners, limits=limits, tls=tls))
        yield Running(server, port, nursery)
        nursery.cancel_scope.cancel()


@attrs.frozen
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@attrs.define(eq=False)
class Http1Client:
    """A strict HTTP/1.1 client on one connection, in pieces that a test can put together."""

    stream: trio.abc.HalfCloseableStream
    parser: h11.Connection = attrs.field(factory=lambda: h11.Connection(h11.CLIENT))

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Send a request and read its whole answer."""
        await self.send(method, path, body, **headers)
        return await self.answer()

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        if self.parser.our_state is h11.DONE:
            self.parser.start_next_cycle()
        lines = [("host", "test"), *headers.items()]
        if body:
            lines.append(("content-length", str(len(body))))
        request = h11.Request(method=method, target=path, headers=lines)
        data = self.parser.send(request) or b""
        if body:
            data += self.parser.send(h11.Data(data=body)) or b""
        data += self.parser.send(h11.EndOfMessage()) or b""
        await self.stream.send_all(data)

    async def answer(self) -> Answer:
        response, body = None, b""
        while not isinstance(event := await self.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
        assert response is not None
        return Answer(response.status_code, dict(response.headers), body)

    async def next_event(self) -> h11.Event:
        while True:
            event = self.parser.next_event()
            if event is h11.NEED_DATA:
                self.parser.receive_data(bytes(await self.stream.receive_some()))
            else:
                return cast("h11.Event", event)


@asynccontextmanager
async def client_of(server: Running) -> AsyncIterator[Http1Client]:
    async with await server.connect() as stream:
        yield Http1Client(stream)


async def read_to_end(stream: trio.abc.ReceiveStream) -> tuple[bytes, bool]:
    """All that comes until the server closes, and whether it did so with a reset."""
    data = bytearray()
    with trio.fail_after(PATIENCE):
        try:
            while part := await stream.receive_some():
                data += part
        except trio.BrokenResourceError:
            return bytes(data), True
    return bytes(data), False


def shut_request(path: str) -> bytes:
    """An HTTP/2 request of a client that never lets a byte of the answer come."""
    client = h2.connection.H2Connection()
    client.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
    )
    client.initiate_connection()
    head = [(":method", "GET"), (":path", path), (":scheme", "http"), (":authority", "t")]
    client.send_headers(1, head, end_stream=True)
    return client.data_to_send()


@attrs.define(eq=False)
class MemorySocket:
    """As much of a socket as the server asks of a stream; closing it closes the stream."""

    stream: MemoryStream
    family: int = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 2)

    def fileno(self) -> int:
        return -1

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self.stream.was_reset = (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER)

    def close(self) -> None:
        self.stream.close()


@attrs.define(eq=False)
class MemoryStream(trio.abc.HalfCloseableStream):
    """The server's end of an in-memory connection; it passes for a socket stream.

    A send waits until the client has taken the bytes, as if its window were always shut.
    """

    _stream: trio.StapledStream[Any, Any]
    was_reset: bool = False
    socket: MemorySocket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.socket = MemorySocket(self)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._stream.send_stream.close()
        self._stream.receive_stream.close()


@attrs.define(eq=False)
class InMemory:
    """A server that is reached over memory streams, for tests under a mock clock."""

    server: HttpServer
    nursery: trio.Nursery
    ends: list[MemoryStream] = attrs.field(factory=list)

    def connect(self) -> trio.abc.HalfCloseableStream:
        """The client's end of a new connection."""
        ours, theirs = trio.testing.lockstep_stream_pair()
        end = MemoryStream(theirs)
        self.ends.append(end)
        self.nursery.start_soon(self.server.serve_stream, cast("trio.SocketStream", end))
        return ours


@asynccontextmanager
async def in_memory(
    app: App, limits: HttpLimits | None = None, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[InMemory]:
    """``app`` behind memory streams while the block runs."""
    async with trio.open_nursery() as nursery:
        yield InMemory(HttpServer(app, limits or HttpLimits(), tls), nursery)
        nursery.cancel_scope.cancel()
