"""Calling an endpoint: which instances there are, and which one is next.

The instances come from a discovery watch that runs in a nursery task; choosing
one is a plain call on the last known view, so a store that is away costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import random
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
from typing_extensions import TypeVar

from dynamo_trio.context import Context
from dynamo_trio.discovery import Discovery, EndpointId, Instance, Put
from dynamo_trio.errors import CannotConnect, NoWorker
from dynamo_trio.plane import RequestHead
from dynamo_trio.response_stream import ResponseStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from dynamo_trio.plane import ClientStream, ItemSink, RequestPlane

T = TypeVar("T", default=Any)

logger = logging.getLogger("dynamo_trio.client")

#: Items as plain lists, maps and numbers.
_ANY: Any = object

#: How often a wait for the first instance is told of, in seconds.
TELL_EVERY = 10.0


@attrs.define(eq=False)
class Client:
    """The instances of one endpoint, and streams to them (``dynamo.runtime.Client``)."""

    endpoint: EndpointId
    _planes: Mapping[str, RequestPlane]
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
        return self.instances()

    def open_stream(
        self, instance: Instance, head: RequestHead, request: object, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send ``request`` to ``instance``, in its codec; its items go to ``sink``.

        Raises:
            CannotConnect: no plane of ours reaches the instance, or nobody answers.
            Draining, Overloaded: the instance refused.
        """
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
        if present:
            self._instances[instance.instance_id] = instance
        else:
            self._forget(instance.instance_id)
        self._changed.unpark_all()

    def _forget(self, instance_id: int) -> None:
        gone = self._instances.pop(instance_id, None)
        for name, address in () if gone is None else gone.transports.items():
            if name in self._planes:
                self._planes[name].instance_gone(address)


@asynccontextmanager
async def open_client(
    endpoint: EndpointId, discovery: Discovery, planes: Mapping[str, RequestPlane]
) -> AsyncIterator[Client]:
    """A client whose view of the instances is kept fresh while the block runs."""
    client = Client(endpoint, planes)
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
