"""Calling an endpoint: which instances there are, and which one is next.

The instances come from a discovery watch that runs in a nursery task; choosing
one is a plain call on the last known view, so a store that is away costs nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import msgspec
import trio

from dynamo_trio.discovery import Discovery, EndpointId, Instance, Put
from dynamo_trio.errors import CannotConnect, DynamoException, NoWorker, StreamIncomplete

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from dynamo_trio.plane import ClientStream, ItemSink, RequestHead, RequestPlane

T = TypeVar("T")

logger = logging.getLogger("dynamo_trio.client")

encode = msgspec.msgpack.Encoder().encode

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
        """The next instance in turn (round robin).

        Raises:
            NoWorker: there is none.
        """
        if not self._instances:
            raise NoWorker(f"no worker serves {self.endpoint} at the moment")
        instances = self.instances()
        return instances[next(self._turn) % len(instances)]

    def direct(self, instance_id: int) -> Instance:
        """The instance with this id.

        Raises:
            NoWorker: it is not, or no longer, there.
        """
        try:
            return self._instances[instance_id]
        except KeyError:
            raise NoWorker(f"there is no instance {instance_id:x} of {self.endpoint}") from None

    def open_stream(
        self, instance: Instance, head: RequestHead, request: object, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send ``request`` to ``instance``; its items go to ``sink``.

        Raises:
            CannotConnect: no plane of ours reaches the instance, or nobody answers.
            Draining, Overloaded: the instance refused.
        """
        for name, plane in self._planes.items():
            if name in instance.transports:
                return plane.open_stream(instance.transports[name], head, encode(request), sink)
        raise CannotConnect(
            f"the worker offers {sorted(instance.transports)}, none of which is spoken here"
        )

    @asynccontextmanager
    async def generate(
        self, request: object, head: RequestHead, item_type: type[T]
    ) -> AsyncIterator[ResponseStream[T]]:
        """Call the next instance in turn and iterate over its items.

        Leaving the block early cancels the request.
        """
        stream = ResponseStream(item_type)
        async with self.open_stream(self.pick(), head, request, stream) as handle:
            stream.on_taken = handle.grant
            yield stream

    def update(self, instance: Instance, *, present: bool) -> None:
        """Note that an instance came, changed or went."""
        if present:
            self._instances[instance.instance_id] = instance
        else:
            self._instances.pop(instance.instance_id, None)
        self._changed.unpark_all()


@attrs.define(eq=False)
class ResponseStream(Generic[T]):
    """The items of one stream as an asynchronous iterator. One reader."""

    item_type: type[T]
    on_taken: Callable[[int], None] = lambda _: None
    _items: deque[bytes] = attrs.field(factory=deque)
    _decoder: msgspec.msgpack.Decoder[T] = attrs.field(init=False)
    _error: DynamoException | None = None
    _ended: bool = False
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(self.item_type)

    def feed(self, payloads: Sequence[bytes]) -> None:
        self._items.extend(payloads)
        self._lot.unpark()

    def finish(self, error: DynamoException | None) -> None:
        self._ended = True
        self._error = error
        self._lot.unpark()

    def __aiter__(self) -> ResponseStream[T]:
        return self

    async def __anext__(self) -> T:
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self._ended:
                raise self._error or StopAsyncIteration
            await self._lot.park()
        self.on_taken(1)
        return self._decode(self._items.popleft())

    def _decode(self, payload: bytes) -> T:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as exc:
            raise StreamIncomplete(f"the worker sent an item that cannot be read: {exc}") from None


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
