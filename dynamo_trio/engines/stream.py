"""The consumer's end of one request: a bounded buffer that the engine fills without waiting."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from dynamo_trio import errors
from dynamo_trio.engines.protocol import Delta

if TYPE_CHECKING:
    from dynamo_trio.engines.protocol import Request


@define(eq=False)
class DeltaStream:
    """The deltas of one request, for one consumer. Got from :meth:`Engine.open`.

    Iterate over it, or take all that is there at once with :meth:`receive_batch`. The
    iteration ends after the delta that carries ``finish_reason``; a delta that carries
    an error is raised instead of returned, after the ones before it were given out.
    """

    request: Request
    # Invariant: at most max_tokens + 2 deltas, since each but the last, and that of a stop,
    # carries a token and the engine lets no more tokens pass. So a slow consumer never stops
    # the engine.
    _buffer: deque[Delta] = field(factory=deque, init=False)
    _consumer: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)
    _ended: bool = field(default=False, init=False)
    _stopped: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    def push(self, delta: Delta) -> None:
        """The engine's end: never blocks, wakes the consumer."""
        self._buffer.append(delta)
        self._consumer.unpark()

    def stop(self) -> None:
        """End the iteration with an ``aborted`` delta, behind those that are there already."""
        if not self._stopped:
            self._stopped = True
            self.push(Delta(self.request.request_id, (), "aborted"))

    def close(self) -> None:
        """Drop what is buffered and refuse further reading."""
        self._closed = True
        self._buffer.clear()
        self._consumer.unpark_all()

    def receive_nowait(self) -> Delta:
        """The next delta.

        Raises:
            trio.WouldBlock: none is there yet.
            trio.EndOfChannel: the last one was given out before.
            trio.ClosedResourceError: the request was left.
            DynamoException: the request failed; what it raises is the cause.
        """
        if self._closed:
            raise trio.ClosedResourceError
        if self._ended:
            raise trio.EndOfChannel
        if not self._buffer:
            raise trio.WouldBlock
        return self._opened(self._buffer.popleft())

    def _opened(self, delta: Delta) -> Delta:
        self._ended = delta.finish_reason is not None
        if delta.finish_reason == "error":
            raise delta.error or errors.Unknown("the engine failed this request")
        return delta

    async def receive(self) -> Delta:
        """Wait for the next delta; raises as :meth:`receive_nowait` does."""
        if self._buffer or self._ended or self._closed:
            await trio.lowlevel.checkpoint()  # before anything is taken, so nothing gets lost
        while not (self._buffer or self._ended or self._closed):
            await self._consumer.park()
        return self.receive_nowait()

    async def receive_batch(self) -> list[Delta]:
        """Wait for at least one delta and return all that are there, in order.

        An error is raised by the next call if something came before it.
        """
        batch = [await self.receive()]
        while self._buffer and self._buffer[0].finish_reason != "error":
            batch.append(self._opened(self._buffer.popleft()))
        return batch

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
