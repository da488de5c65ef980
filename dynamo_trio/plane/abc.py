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
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import attrs
import trio

from dynamo_trio.lifecycle.prospects import Peer
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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
    #: The request streams in, item by item, and its payload is empty (Dynamo's ``many_in``).
    streams_in: bool = False
    #: Do the items of the answer lie in Dynamo's ``Annotated`` on a wire that has it? They do,
    #: but for the answers of a few endpoints of Dynamo's own.
    annotated: bool = True
    #: Those of its trace: ``traceparent``, ``tracestate`` and ``x-request-id``, as far as there.
    headers: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Connections:
    """How many connections of a plane stand."""

    #: To workers, on which this process sends requests.
    client: int = 0
    #: From clients, on which it is sent some.
    worker: int = 0


@attrs.define(eq=False)
class Traffic:
    """What a client has sent its requests with. Counts; they only grow."""

    #: Bytes of requests, and of what acknowledges them.
    sent: int = 0
    received: int = 0
    #: Requests that were not acknowledged.
    errors: int = 0
    #: How often there was no room for one more answer's connection.
    backoffs: int = 0


@attrs.frozen
class Acknowledgements:
    """Who has said that it sends nothing new to what was withdrawn, among those who can."""

    #: All that are known.
    peers: int = 0
    #: Those who have not, in words.
    waiting: tuple[str, ...] = ()


#: What a sink leaves to be done when the other streams have their tokens of this step, too, and
#: before anything else happens: a plain call that does not raise, and what it writes. To make all
#: pieces first and write them then keeps the caches of the interpreter and the kernel apart.
Rest: TypeAlias = "tuple[Callable[[bytes], object], bytes]"


class ItemSink(Protocol):
    """Takes the items of one stream. Called by the plane: never awaits, never raises."""

    def expect(self, codec: Codec) -> None:
        """The items will be in this codec. Called once, by whoever opens the stream, first."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Take the items that are there, in order, encoded."""

    def feed_tokens(self, token_ids: Sequence[int]) -> Rest | None:
        """Take tokens: each is an item of an engine's answer that holds its id and no more.

        Comes only where the peer sends such items so; it counts as one item for each token.
        """

    def finish(self, error: DynamoException | None) -> None:
        """The stream is over; called at most once, after the last ``feed``."""


def feed_tokens(sink: ItemSink, token_ids: Sequence[int]) -> None:
    """Feed one stream by itself, and do the rest at once."""
    if (rest := sink.feed_tokens(token_ids)) is not None:
        write, data = rest
        write(data)


class Outbox(ABC):
    """The way back of one call, on the server side."""

    #: The log knows why the handler fails, if it does: one line is enough.
    is_repeat: bool = False

    @property
    def peer(self) -> Peer:
        """Who sent the request. By default nobody who could place it on another worker."""
        return Peer()

    @abstractmethod
    def begin(self) -> None:
        """The request is valid and its handler starts. Comes before the first ``put``."""

    @abstractmethod
    def put(self, payload: bytes) -> None:
        """Send one encoded item; never blocks. After ``finish`` it does nothing."""

    @abstractmethod
    def put_tokens(self, token_ids: Sequence[int]) -> None:
        """Send items of an engine's answer that hold the id of one token each, and no more.

        May be called from any task, and without credit, by whoever bounds what it sends: an
        engine does not stop for one slow reader. What has no credit waits here.
        """

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
        """Let a waiter of any of these waits look again (the call was cut)."""

    @property
    @abstractmethod
    def delivered(self) -> bool | None:
        """Behind ``finish``: has everything left this process, the end included?

        None: not yet. False: it never will, for the client is gone, and the call was cancelled;
        it is not, once this is True.
        """

    @abstractmethod
    async def wait_delivered(self) -> None:
        """Wait until :attr:`delivered` is known, or until :meth:`wake` is called."""

    def recall(self, error: DynamoException) -> bool:
        """End in this error after all, in place of what waits for credit, behind ``finish``.

        False: nothing waits for credit. What is on its way can only leave, or be lost.
        """
        return False

    def grant(self, items: int) -> None:  # noqa: B027 - nothing streams in on every plane
        """Allow the client of a request that streams in to send so many items more."""


