"""A request that streams in, as the program that sends it sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.response_stream import ResponseStream

if TYPE_CHECKING:
    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane import ClientStream

T = TypeVar("T", default=Any)


@attrs.define(eq=False)
class BidirectionalStream(ResponseStream[T]):
    """Sends items and iterates over those that come back; one sender, one reader.

    Neither way waits for the other: the worker may answer before it has heard anything, and
    go on after it has heard everything.
    """

    _input_ended: bool = False
    #: Around the sender's wait for credit.
    _sending: trio.CancelScope | None = None

    async def send(self, item: object) -> None:
        """Send an item, as soon as the worker takes more.

        Raises:
            trio.BrokenResourceError: the answer has ended; its cause is the error that ended it,
                which iterating raises too, or None if it ended well.
            trio.ClosedResourceError: the input was ended before.
            trio.BusyResourceError: another task is sending.
            LocalProtocolError: no codec can spell the item.
            PayloadTooLarge: it is too large to be sent.
        """
        payload = self._codec.encode(item)
        await trio.lowlevel.checkpoint()
        self._check()
        stream = self._stream
        assert stream is not None, "the request was not accepted yet"
        while not stream.has_credit:
            await self._wait_credit(stream)
            self._check()
        stream.put(payload)

    async def _wait_credit(self, stream: ClientStream) -> None:
        try:
            with trio.CancelScope() as self._sending:
                await stream.wait_credit()
        finally:
            self._sending = None

    def end_input(self) -> None:
        """There are no more items; the answer goes on. Safe to call again."""
        self._input_ended = True
        if self._stream is not None:
            self._stream.finish_input()

    def stop_generating(self) -> None:
        """Ask the worker to come to an end; ends the input too."""
        self._input_ended = True
        super().stop_generating()

    def finish(self, error: DynamoException | None) -> None:
        super().finish(error)
        if self._sending is not None:
            self._sending.cancel("the answer has ended")

    def _check(self) -> None:
        if self._sending is not None:
            raise trio.BusyResourceError("another task is sending on this stream")
        if self._input_ended:
            raise trio.ClosedResourceError("the input was ended before")
        if self._ended:
            raise self._broken() from self._error

    def _broken(self) -> trio.BrokenResourceError:
        if self._error is None:
            return trio.BrokenResourceError("the answer has ended")
        kind = type(self._error).__name__
        return trio.BrokenResourceError(f"the answer has ended: {kind}: {self._error.message}")
