"""The request plane: how a request reaches an endpoint and its items come back.

Theory of operation
-------------------
A plane has two roles. The *server* side is given an :class:`Acceptor` and calls
it, synchronously, for each request that arrives: either it raises (a refusal,
which the peer sees as the negative acknowledgement) or it returns an
:class:`AcceptedCall`, and from then on the call pushes its items into the
:class:`Outbox` that the plane gave it. The *client* side is
:meth:`RequestPlane.open_stream`: when it has been entered the request is
accepted, and items arrive at an :class:`ItemSink`. An accepted request can still turn out
to be invalid: its stream then ends with that error before its handler has begun.

No task is made per stream by a client plane, and nothing in the way of an item
awaits: ``Outbox.put`` and ``ItemSink.feed`` are plain calls. Whoever owns the
request waits on an event of its own, and only for start, end, cancel and
back-pressure. Back-pressure is credit: the client grants as it consumes, and a
call without credit waits (:meth:`Outbox.wait_credit`), which holds back only
that one stream.

Payloads cross a plane as bytes, even in memory, so that the planes cannot
differ in what they carry. They are values in the codec of the request's head; envelopes
that a wire puts around them are that plane's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import attrs
import trio

from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.errors import DynamoException

#: Items that a call may send before the client has granted anything.
INITIAL_CREDIT = 64


@attrs.frozen
class RequestHead:
    """What travels beside the payload of a request."""

    request_id: str
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    #: Of the request's payload and of every item of its answer.
    codec: Codec = MSGPACK
    #: When the client sent it, in nanoseconds since the epoch, if it said so.
    sent_at_ns: int | None = attrs.field(default=None, eq=False)


class ItemSink(Protocol):
    """Takes the items of one stream. Called by the plane: never awaits, never raises."""

    def expect(self, codec: Codec) -> None:
        """The items will be in this codec. Called once, by whoever opens the stream, first."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Take the items that are there, in order, encoded."""

    def finish(self, error: DynamoException | None) -> None:
        """The stream is over; called at most once, after the last ``feed``."""


class Outbox(ABC):
    """The way back of one call, on the server side."""

    @abstractmethod
    def begin(self) -> None:
        """The request is valid and its handler starts. Comes before the first ``put``."""

    @abstractmethod
    def put(self, payload: bytes) -> None:
        """Send one encoded item; never blocks. After ``finish`` it does nothing."""

    @abstractmethod
    def finish(self, error: DynamoException | None) -> None:
        """End the stream. The first call wins.

        An error that comes before :meth:`begin` says that the request never started.
        """

    @property
    @abstractmethod
    def has_credit(self) -> bool:
        """May the call send another item now?"""

    @abstractmethod
    async def wait_credit(self) -> None:
        """Wait until there is credit, or until :meth:`wake` is called."""

    @abstractmethod
    def wake(self) -> None:
        """Let a waiter of :meth:`wait_credit` look again (the call was cut)."""


class AcceptedCall(Protocol):
    """A request that an endpoint has taken on."""

    def cancel(self) -> None:
        """The client left; it wants no farewell. Safe to call at any time, also twice."""

    def stop(self) -> None:
        """The client wants no more, but takes what still comes. Safe to call as ``cancel`` is."""


class Acceptor(Protocol):
    """The endpoint behind an address."""

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> AcceptedCall:
        """Take the request on, or raise. The payload is not looked at yet.

        Raises:
            Draining: the endpoint is closed to new requests.
            Overloaded: the endpoint is full.
        """


class ClientStream(Protocol):
    """The client's hold on an open stream."""

    def grant(self, items: int) -> None:
        """Allow the peer to send so many items more."""

    def stop(self) -> None:
        """Ask the peer to come to an end; what it still sends is taken."""


class RequestPlane(ABC):
    """One way to carry requests. ``name`` is the key in an instance's ``transports``."""

    name: ClassVar[str]

    @abstractmethod
    def serve(self, path: str, acceptor: Acceptor) -> AbstractAsyncContextManager[str]:
        """Make ``acceptor`` reachable under ``path`` while the block runs; yields the address."""

    @abstractmethod
    def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send a request; entering waits for the acknowledgement.

        Leaving the block tells the peer to stop, if it has not finished, and
        detaches ``sink`` with no checkpoint in between: afterwards it is not called.

        Raises:
            CannotConnect: nobody serves that address.
            Draining, Overloaded: the peer refused.
        """

    def instance_gone(self, address: str) -> None:  # noqa: B027 - most planes need not care
        """The instance with this address left discovery.

        That alone ends no stream: an orderly stop interrupts nothing. A plane that cannot
        see a dead peer by itself begins to watch for its silence here.
        """

    async def settle(self) -> None:
        """Wait until every request that was accepted here has begun to be answered.

        Called before an instance leaves discovery: a peer may give up a request whose
        answer it has not seen begin when the instance goes. The caller bounds the wait.
        """
        await trio.lowlevel.checkpoint()

    @property
    def has_silent_peers(self) -> bool:
        """Has a peer sent a request that has no way to say it has seen our instance leave?"""
        return False
