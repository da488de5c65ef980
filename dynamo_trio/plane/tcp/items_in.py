"""The items of one request that streams in, on the worker's side.

Theory of operation
-------------------
One task calls the client, says for which request, and reads items. Each is paid for with
credit; without credit nothing is read, so a handler that does not read holds its client back
by TCP, and only on this one connection. Credit is counted in pieces of 64 KiB, so that a few
large items weigh as much as many small ones.

It ends with the client's closing word, with the connection (the call then hears that items
may be missing), or when the answer has ended: then nobody reads.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Disconnected, RemoteProtocolError
from dynamo_trio.plane.abc import INITIAL_CREDIT
from dynamo_trio.wire.dynamo.call_home_states import Item
from dynamo_trio.wire.dynamo.items_in import Closing, CutOff, ItemReceiver

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.console.seldom import Seldom
    from dynamo_trio.plane.abc import AcceptedCall
    from dynamo_trio.wire.dynamo.addresses import HostPort
    from dynamo_trio.wire.dynamo.control import ReplyTo
    from dynamo_trio.wire.dynamo.items_in import InEvent

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Bytes that are read at once.
PIECE = 64 * 1024
BROKEN_OFF = "the client's items broke off"


def cost(payload: bytes) -> int:
    """What an item takes off the credit."""
    return 1 + len(payload) // PIECE


@attrs.define(eq=False)
class ItemsIn:
    """What a client sends to one call. ``limit``: bytes of the largest message."""

    _place: ReplyTo
    _call: AcceptedCall
    _dial: Callable[[HostPort], Awaitable[trio.abc.Stream]]
    _limit: int
    #: Told when the client says that nobody listens any more.
    _on_kill: Callable[[], object] = attrs.field(kw_only=True)
    #: Told when the client knows that its items are wanted, or this has ended.
    _on_settled: Callable[[], object] = attrs.field(kw_only=True)
    #: Log lines about clients that cannot be called.
    _unreached: Seldom = attrs.field(kw_only=True)
    #: The client has been called, or never will be.
    settled: bool = False
    _wire: ItemReceiver = attrs.field(init=False)
    _credit: int = INITIAL_CREDIT
    #: What the items that were fed, and not yet granted again, have cost.
    _costs: deque[int] = attrs.field(factory=deque)
    _granted: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        self._wire = ItemReceiver(limit=self._limit)

    def grant(self, items: int) -> None:
        """The call has taken so many of its items."""
        for _ in range(min(items, len(self._costs))):
            self._credit += self._costs.popleft()
        if self._credit > 0:
            self._granted.unpark_all()

    def close(self) -> None:
        """Nobody takes items any more."""
        self._reading.cancel("nobody takes items any more")

    # --- the connection -------------------------------------------------------------------

    async def run(self) -> None:
        """Call the client and feed the call until there is no more. Never raises for its faults."""
        with self._reading:
            try:
                await self._converse(await self._dial(self._place.address))
            except OSError as exc:
                self._unreached.log(
                    *(logger, logging.WARNING, "request %.64s: its items cannot be had at %s: %s"),
                    *(self._place.request_id, self._place.address, exc),
                )
                self._call.finish_input(Disconnected("the client cannot be called for its items"))
        self._settle()

    async def _converse(self, stream: trio.abc.Stream) -> None:
        try:
            await stream.send_all(self._wire.greet(self._place.subject))
            self._settle()
            await self._read(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._call.finish_input(Disconnected(BROKEN_OFF))
        except RemoteProtocolError as exc:
            logger.warning("request %.64s: %s", self._place.request_id, exc)
            self._call.finish_input(exc)
        finally:
            await trio.aclose_forcefully(stream)

    async def _read(self, stream: trio.abc.Stream) -> None:
        while not self._wire.closed:
            await self._wait_credit()
            items, last = self._take()
            if items:
                self._call.feed(items)
            if last is not None:
                self._end(last)
            elif self._credit > 0:
                self._wire.receive_data(await stream.receive_some(PIECE))

    async def _wait_credit(self) -> None:
        while self._credit <= 0:
            await self._granted.park()

    def _take(self) -> tuple[list[bytes], InEvent | None]:
        """Items that are there, as far as there is credit; and what has ended them."""
        items: list[bytes] = []
        while self._credit > 0 and (event := self._wire.next_event()) is not None:
            if not isinstance(event, Item):
                return items, event
            items.append(event.data)
            self._costs.append(cost(event.data))
            self._credit -= self._costs[-1]
        return items, None

    def _end(self, event: InEvent) -> None:
        if event is Closing.KILL:
            self._on_kill()
        elif event is Closing.STOP:
            self._call.stop()
        else:
            broken_off = isinstance(event, CutOff)
            self._call.finish_input(Disconnected(BROKEN_OFF) if broken_off else None)

    def _settle(self) -> None:
        if not self.settled:
            self.settled = True
            self._on_settled()
