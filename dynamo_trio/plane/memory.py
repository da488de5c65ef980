"""The request plane inside one process: items pass by a plain call."""

from __future__ import annotations

from collections import deque
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
    feed_tokens,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@attrs.define(eq=False)
class _Answer(Outbox):
    """The way back of one call."""

    #: Invariant: None as soon as the client has left or the stream has ended;
    #: nothing is delivered afterwards.
    _sink: ItemSink | None
    _credit: int = INITIAL_CREDIT
    #: Tokens, and the items behind them, that came without credit. Invariant: not empty only
    #: while there is no credit, or while they are being delivered.
    _held: deque[int | bytes] = attrs.field(factory=deque)
    _delivering: bool = False
    #: Invariant: replaced only once set, so that no waiter is stranded.
    _changed: trio.Event = attrs.field(factory=trio.Event)
    finished: bool = False
    #: How it ends, behind what is held.
    _end: tuple[DynamoException | None] | None = None
    #: Was the end given to the client? False if that has left before.
    _delivered: bool | None = None
    #: What the client may still send.
    input: _Input = attrs.field(factory=lambda: _Input())

    def begin(self) -> None:
        """Nobody has to be told: an error that comes first is known by coming first."""

    def put(self, payload: bytes) -> None:
        if self._held:
            self._held.append(payload)
            return
        self._credit -= 1
        if self._sink is not None:
            self._sink.feed((payload,))

    def put_tokens(self, token_ids: Sequence[int]) -> None:
        if self._held or len(token_ids) > self._credit:
            self._held.extend(token_ids)
            self._deliver()
        elif self._sink is not None and token_ids:
            self._credit -= len(token_ids)
            feed_tokens(self._sink, token_ids)

    def finish(self, error: DynamoException | None) -> None:
        if self.finished:
            return
        self.finished = True
        self.input.close()
        if error is not None:
            self._held.clear()  # what breaks off says so at once
        self._end = (error,)
        self._deliver()

    def _deliver(self) -> None:
        """Give the client what was held, as far as there is credit, and the end behind it."""
        if self._delivering:
            return  # it grants while it is given something
        self._delivering = True
        while self._held and self._credit > 0 and self._sink is not None:
            self._give(self._sink)
        self._delivering = False
        if self._end is not None and not (self._held and self._sink is not None):
            sink, self._sink = self._sink, None
            if sink is not None:
                self._delivered = True
                sink.finish(*self._end)
                self.wake()

    def _give(self, sink: ItemSink) -> None:
        """Tokens that lie together, or one item."""
        tokens: list[int] = []
        while self._held and self._credit > 0 and isinstance(item := self._held[0], int):
            tokens.append(item)
            self._held.popleft()
            self._credit -= 1
        if tokens:
            feed_tokens(sink, tokens)
        elif isinstance(item := self._held.popleft(), bytes):
            self._credit -= 1
            sink.feed((item,))

    @property
    def has_credit(self) -> bool:
        return self._credit > 0 and not self._held

    async def wait_credit(self) -> None:
        if self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()

    @property
    def delivered(self) -> bool | None:
        return self._delivered

    async def wait_delivered(self) -> None:
        await self.wait_credit()

    def recall(self, error: DynamoException) -> bool:
        if not self._held or self._sink is None:
            return False
        self._held.clear()
        self._end = (error,)
        self._deliver()
        return True

    def grant(self, items: int) -> None:
        self.input.grant(items)

    # --- as the client's handle sees it -----------------------------------------------------

    def allow(self, items: int) -> None:
        """The client takes so many items more."""
        self._credit += items
        if self._held:
            self._deliver()
        self.wake()

    def detach(self) -> None:
        """Deliver nothing from now on."""
        self._sink = None
        self._held.clear()
        self.input.close()
        if self._delivered is None:
            self._delivered = False
            self.wake()


@attrs.define(eq=False)
class _Input:
    """How much a client may send to a request that streams in."""

    #: Nothing is taken any more.
    closed: bool = False
    _credit: int = INITIAL_CREDIT
    _waiters: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def has_credit(self) -> bool:
        return self.closed or self._credit > 0

    def take(self) -> None:
        self._credit -= 1

    def grant(self, items: int) -> None:
        self._credit += items
        if self.has_credit:
            self._waiters.unpark_all()

    def close(self) -> None:
        self.closed = True
        self._waiters.unpark_all()

    async def wait(self) -> None:
        if self.has_credit:
            await trio.lowlevel.checkpoint()
        else:
            await self._waiters.park()


@attrs.frozen(eq=False)
class _Handle(ClientStream):
    """The client's hold on a stream."""

    _answer: _Answer
    _call: AcceptedCall

    def grant(self, items: int) -> None:
        self._answer.allow(items)

    def stop(self) -> None:
        self._answer.input.close()
        self._call.stop()

    def leave(self) -> None:
        """Take nothing from now on, and tell the call if it still runs."""
        self._answer.detach()
        if not self._answer.delivered:
            self._call.cancel()

    def put(self, payload: bytes) -> None:
        if not self._answer.input.closed:
            self._answer.input.take()
            self._call.feed((payload,))

    def finish_input(self) -> None:
        if not self._answer.input.closed:
            self._answer.input.close()
            self._call.finish_input(None)

    @property
    def has_credit(self) -> bool:
        return self._answer.input.has_credit

    async def wait_credit(self) -> None:
        await self._answer.input.wait()


@attrs.define(eq=False)
class MemoryPlane(RequestPlane):
    """Endpoints of this object are reachable from this object, and from nowhere else."""

    name: ClassVar[str] = "mem"
    _acceptors: dict[str, Acceptor] = attrs.field(factory=dict)

    @asynccontextmanager
    async def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AsyncIterator[str]:
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
        answer = _Answer(sink)
        handle = _Handle(answer, self._accept(address, head, payload, answer))
        try:
            yield handle
        finally:
            handle.leave()

    def _accept(
        self, address: str, head: RequestHead, payload: bytes, answer: _Answer
    ) -> AcceptedCall:
        acceptor = self._acceptors.get(address)
        if acceptor is None:
            raise CannotConnect("the worker is not reachable")
        return acceptor.accept(head, payload, answer)
