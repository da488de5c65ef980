"""The items of one stream, read by the program that asked for them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.errors import (
    Cancelled,
    DynamoException,
    LocalProtocolError,
    RemoteProtocolError,
    UnreadableItem,
)
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import encode_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.plane import ClientStream
    from dynamo_trio.wire.dynamo.codec import Codec

T = TypeVar("T", default=Any)


@attrs.define(eq=False)
class ResponseStream(Generic[T]):
    """The items of one stream as an asynchronous iterator. One reader.

    Iterating ends when the worker says that the stream is whole, and raises the worker's
    error, as the class that it was there, if it is not.
    """

    item_type: type[T]
    _read: Callable[[bytes], T] | None = None
    _codec: Codec = MSGPACK
    #: Encoded items, and the tokens of items that were never encoded.
    _items: deque[bytes | int] = attrs.field(factory=deque)
    _error: DynamoException | None = None
    _ended: bool = False
    _stream: ClientStream | None = None
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- as the plane sees it -----------------------------------------------------------

    def expect(self, codec: Codec) -> None:
        kind: Any = Any if self.item_type is object else self.item_type
        self._read = codec.decoder(kind, "item")
        self._codec = codec

    def feed(self, payloads: Sequence[bytes]) -> None:
        self._items.extend(payloads)
        self._lot.unpark()

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        self._items.extend(token_ids)
        self._lot.unpark()

    def finish(self, error: DynamoException | None) -> None:
        if not self._ended:
            self._ended = True
            self._error = error
            self._lot.unpark()

    # --- as its reader sees it ----------------------------------------------------------

    def attach(self, stream: ClientStream) -> None:
        """The request was accepted: credit and wishes go to ``stream``."""
        self._stream = stream

    def __aiter__(self) -> ResponseStream[T]:
        return self

    async def __anext__(self) -> T:
        if self._items or self._ended:
            await trio.lowlevel.checkpoint()  # before anything is taken, so nothing gets lost
        while not self._items:
            if self._ended:
                raise self._error or StopAsyncIteration
            await self._lot.park()
        if self._stream is not None:
            self._stream.grant(1)
        return self._decode(self._items.popleft())

    def stop_generating(self) -> None:
        """Ask the worker to come to an end; what it still sends can be read."""
        if self._stream is not None:
            self._stream.stop()

    def kill(self) -> None:
        """Read no further: what has not been read is dropped, and iterating raises Cancelled."""
        self._items.clear()
        self.finish(Cancelled("the request was killed"))

    def _decode(self, item: bytes | int) -> T:
        if self._read is None:
            raise LocalProtocolError("items came before their codec was told")
        payload = item if isinstance(item, bytes) else encode_token(self._codec, item)
        try:
            return self._read(payload)
        except RemoteProtocolError as exc:
            raise UnreadableItem(exc.message) from None
