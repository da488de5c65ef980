"""The items of one request that streams in, read by its handler."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.errors import Cancelled, DynamoException, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dynamo_trio.plane.abc import Outbox

T = TypeVar("T", default=Any)


@attrs.define(eq=False)
class RequestStream(Generic[T]):
    """What a client sends, as an asynchronous iterator (Dynamo's ``PyAsyncRequestStream``).

    One reader. Iterating ends when the client sends no more, which is no reason to stop
    answering; also when the request is stopped. It raises ``Disconnected`` if items may be
    missing, ``InvalidArgument`` for one that the endpoint does not understand. A handler that
    does not read holds its client back. A wait that is cancelled loses no item.
    """

    _read: Callable[[bytes], Awaitable[T]]
    _outbox: Outbox
    #: Invariant: no more than there was credit for.
    _items: deque[bytes] = attrs.field(factory=deque)
    _error: DynamoException | None = None
    #: Invariant: once set nothing is taken any more.
    _ended: bool = False
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- as the plane sees it -----------------------------------------------------------

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Take items, encoded."""
        if not self._ended:
            self._items.extend(payloads)
            self._lot.unpark()

    def finish(self, error: DynamoException | None) -> None:
        """There are no more; the first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._lot.unpark()

    # --- as the request's context sees it -------------------------------------------------

    def stop_generating(self) -> None:
        """The client has no more to say."""
        self.finish(None)

    def kill(self) -> None:
        """The client has left."""
        self.finish(Cancelled("the client has left"))

    # --- as its reader sees it ----------------------------------------------------------

    def __aiter__(self) -> RequestStream[T]:
        return self

    async def __anext__(self) -> T:
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self._ended:
                raise self._error or StopAsyncIteration
            await self._lot.park()
        try:
            item = await self._read(self._items[0])  # cancelled, it is still there
        except InvalidArgument:
            self._taken()
            raise
        self._taken()
        return item

    def _taken(self) -> None:
        self._items.popleft()
        self._outbox.grant(1)
