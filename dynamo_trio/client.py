"""Calling an endpoint: which instances there are, and which one is next.

The instances come from a discovery watch that runs in a nursery task; choosing
one is a plain call on the last known view, so a store that is away costs nothing.

A worker that dies stays in that view until its registration expires. So an instance that
could not be reached is left out of the choice for a while (:class:`Inhibitions`).
"""

from __future__ import annotations

import itertools
import logging
import random
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.context import Context
from dynamo_trio.discovery import Discovery, EndpointId, Instance, Put
from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    NoWorker,
)
from dynamo_trio.plane import RequestHead
from dynamo_trio.response_stream import ResponseStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from dynamo_trio.plane import ClientStream, ItemSink, RequestPlane
    from dynamo_trio.wire.dynamo.codec import Codec

T = TypeVar("T", default=Any)

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

    def expect(self, codec: Codec) -> None:
        self._sink.expect(codec)

    def feed(self, payloads: Sequence[bytes]) -> None:
        self._begun = True
        self._sink.feed(payloads)

    def finish(self, error: DynamoException | None) -> None:
        if isinstance(error, _UNREACHED) and not self._begun:
            self._on_unreached(error)
        self._sink.finish(error)


@attrs.define(eq=False)
class Client:
    """The instances of one endpoint, and streams to them (``dynamo.runtime.Client``)."""

    endpoint: EndpointId
    _planes: Mapping[str, RequestPlane]
    inhibitions: Inhibitions = attrs.field(factory=Inhibitions)
    _instances: dict[int, Instance] = attrs.field(factory=dict)
    _turn: itertools.count[int] = attrs.field(factory=itertools.count)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

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

    def pick(self) -> Instance:
        """The next instance in turn.

        Raises:
            NoWorker: there is none.
        """
        instances = self._some()
        return instances[next(self._turn) % len(instances)]

    def pick_random(self) -> Instance:
        """An instance at random.

        Raises:
            NoWorker: there is none.
        """
        return random.choice(self._some())

    def find(self, instance_id: int) -> Instance:
        """The instance with this id.

        Raises:
            NoWorker: it is not, or no longer, there.
        """
        try:
            return self._instances[instance_id]
        except KeyError:
            raise NoWorker(f"there is no instance {instance_id:x} of {self.endpoint}") from None

    def _some(self) -> list[Instance]:
        if not self._instances:
            raise NoWorker(f"no worker serves {self.endpoint} at the moment")
        return self.inhibitions.filter(self.instances())

    @asynccontextmanager
    async def open_stream(
        self, instance: Instance, head: RequestHead, request: object, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        """Send ``request`` to ``instance``, in its codec; its items go to ``sink``.

        An instance that cannot be reached is left out of the choice for a while.

        Raises:
            CannotConnect: no plane of ours reaches the instance, or nobody answers.
            ConnectionTimeout: it does not answer in time.
            Draining, Overloaded: the instance refused.
        """
        note = partial(self.inhibitions.note, instance)
        async with AsyncExitStack() as stack:
            try:
                opening = self._open(instance, head, request, _Listener(sink, note))
                stream = await stack.enter_async_context(opening)
            except _UNREACHED as exc:
                note(exc)
                raise
            yield stream

    def _open(
        self, instance: Instance, head: RequestHead, request: object, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        sink.expect(instance.codec)
        head = attrs.evolve(head, codec=instance.codec)
        for name, plane in self._planes.items():
            if name in instance.transports:
                payload = head.codec.encode(request)
                return plane.open_stream(instance.transports[name], head, payload, sink)
        raise CannotConnect(
            f"the worker offers {sorted(instance.transports)}, none of which is spoken here"
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

    @asynccontextmanager
    async def _ask(
        self,
        choose: Callable[[], Instance],
        request: object,
        context: Context | None,
        item_type: type[T],
    ) -> AsyncIterator[ResponseStream[T]]:
        asking = context or Context()
        head = RequestHead(asking.id(), asking.metadata)
        stream = ResponseStream(item_type)
        async with self.open_stream(choose(), head, request, stream) as handle:
            stream.attach(handle)
            asking.link(stream)
            try:
                yield stream
            finally:
                asking.unlink(stream)

    # --- the view -------------------------------------------------------------------------

    def update(self, instance: Instance, *, present: bool) -> None:
        """Note that an instance came, changed or went."""
        if self._instances.get(instance.instance_id) != instance:
            self.inhibitions.lift(instance.instance_id)
        if present:
            self._instances[instance.instance_id] = instance
        else:
            self._forget(instance.instance_id)
        self._changed.unpark_all()

    def _forget(self, instance_id: int) -> None:
        self.inhibitions.lift(instance_id)
        gone = self._instances.pop(instance_id, None)
        for name, address in () if gone is None else gone.transports.items():
            if name in self._planes:
                self._planes[name].instance_gone(address)


@asynccontextmanager
async def open_client(
    endpoint: EndpointId,
    discovery: Discovery,
    planes: Mapping[str, RequestPlane],
    *,
    inhibited: float = INHIBITED,
) -> AsyncIterator[Client]:
    """A client whose view of the instances is kept fresh while the block runs.

    ``inhibited``: seconds for which an instance that could not be reached is left out; 0: none.
    """
    client = Client(endpoint, planes, Inhibitions(inhibited))
    async with discovery.watch(Instance) as watch, trio.open_nursery() as nursery:
        for instance in watch.snapshot.values():
            _apply(client, Put(instance))
        nursery.start_soon(_follow, client, watch)
        try:
            yield client
        finally:
            nursery.cancel_scope.cancel("the client is closed")


async def _follow(client: Client, watch: Any) -> None:
    while True:
        _apply(client, await watch.next_change())


def _apply(client: Client, change: Any) -> None:
    if change.record.endpoint == client.endpoint:
        client.update(change.record, present=isinstance(change, Put))
