"""The items of one request that streams in, on the client's side.

Theory of operation
-------------------
Items wait here until the worker has called for them; then the task of that connection sends
them. A worker that takes no more (its handler has ended, or reads no further) resets the
connection. Then what comes is dropped, and the answer goes on; how that ends is said on its
own connection.

What waits is bounded by the credit: above the high-water mark there is none. A client that
has left, or asks the worker to stop, gives what waits a moment to get away.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import LocalProtocolError, PayloadTooLarge
from dynamo_trio.wire.dynamo.call_home_states import Item
from dynamo_trio.wire.dynamo.items_in import Closing, ItemSender

if TYPE_CHECKING:
    from dynamo_trio.plane.tcp.settings import TcpSettings

#: Bytes that are sent at once. A worker is judged slow by each piece it takes.
PIECE = 16 * 1024
#: Seconds that telling a worker to stop may take.
TELL_TIME = 1.0
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@attrs.define(eq=False)
class ItemsOut:
    """What a client has to send to one request. All but :meth:`run` are plain calls."""

    _settings: TcpSettings
    subject: str = attrs.field(factory=lambda: str(uuid.uuid4()))
    _wire: ItemSender = attrs.field(factory=ItemSender)
    #: Invariant: empty once ``_unwanted``.
    _unsent: bytearray = attrs.field(factory=bytearray)
    #: Nobody takes items any more.
    _unwanted: bool = False
    #: Invariant: from the high-water mark until the low-water mark.
    _paused: bool = False
    #: A worker has called for it.
    _called: bool = False
    #: Around the sending, while there is a connection.
    _sending: trio.CancelScope | None = None
    _credit: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _work: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- as the stream's client sees it ---------------------------------------------------

    def put(self, payload: bytes) -> None:
        """Send an item, later. Does nothing behind the end.

        Raises:
            PayloadTooLarge: no worker takes an item of that size.
        """
        if self._unwanted or self._wire.closed:
            return
        try:
            self._keep(self._wire.send(Item(payload)))
        except LocalProtocolError:
            text = f"The item takes {len(payload)} bytes, too many to send."
            raise PayloadTooLarge(text) from None

    def close(self, word: Closing) -> None:
        """There are no more items. The first word counts; any but COMPLETE is told in a hurry."""
        if word is not Closing.COMPLETE:
            self._hurry()
        if self._unwanted or self._wire.closed:
            return
        if word is Closing.KILL and not self._called:
            self._drop()
        else:
            self._keep(self._wire.send(word))

    def _hurry(self) -> None:
        if self._sending is not None:
            self._sending.deadline = trio.current_time() + TELL_TIME
        self._lift()

    @property
    def has_credit(self) -> bool:
        """May another item be put now?"""
        return not self._paused

    async def wait_credit(self) -> None:
        """Wait until there is credit, or nobody takes items any more."""
        if self.has_credit:
            await trio.lowlevel.checkpoint()
        else:
            await self._credit.park()

    def _keep(self, data: bytes) -> None:
        self._unsent += data
        full = len(self._unsent) >= self._settings.high_water
        self._paused = (self._paused or full) and not self._wire.closed
        self._work.unpark_all()

    def _drop(self) -> None:
        """Nobody takes what is here, or will come."""
        self._unwanted = True
        self._unsent.clear()
        self._lift()
        self._work.unpark_all()

    def _lift(self) -> None:
        self._paused = False
        self._credit.unpark_all()

    # --- as its connection sees it --------------------------------------------------------

    def call_for(self) -> bool:
        """A worker has called; False if one has before, or nobody sends items any more."""
        if self._called or self._unwanted:
            return False
        self._called = True
        return True

    async def run(self, transport: trio.abc.Stream) -> None:
        """Send until the closing word is sent, or nobody takes it. The caller closes."""
        try:
            async with trio.open_nursery() as nursery:
                self._sending = nursery.cancel_scope
                nursery.start_soon(self._listen, transport)
                await self._send(transport)
                nursery.cancel_scope.cancel("the items are sent")
        finally:
            self._drop()

    async def _send(self, transport: trio.abc.Stream) -> None:
        while not self._unwanted:
            if self._unsent:
                await self._send_piece(transport)
            elif self._wire.closed:
                return
            else:
                await self._work.park()

    async def _send_piece(self, transport: trio.abc.Stream) -> None:
        piece = bytes(self._unsent[:PIECE])
        with trio.move_on_after(self._settings.stall_time) as stalled:
            try:
                await transport.send_all(piece)
            except _GONE:
                self._drop()
        if stalled.cancelled_caught:
            self._drop()
        del self._unsent[: len(piece)]
        if self._paused and len(self._unsent) <= self._settings.low_water:
            self._lift()

    async def _listen(self, transport: trio.abc.Stream) -> None:
        """Notice a reset. A worker has nothing to say here, and may close that direction."""
        try:
            while await transport.receive_some(PIECE):
                pass
        except _GONE:
            self._drop()
