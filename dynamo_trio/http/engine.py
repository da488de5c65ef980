"""hypercorn's protocol engine on one connection of ours.

Theory of operation
-------------------
hypercorn parses and builds what is on the wire. Around that it needs somebody who gives it the
bytes that come, takes those that go, and starts a task for each request. Its own ``TCPServer``
does so with a timer task that is begun anew twice for each request, and a lock and a shield for
each send. Here the guard has the timers, shields a send only if it has to wait, and keeps the
order of sends: so an HTTP/1.1 answer that the socket takes at once costs no task, no scope and
no checkpoint.

What this relies on in hypercorn is pinned by the tests of the contract.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from dynamo_trio.http.frames import ENHANCE_YOUR_CALM, FrameGate, SentAway, goaway
from dynamo_trio.http.guard import H2_PREFACE
from dynamo_trio.http.protocols import Http1, Http2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.trio.worker_context import WorkerContext

    from dynamo_trio.http.asgi import Message, Scope, Send
    from dynamo_trio.http.guard import GuardedStream

P = TypeVar("P", Http1, Http2)

logger = logging.getLogger("dynamo_trio.http")

#: Messages that wait for an app before its client has to (what hypercorn itself keeps).
MAX_QUEUED = 10
#: The client has left already, or the stream is in use by one who will see that.
GONE = (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError)


@attrs.define(eq=False)
class Inbox:
    """What ``receive`` gives to the app of one request; hypercorn puts it in."""

    _messages: deque[Message] = attrs.field(factory=deque)
    #: Who waits for a message, and who for room.
    _takers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _givers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: The rest of the body is thrown away.
    _discarding: bool = False

    async def put(self, message: Message) -> None:
        """Add a message, as soon as there is room. The last one always has room."""
        kind = message["type"]
        if kind == "http.request" and self._messages and self._ends_body(message):
            return
        while len(self._messages) >= MAX_QUEUED and not kind.endswith(".disconnect"):
            await self._givers.park()
        if self._discarding and kind == "http.request":
            return
        self._messages.append(message)
        if self._takers:
            self._takers.unpark()

    async def receive(self) -> Message:
        """ASGI's ``receive``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._messages:
            await self._takers.park()
        return self._take()

    def whole_body(self) -> bytes | None:
        """Take the body, if it is there from its beginning to its end; else nothing."""
        if not self._messages or self._messages[0].get("more_body", True):
            return None
        return bytes(self._take().get("body", b""))

    def discard_body(self) -> None:
        """Throw away what there is of the body, and what still comes."""
        self._discarding = True
        kept = [message for message in self._messages if message["type"] != "http.request"]
        self._messages = deque(kept)
        self._givers.unpark_all()

    def _ends_body(self, message: Message) -> bool:
        """Let an empty last part be told by the one before it."""
        before = self._messages[-1]
        joined = not (message["more_body"] or message["body"]) and before["type"] == "http.request"
        if joined:
            before["more_body"] = False
        return joined

    def _take(self) -> Message:
        message = self._messages.popleft()
        if self._givers:
            self._givers.unpark()
        return message


