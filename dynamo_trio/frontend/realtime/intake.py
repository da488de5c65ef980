"""What the client of a pass-through sends, from its socket into a bounded inbox."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from dynamo_trio.errors import DynamoException
from dynamo_trio.frontend import stalls
from dynamo_trio.frontend.realtime.inbox import Inbox
from dynamo_trio.frontend.realtime.kept import UPDATE, Frame
from dynamo_trio.frontend.realtime.socket import Close
from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.departure import wait_departed
from dynamo_trio.wire.openai.fields import NotJson, decode_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.frontend.realtime.kept import Kept
    from dynamo_trio.frontend.realtime.session import Session
    from dynamo_trio.wire.openai.fields import Json

#: Seconds after which a worker that takes nothing from a client, and says nothing, is given up;
#: unless ``DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS`` says otherwise.
STALL = stalls.DEFAULT

#: How Dynamo ends a session for a bad frame (RFC 6455, 7.4.1).
BINARY = Close(1003, "binary frames not supported")
MALFORMED = Close(1007, "malformed JSON frame")


class Reader(Protocol):
    """Who hears of the ends that a session finds at its client's side. Called synchronously."""

    def client_lost(self) -> None:
        """The connection has broken off."""

    def client_left(self) -> None:
        """The client has closed the session. Nothing follows."""

    def client_failed(self, close: Close) -> None:
        """It has sent what ends a session. Nothing follows."""

    def worker_stalled(self, seconds: float) -> None:
        """The inbox was full for so long, and nothing was heard of the worker."""


@attrs.define(eq=False)
class Intake:
    """The reading side of one session. ``run`` is called once."""

    _session: Session
    _kept: Kept
    _reader: Reader
    inbox: Inbox = attrs.field(factory=Inbox)
    #: Around a wait for the worker to take more; what it says, too, renews its deadline.
    _patience: trio.CancelScope | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block a connection that breaks off is told at once."""
        exchange = exchange_of(self._session.socket.scope)
        if exchange is not None:
            exchange.begin_response(self._reader.client_lost)
        try:
            yield
        finally:
            if exchange is not None:
                exchange.end_response(self._reader.client_lost)

    async def run(self, first: str | None, model: str) -> None:
        """Read until the end. ``first``: the frame that selected ``model``; None: the URL did."""
        frame = first or await self._session.socket.receive()
        begun = False
        while frame is not None:
            if isinstance(frame, bytes):
                return self._reader.client_failed(BINARY)
            try:
                await self._take(frame, model="" if begun else model)
                begun = True
            except NotJson:
                return self._reader.client_failed(MALFORMED)
            except DynamoException as exc:
                self._session.error(exc)
                await self._session.outbox.wait_room()
            frame = None  # it may be large, and the next one may be long in coming
            frame = await self._session.socket.receive()
        self._reader.client_left()

    def heard(self) -> None:
        """The worker has said something: it is alive."""
        if self._patience is not None:
            self._patience.deadline = trio.current_time() + self._limit

    @property
    def _limit(self) -> float:
        return self._session.frontend.stalls.limit or STALL

    async def _take(self, text: str, *, model: str) -> None:
        """``model``: what the worker is to be told before the first event."""
        data = text.encode()
        frame = Frame(decode_object(data), len(data))
        if model and frame.type != UPDATE:  # Dynamo's workers want that one first
            self._kept.known_updates = 1
            wanted: dict[str, Json] = {"type": "realtime", "model": model}
            self.inbox.put(Frame({"type": UPDATE, "session": wanted}, 0))
        while not self.inbox.has_room:
            await self._wait_room(self._limit)
        self.inbox.put(frame)

    async def _wait_room(self, limit: float) -> None:
        """Until the worker takes more. Nobody reads meanwhile, where a client's end would show."""
        self._patience = trio.CancelScope(deadline=trio.current_time() + limit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_departure)
            with self._patience:
                await self.inbox.wait_room()
            nursery.cancel_scope.cancel("it takes more, or has had its time")
        # A worker that waits for our client is not to blame.
        if self._patience.cancelled_caught and self._session.outbox.writable:
            self._reader.worker_stalled(limit)

    async def _watch_departure(self) -> None:
        await wait_departed(exchange_of(self._session.socket.scope))
        self._reader.client_lost()