class AcceptedCall(Protocol):
    """A request that an endpoint has taken on."""

    def cancel(self) -> None:
        """The client left; it wants no farewell. Safe to call at any time, also twice.

        Comes also behind ``finish``, as long as not everything has left.
        """

    def stop(self) -> None:
        """The client wants no more, but takes what still comes. Safe to call as ``cancel`` is.

        Nothing streams in any more either, for the client has no more to say.
        """

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Take items that stream in, in order, encoded. Never awaits, never raises.

        No more come than there is credit: :data:`INITIAL_CREDIT` items, and what
        :meth:`Outbox.grant` has allowed since. A plane may count a large item as several.
        """
        return  # for calls that nothing streams into

    def finish_input(self, error: DynamoException | None) -> None:
        """No more items stream in; called at most once, after the last ``feed``.

        ``error``: items may be missing. A call that is cancelled need not be told.
        """
        return


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

    #: The name of the plane that carries it; empty if it stays in this process.
    plane: ClassVar[str] = ""

    def grant(self, items: int) -> None:
        """Allow the peer to send so many items more."""

    def stop(self) -> None:
        """Ask the peer to come to an end; what it still sends is taken. It ends the input too."""

    # --- a request that streams in -------------------------------------------------------

    def put(self, payload: bytes) -> None:
        """Send one encoded item; never blocks. Does nothing behind the end of either way.

        Raises:
            PayloadTooLarge: it is above the limit of the plane.
        """
        return  # for streams whose request is whole from the beginning

    def finish_input(self) -> None:
        """There will be no more items. The answer goes on."""
        return

    @property
    def has_credit(self) -> bool:
        """May another item be sent now? Also true when no more items are taken."""
        return False

    async def wait_credit(self) -> None:
        """Wait until there is credit, or no more items are taken (the stream has ended)."""
        await trio.lowlevel.checkpoint()


class RequestPlane(ABC):
    """One way to carry requests. ``name`` is the key in an instance's ``transports``."""

    name: ClassVar[str]

    @abstractmethod
    def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AbstractAsyncContextManager[str]:
        """Make ``acceptor`` reachable under ``path`` while the block runs; yields the address.

        ``annotated``: as :attr:`RequestHead.annotated`, for its answers.
        """

    @abstractmethod
    def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send a request; entering waits for the acknowledgement.

        Leaving the block tells the peer to stop, if it has not finished, and
        detaches ``sink`` with no checkpoint in between: afterwards it is not called.

        Raises:
            NotConnected: this plane has no way to that address; nothing was sent.
            CannotConnect: nobody serves that address.
            Draining, Overloaded: the peer refused.
        """

    # --- as a client ----------------------------------------------------------------------

    def instance_found(self, address: str) -> None:  # noqa: B027 - most planes need not care
        """Discovery has an instance with this address. Safe to call again."""

    def avoids(self, address: str) -> bool:
        """Has the peer there said, or shown, that it is to get no new requests?"""
        return False

    def instance_gone(self, address: str) -> None:  # noqa: B027 - most planes need not care
        """The instance with this address left discovery.

        That alone ends no stream: an orderly stop interrupts nothing. A plane that cannot
        see a dead peer by itself begins to watch for its silence here.
        """

    # --- as a worker ----------------------------------------------------------------------

    def withdraw(self, *addresses: str) -> None:  # noqa: B027 - most planes need not care
        """Tell peers that can be told: no new requests to these addresses of ours, from now on.

        What they send all the same is served.
        """

    def restore(self, address: str) -> None:  # noqa: B027 - most planes need not care
        """Tell them that what was withdrawn is there again."""

    async def wait_acknowledged(self) -> None:
        """Wait until every peer that can say so has said that it sends nothing new to what
        was withdrawn."""
        await trio.lowlevel.checkpoint()

    @property
    def acknowledgements(self) -> Acknowledgements:
        """How far :meth:`wait_acknowledged` is, for the log."""
        return Acknowledgements()

    @property
    def places(self) -> int:
        """How many of our streams the peers have said they can place on other workers."""
        return 0

    async def settle(self) -> None:
        """Wait until every request that was accepted here has begun to be answered.

        Called before an instance leaves discovery: a peer may give up a request whose
        answer it has not seen begin when the instance goes. The caller bounds the wait.
        """
        await trio.lowlevel.checkpoint()

    @property
    def connections(self) -> Connections:
        """How many stand now, for the metrics."""
        return Connections()

    @property
    def traffic(self) -> Traffic | None:
        """What its client's side has carried, for the metrics; None: it does not count."""
        return None

    @property
    def has_silent_peers(self) -> bool:
        """Has a peer sent a request that has no way to say it has seen our instance leave?"""
        return False