@attrs.define(eq=False)
class Engine:
    """Serves one connection by hypercorn."""

    #: Called in a task of its own for each request, with a scope, and ``receive`` by its inbox.
    _app: Callable[[Scope, Inbox, Send], Awaitable[None]]
    _config: Config
    _context: WorkerContext
    _stream: GuardedStream
    _protocol: Http1 | Http2 = attrs.field(init=False)
    #: What was read of HTTP/2 goes through it.
    _gate: FrameGate | None = None
    _nursery: trio.Nursery = attrs.field(init=False)

    async def run(self) -> None:
        """Serve until the client has left and every app has returned. Closes the stream."""
        try:
            async with trio.open_nursery() as self._nursery:
                await self._serve()
        finally:
            await self._close()

    async def _serve(self) -> None:
        try:
            first = await self._start()
        except OSError:  # it was lost, or closed here, before it had said anything
            return
        await self._protocol.initiate()
        await self._read(first)

    async def _start(self) -> bytes:
        """Choose the protocol, by what TLS has agreed upon or else by the first bytes."""
        agreed = getattr(self._stream, "selected_alpn_protocol", None)  # plain streams have none
        if agreed is not None and agreed() == "h2":
            self._protocol = self._make(Http2, ssl=True)
            self._gate = FrameGate(self._config.h2_max_concurrent_streams)
            return b""
        first = await self._begin()
        if first.startswith(H2_PREFACE):
            self._protocol = self._make(Http2, ssl=agreed is not None)
            self._gate = FrameGate(self._config.h2_max_concurrent_streams)
        else:
            self._protocol = self._make(Http1, ssl=agreed is not None)
        return first

    async def _begin(self) -> bytes:
        """The first bytes: as many as it takes to know."""
        first = b""
        while len(first) < len(H2_PREFACE) and H2_PREFACE.startswith(first):
            more = await self._receive()
            if not more:
                break
            first += more
        return first

    def _make(self, protocol: type[P], *, ssl: bool) -> P:
        sock = self._stream.socket
        return protocol(
            cast("Any", self._app),
            self._config,
            self._context,
            cast("Any", self),  # as its task group
            ConnectionState({}),
            ssl,
            parse_socket_addr(sock.family, sock.getpeername()),
            parse_socket_addr(sock.family, sock.getsockname()),
            self._send,
        )

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive_some()
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return b""

    async def _read(self, data: bytes) -> None:
        data = data or await self._receive()
        away: SentAway | None = None
        try:
            while data:
                if self._gate is None:
                    await self._protocol.handle(RawData(data))
                else:
                    await self._read_pieces(self._gate, data)
                data = await self._receive()
        except SentAway as exc:
            away = exc
        if away is not None:
            await self._send_away()
            raise away
        await self._protocol.handle(Closed())

    async def _read_pieces(self, gate: FrameGate, data: bytes) -> None:
        gate.earn(self._stream.take_earned())
        others = False
        for piece in gate.pieces(data):
            if others:
                await trio.lowlevel.checkpoint()
            await self._protocol.handle(RawData(piece))
            others = True

    async def _send_away(self) -> None:
        """Say why, and close. The requests that run are told that their client has left."""
        if self._gate is not None:
            with suppress(*GONE):
                await self._stream.send_all(goaway(ENHANCE_YOUR_CALM))
        self._stream.unread = True  # what comes is not to become a reset before that was read
        await self._protocol.handle(Closed())
        await self._close()

    # --- what hypercorn calls ---------------------------------------------------

    async def _send(self, event: Event) -> None:
        if isinstance(event, Updated):
            return  # what counts as idle: the guard knows that better
        if isinstance(event, RawData):
            try:
                await self._stream.send_all(event.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._protocol.handle(Closed())
        elif isinstance(event, Closed):
            # Whoever sent the last of an answer is not to be cancelled in it.
            with trio.CancelScope(shield=True):
                await self._close()
            await self._protocol.handle(Closed())

    async def spawn_app(
        self, app: object, config: Config, scope: Scope, send: Send
    ) -> Callable[[Message], Awaitable[None]]:
        """As hypercorn's ``TaskGroup`` has it: returns the way to the app's ``receive``."""
        inbox = Inbox()
        self._nursery.start_soon(self._run_app, scope, inbox, send)
        return inbox.put

    def spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """As hypercorn's ``TaskGroup`` has it."""
        self._nursery.start_soon(task, *args)

    async def _run_app(self, scope: Scope, inbox: Inbox, send: Send) -> None:
        try:
            await self._app(scope, inbox, send)
        except* Exception:
            logger.exception("Error in ASGI Framework")
        # hypercorn ends what the app has left open; not so if the connection itself is at its end
        await send(cast("Any", None))

    async def _close(self) -> None:
        with suppress(*GONE):
            await self._stream.send_eof()
        await self._stream.aclose()
