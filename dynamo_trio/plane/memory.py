"""The request plane inside one process: items pass by a plain call."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.errors import CannotConnect, DynamoException
from dynamo_trio.plane.abc import (
    INITIAL_CREDIT,
    AcceptedCall,
    Acceptor,
    ClientStream,
    ItemSink,
    Outbox,
    RequestHead,
    RequestPlane,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@attrs.define(eq=False)
class _MemoryStream(Outbox, ClientStream):
    """Both ends of one stream: the call's outbox and the client's handle."""

    #: Invariant: None as soon as the client has left or the stream has ended;
    #: nothing is delivered afterwards.
    _sink: ItemSink | None
    _credit: int = INITIAL_CREDIT
    #: Invariant: replaced only once set, so that no waiter is stranded.
    _changed: trio.Event = attrs.field(factory=trio.Event)
    finished: bool = False
    #: Set once the peer has accepted the request.
    call: AcceptedCall | None = None

    def begin(self) -> None:
        """Nobody has to be told: an error that comes first is known by coming first."""

    def put(self, payload: bytes) -> None:
        self._credit -= 1
        if self._sink is not None:
            self._sink.feed((payload,))

    def finish(self, error: DynamoException | None) -> None:
        if self.finished:
            return
        self.finished = True
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.finish(error)

    @property
    def has_credit(self) -> bool:
        return self._credit > 0

    async def wait_credit(self) -> None:
        if self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()

    def grant(self, items: int) -> None:
        self._credit += items
        self.wake()

    def stop(self) -> None:
        if self.call is not None:
            self.call.stop()

    def detach(self) -> None:
        """Deliver nothing from now on, and tell the call if it still runs."""
        self._sink = None
        if self.call is not None and not self.finished:
            self.call.cancel()


@attrs.define(eq=False)
class MemoryPlane(RequestPlane):
    """Endpoints of this object are reachable from this object, and from nowhere else."""

    name: ClassVar[str] = "mem"
    _acceptors: dict[str, Acceptor] = attrs.field(factory=dict)

    @asynccontextmanager
    async def serve(self, path: str, acceptor: Acceptor) -> AsyncIterator[str]:
        if path in self._acceptors:
            raise ValueError(f"the path {path!r} is already served on this plane")
        self._acceptors[path] = acceptor
        try:
            yield path
        finally:
            del self._acceptors[path]

    @asynccontextmanager
    async def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        await trio.lowlevel.checkpoint()
        stream = _MemoryStream(sink)
        stream.call = self._accept(address, head, payload, stream)
        try:
            yield stream
        finally:
            stream.detach()

    def _accept(
        self, address: str, head: RequestHead, payload: bytes, stream: _MemoryStream
    ) -> AcceptedCall:
        acceptor = self._acceptors.get(address)
        if acceptor is None:
            raise CannotConnect("the worker is not reachable")
        return acceptor.accept(head, payload, stream)
