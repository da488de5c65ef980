"""Calling an endpoint: which instances there are, and which one is next.

The instances come from a discovery watch that runs in a nursery task; choosing
one is a plain call on the last known view, so a store that is away costs nothing.

A worker that dies stays in that view until its registration expires. So an instance that
could not be reached is left out of the choice for a while (:class:`Inhibitions`). One that a
plane has seen stop, or fall silent, is left out for as long as that holds, and strictly: a
request to it would surely be lost, or refused.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.bidirectional import BidirectionalStream
from dynamo_trio.console.logs import trace
from dynamo_trio.console.seldom import Seldom
from dynamo_trio.context import Context
from dynamo_trio.discovery import Discovery, EndpointId, Instance, Put
from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    NoWorker,
)
from dynamo_trio.plane import Planes, RequestHead
from dynamo_trio.response_stream import ResponseStream
from dynamo_trio.wire.deadline import with_deadline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from dynamo_trio.plane import ClientStream, ItemSink, RequestPlane, Rest
    from dynamo_trio.wire.dynamo.codec import Codec

T = TypeVar("T", default=Any)
S = TypeVar("S", bound=ResponseStream[Any])

logger = logging.getLogger("dynamo_trio.client")

#: Items as plain lists, maps and numbers.
_ANY: Any = object

#: How often a wait for the first instance is told of, in seconds.
TELL_EVERY = 10.0

#: For how long an instance that failed is left out, in seconds
#: (``DYN_RUNTIME_INHIBITED_DURATION_SECS``).
INHIBITED = 5.0

#: What says that an instance cannot be reached, if it comes before the first item.
_UNREACHED = (CannotConnect, ConnectionTimeout, Disconnected)


@attrs.define(eq=False)
class Inhibitions:
    """Instances that could not be reached a moment ago, and are left out of the choice.

    If that is all of them none is left out: a try is better than a sure failure. (Dynamo 1.5.1
    fails the request then.)
    """

    #: For how long, in seconds. 0: nobody is ever left out.
    duration: float = INHIBITED
    #: Instance id -> when it counts again, on Trio's clock.
    _until: dict[int, float] = attrs.field(factory=dict)

    def note(self, instance: Instance, error: DynamoException) -> None:
        """The instance failed so."""
        now = trio.current_time()
        if not self.duration:
            return
        if self._until.get(instance.instance_id, 0.0) <= now:
            logger.warning(
                "instance %x of %s is left out for %g s: %s",
                *(instance.instance_id, instance.endpoint, self.duration, error.message),
            )
        self._until[instance.instance_id] = now + self.duration

    def lift(self, instance_id: int) -> None:
        """It counts again: what is known of it is no longer what failed."""
        self._until.pop(instance_id, None)

    def filter(self, instances: list[Instance]) -> list[Instance]:
        """Those that are not left out; all, if that would be none."""
        if not self._until:
            return instances
        now = trio.current_time()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return [i for i in instances if i.instance_id not in self._until] or instances


@attrs.define(eq=False)
class _Listener:
    """A sink that passes everything on, and hears of a stream that ended before it began."""

    _sink: ItemSink
    _on_unreached: Callable[[DynamoException], object]
    _begun: bool = False
    #: Invariant: the sink's own as soon as the stream has begun, so that tokens pay nothing here.
    feed_tokens: Callable[[Sequence[int]], Rest | None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.feed_tokens = self._feed_first

    def expect(self, codec: Codec) -> None:
        self._sink.expect(codec)

    def feed(self, payloads: Sequence[bytes]) -> None:
        self._begun = True
        self._sink.feed(payloads)

    def _feed_first(self, token_ids: Sequence[int]) -> Rest | None:
        self._begun = True
        self.feed_tokens = self._sink.feed_tokens
        return self.feed_tokens(token_ids)

    def finish(self, error: DynamoException | None) -> None:
        if isinstance(error, _UNREACHED) and not self._begun:
            self._on_unreached(error)
        self._sink.finish(error)


@attrs.define(eq=False)
class Client:
    """The instances of one endpoint, and streams to them (``dynamo.runtime.Client``)."""

    endpoint: EndpointId
    _planes: Planes
    inhibitions: Inhibitions = attrs.field(factory=Inhibitions)
    _instances: dict[int, Instance] = attrs.field(factory=dict)
    _turn: itertools.count[int] = attrs.field(factory=itertools.count)
    #: The turn of requests that others have failed. They take none of the first ones: else all
    #: of these would begin with the one of two instances that always refuses.
    _turn_again: itertools.count[int] = attrs.field(factory=itertools.count)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: Requests for which there is only a worker with none of our planes.
    _unasked: Seldom = attrs.field(factory=lambda: Seldom(TELL_EVERY))

    def instance_ids(self) -> list[int]:
        """The ids of all known instances, in the order in which they were found."""
        return list(self._instances)

    def instances(self) -> list[Instance]:
        """All known instances."""
        return list(self._instances.values())

    async def wait_for_instances(self) -> list[int]:
        """Wait until there is at least one instance."""
        await trio.lowlevel.checkpoint()
        while not self._instances:
            with trio.move_on_after(TELL_EVERY) as waited:
                await self._changed.park()
            if waited.cancelled_caught:
                logger.info("still waiting for a worker that serves %s", self.endpoint)
        return self.instance_ids()

    async def wait_changed(self) -> None:
        """Wait until an instance comes, changes or goes."""
        await self._changed.park()

    def pick(self, without: Collection[int] = ()) -> Instance:
        """The next instance in turn, but none with an id in ``without``: those failed before.

        Raises:
            NoWorker: there is none that takes requests.
        """
        return self._choose(next(self._turn_again if without else self._turn), without)

    def pick_random(self, without: Collection[int] = ()) -> Instance:
        """An instance at random; otherwise as :meth:`pick`.

        Raises:
            NoWorker: there is none that takes requests.
        """
        return self._choose(random.getrandbits(32), without)

    def find(self, instance_id: int) -> Instance:
        """The instance with this id.

        Raises:
            NoWorker: it is not, or no longer, there.
        """
        try:
            return self._instances[instance_id]
        except KeyError:
            raise NoWorker(f"there is no instance {instance_id:x} of {self.endpoint}") from None

    def _choose(self, number: int, without: Collection[int]) -> Instance:
        """The instance with this number, among those that may be asked.

        As a rule that is everybody; so only the one that is chosen is looked at, and the rest
        if it may not be asked.
        """
        likely = self.inhibitions.filter(self._others(without))
        if likely and self._takes_requests(one := likely[number % len(likely)]):
            return one
        some = self.inhibitions.filter(self._willing(without))
        return some[number % len(some)]

    def _takes_requests(self, instance: Instance) -> bool:
        at = instance.transports
        return self._planes.speak(at) and not self._planes.avoid(at)

    def _others(self, without: Collection[int]) -> list[Instance]:
        if not without:
            return self.instances()
        return [i for i in self._instances.values() if i.instance_id not in without]

    def _willing(self, without: Collection[int]) -> list[Instance]:
        """Everybody who takes requests, as far as is known; raises if that is nobody."""
        if not self._instances:
            raise NoWorker(f"no worker serves {self.endpoint} at the moment")
        if willing := [i for i in self._others(without) if self._takes_requests(i)]:
            return willing
        if without:
            raise NoWorker(f"no other worker of {self.endpoint} can be asked")
        if any(self._planes.speak(i.transports) for i in self.instances()):
            raise NoWorker(f"every worker of {self.endpoint} is stopping, or does not answer")
        unlike = self._planes.unlike(self.instances()[0].transports)
        text = "no worker of %s can be asked: one of them %s"
        self._unasked.log(logger, logging.WARNING, text, self.endpoint, unlike)
        raise NoWorker(f"no worker of {self.endpoint} has a request plane that is spoken here")

    def open_stream(
        self,
        instance: Instance,
        head: RequestHead,
        request: object,
        sink: ItemSink,
        *,
        deadline: float = math.inf,
        scopes_tell: bool = True,
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send ``request`` to ``instance``, in its codec; its items go to ``sink``.

        Without headers of its own it belongs to the trace of the current task, if that has one.
        Where ``head`` says that the request streams in, ``request`` is not looked at. The
        instance is told when the caller stops waiting: at ``deadline`` on Trio's clock, or when
        a cancel scope around this ends. Without ``scopes_tell`` only ``deadline`` is told: all
        scopes around this are gone through for it, which takes a while.

        An instance that cannot be reached is left out of the choice for a while.

        Raises:
            CannotConnect: no plane of ours reaches the instance, or nobody answers.
            ConnectionTimeout: it does not answer in time.
            Draining, Overloaded: the instance refused.
        """
        return _Opening(self, instance, head, request, sink, deadline, scopes_tell)

    def note_unreached(self, instance: Instance, error: DynamoException) -> None:
        """Leave it out for a while, unless a plane does so already, for just as long as needed."""
        if not self._planes.avoid(instance.transports):
            self.inhibitions.note(instance, error)

    def send(
        self, instance: Instance, head: RequestHead, request: object, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """As :meth:`open_stream`, for a head that says everything."""
        sink.expect(head.codec)
        payload = b"" if head.streams_in else head.codec.encode(request)
        return self._planes.open_stream(
            partial(_name, instance), instance.transports, head, payload, sink
        )

    # --- asking ---------------------------------------------------------------------------

    def generate(
        self, request: object, context: Context | None = None, *, item_type: type[T] = _ANY
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Ask whichever instance is next; the same as :meth:`round_robin`."""
        return self.round_robin(request, context, item_type=item_type)

    def round_robin(
        self, request: object, context: Context | None = None, *, item_type: type[T] = _ANY
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Ask the next instance in turn, and iterate over its items while the block runs.

        Leaving the block early cancels the request. With ``context`` the request has its id
        and metadata, and ends when it is stopped or killed. Items are of ``item_type``, or
        plain lists, maps and numbers.

        Raises:
            NoWorker: there is no instance.
            DynamoException: as :meth:`open_stream`; iterating raises what the worker raised.
        """
        return self._ask(self.pick, request, context, item_type)

    def random(
        self, request: object, context: Context | None = None, *, item_type: type[T] = _ANY
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Ask an instance at random; otherwise as :meth:`round_robin`."""
        return self._ask(self.pick_random, request, context, item_type)

    def direct(
        self,
        request: object,
        instance_id: int,
        context: Context | None = None,
        *,
        item_type: type[T] = _ANY,
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        """Ask the instance with this id; otherwise as :meth:`round_robin`."""
        return self._ask(lambda: self.find(instance_id), request, context, item_type)

    def bidirectional(
        self,
        context: Context | None = None,
        *,
        instance_id: int | None = None,
        item_type: type[T] = _ANY,
    ) -> AbstractAsyncContextManager[BidirectionalStream[T]]:
        """Ask an endpoint whose requests stream in: the next instance in turn, or this one.

        What is entered sends items and iterates over the answer's; everything else is as for
        :meth:`round_robin`. Leaving the block early cancels the request.
        """
        stream = BidirectionalStream(item_type)
        if instance_id is None:
            return self._exchange(self.pick, None, context, stream)
        return self._exchange(lambda: self.find(instance_id), None, context, stream)

    def _ask(
        self,
        choose: Callable[[], Instance],
        request: object,
        context: Context | None,
        item_type: type[T],
    ) -> AbstractAsyncContextManager[ResponseStream[T]]:
        return self._exchange(choose, request, context, ResponseStream(item_type))

    @asynccontextmanager
    async def _exchange(
        self,
        choose: Callable[[], Instance],
        request: object,
        context: Context | None,
        stream: S,
    ) -> AsyncIterator[S]:
        asking = context or Context()
        streams_in = isinstance(stream, BidirectionalStream)
        headers = asking.trace.headers() if asking.trace else {}
        head = RequestHead(asking.id(), asking.metadata, streams_in=streams_in, headers=headers)
        opening = self.open_stream(
            choose(), head, request, stream, deadline=asking.prospects.deadline
        )
        async with opening as handle:
            stream.attach(handle)
            asking.link(stream)
            try:
                yield stream
            finally:
                asking.unlink(stream)

    # --- the view -------------------------------------------------------------------------

    def update(self, instance: Instance, *, present: bool) -> None:
        """Note that an instance came, changed or went."""
        known = self._instances.get(instance.instance_id)
        if known != instance:
            self.inhibitions.lift(instance.instance_id)
        if not present:
            self._forget(instance.instance_id)
        elif known != instance:
            self._instances[instance.instance_id] = instance
            self._planes.found(instance.transports, _name(instance))
            if known is not None:  # what both have in common is never out of sight
                self._planes.gone(known.transports, _name(known))
        self._changed.unpark_all()

    def close(self) -> None:
        """Forget all instances: nobody will tell of their end any more."""
        for instance_id in self.instance_ids():
            self._forget(instance_id)

    def _forget(self, instance_id: int) -> None:
        self.inhibitions.lift(instance_id)
        gone = self._instances.pop(instance_id, None)
        if gone is not None:
            self._planes.gone(gone.transports, _name(gone))


@attrs.define(eq=False)
class _Opening:
    """See :meth:`Client.open_stream`. A class, and no generator, since it is for every request."""

    _client: Client
    _instance: Instance
    _head: RequestHead
    _request: object
    _sink: ItemSink
    _deadline: float
    _scopes_tell: bool
    _inner: AbstractAsyncContextManager[ClientStream] = attrs.field(init=False)

    async def __aenter__(self) -> ClientStream:
        client, instance = self._client, self._instance
        note = partial(client.note_unreached, instance)
        try:
            sink = _Listener(self._sink, note)
            self._inner = client.send(instance, self._whole_head(), self._request, sink)
            return await self._inner.__aenter__()
        except _UNREACHED as exc:
            note(exc)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, value, trace)

    def _whole_head(self) -> RequestHead:
        head = self._head
        deadline, metadata = self._deadline, head.metadata
        if self._scopes_tell:
            deadline = min(deadline, trio.current_effective_deadline())
        if deadline < math.inf:
            metadata = with_deadline(metadata, deadline - trio.current_time())
        told = trace.get()
        return RequestHead(
            head.request_id,
            metadata,
            self._instance.codec,
            head.sent_at_ns,
            head.streams_in,
            head.annotated,
            head.headers or (told.headers() if told else {}),
        )


def _name(instance: Instance) -> str:
    """As it stands in the log."""
    return f"instance {instance.instance_id:x} of {instance.endpoint}"


@asynccontextmanager
async def open_client(
    endpoint: EndpointId,
    discovery: Discovery,
    planes: Mapping[str, RequestPlane],
    *,
    inhibited: float = INHIBITED,
) -> AsyncIterator[Client]:
    """A client whose view of the instances is kept fresh while the block runs.

    ``planes``: which of them it takes where an instance offers several is their order; clients
    that share them give the same :class:`~dynamo_trio.plane.Planes`. ``inhibited``:
    seconds for which an instance that could not be reached is left out; 0: none.
    """
    client = Client(endpoint, Planes.of(planes), Inhibitions(inhibited))
    async with discovery.watch(Instance) as watch, trio.open_nursery() as nursery:
        for instance in watch.snapshot.values():
            _apply(client, Put(instance))
        nursery.start_soon(_follow, client, watch)
        try:
            yield client
        finally:
            nursery.cancel_scope.cancel("the client is closed")
            client.close()


async def _follow(client: Client, watch: Any) -> None:
    while True:
        _apply(client, await watch.next_change())


def _apply(client: Client, change: Any) -> None:
    if change.record.endpoint == client.endpoint:
        client.update(change.record, present=isinstance(change, Put))
