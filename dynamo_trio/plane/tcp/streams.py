"""The client's open streams: who takes their items, and what their clients want."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, ClassVar, Protocol

import attrs
import trio

from dynamo_trio.plane.abc import INITIAL_CREDIT, ClientStream
from dynamo_trio.wire.dynamo.call_home_states import Wish
from dynamo_trio.wire.dynamo.items_in import Closing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane.abc import ItemSink
    from dynamo_trio.plane.tcp.items_out import ItemsOut
    from dynamo_trio.wire.dynamo.codec import Codec


class Home(Protocol):
    """The connection on which a stream's worker has called home."""

    def look(self) -> None:
        """The stream's wish has changed."""


@attrs.define(eq=False)
class TcpStream(ClientStream):
    """One request, from before it is sent until its end.

    All calls are synchronous. Its connection, if its worker has called home already, looks
    again when something has changed.
    """

    plane: ClassVar[str] = "tcp"
    subject: str
    #: Of the instance, as it stands in its record.
    address: str
    codec: Codec
    #: Invariant: None as soon as the stream has ended or its client has left; nothing is
    #: delivered afterwards.
    sink: ItemSink | None
    #: As :attr:`~dynamo_trio.plane.abc.RequestHead.annotated`.
    annotated: bool = True
    #: Of a request that streams in.
    items: ItemsOut | None = None
    #: Items that may still be delivered.
    credit: int = INITIAL_CREDIT
    #: Invariant: KILL once nobody reads and the answer was not whole.
    wish: Wish = Wish.GO_ON
    #: The worker has said something since somebody last set this to False.
    heard: bool = False
    home: Home | None = None
    #: Set when credit comes, while somebody waits for it.
    _starved: trio.Event | None = None

    # --- as its client sees it ------------------------------------------------------------

    def grant(self, items: int) -> None:
        self.credit += items
        if self._starved is not None and self.credit > 0:
            self._starved.set()

    def stop(self) -> None:
        if self.sink is not None and self.wish is Wish.GO_ON:
            self._want(Wish.STOP)

    def put(self, payload: bytes) -> None:
        if self.items is not None:
            self.items.put(payload)

    def finish_input(self) -> None:
        if self.items is not None:
            self.items.close(Closing.COMPLETE)

    @property
    def has_credit(self) -> bool:
        return self.items is not None and self.items.has_credit

    async def wait_credit(self) -> None:
        if self.items is None:
            await trio.lowlevel.checkpoint()
        else:
            await self.items.wait_credit()

    def detach(self) -> None:
        """Deliver nothing from now on, and kill what still runs."""
        if self.sink is not None:
            self.sink = None
            self._want(Wish.KILL)

    # --- as its connection sees it --------------------------------------------------------

    @property
    def over(self) -> bool:
        """Has it ended, or its client left?"""
        return self.sink is None

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Deliver items, for which there must be credit."""
        self.credit -= len(payloads)
        if self.sink is not None:
            self.sink.feed(payloads)

    def finish(self, error: DynamoException | None) -> None:
        """The worker has ended the stream; the first end counts."""
        sink, self.sink = self.sink, None
        if sink is not None:
            if self.items is not None:
                self.items.close(Closing.STOP)
            sink.finish(error)

    def give_up(self, error: DynamoException) -> None:
        """End it from this side: the worker, if it still lives, is told to drop it."""
        if self.sink is not None:
            self.finish(error)
            self._want(Wish.KILL)

    async def wait_granted(self) -> None:
        """Wait until something may be delivered. One waiter."""
        self._starved = trio.Event()
        try:
            await self._starved.wait()
        finally:
            self._starved = None

    @property
    def is_starved(self) -> bool:
        """Does it wait for its own client, so that silence says nothing about the worker?"""
        return self._starved is not None

    def _want(self, wish: Wish) -> None:
        self.wish = wish
        if self.items is not None:
            self.items.close(Closing.KILL if wish is Wish.KILL else Closing.STOP)
        if self.home is not None:
            self.home.look()


@attrs.define(eq=False)
class StreamTable:
    """The streams for which a worker may call home, by subject. Subjects are never used again."""

    #: Invariant: a stream is in here exactly from before its request is sent until its client
    #: leaves.
    _streams: dict[str, TcpStream] = attrs.field(factory=dict)
    #: What the streams of requests that stream in have to send, by its own subject.
    _items: dict[str, ItemsOut] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._streams)

    def add(
        self,
        address: str,
        codec: Codec,
        sink: ItemSink,
        *,
        annotated: bool = True,
        items: ItemsOut | None = None,
    ) -> TcpStream:
        """A stream that is about to be asked for. ``items``: it streams in."""
        stream = TcpStream(str(uuid.uuid4()), address, codec, sink, annotated, items)
        self._streams[stream.subject] = stream
        if items is not None:
            self._items[items.subject] = items
        return stream

    def remove(self, stream: TcpStream) -> None:
        """The client leaves: nothing is delivered any more."""
        del self._streams[stream.subject]
        if stream.items is not None:
            del self._items[stream.items.subject]
        stream.detach()

    def called_home(self, subject: str, home: Home) -> TcpStream | None:
        """Whose worker calls; None if nobody waits for it, or another call came first."""
        stream = self._streams.get(subject)
        if stream is None or stream.over or stream.home is not None:
            return None
        stream.home = home
        return stream

    def items_wanted(self, subject: str) -> ItemsOut | None:
        """Whose worker calls for items; None if nobody sends any, or another call came first."""
        items = self._items.get(subject)
        return items if items is not None and items.call_for() else None

    def running(self, address: str) -> list[TcpStream]:
        """The streams of an instance that have not ended."""
        return [s for s in self._streams.values() if s.address == address and not s.over]

    def give_up(self, error: DynamoException) -> None:
        """End every stream."""
        for stream in list(self._streams.values()):
            stream.give_up(error)
