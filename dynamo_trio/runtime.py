"""The distributed runtime: names, registrations and the nurseries that hold them.

``open_runtime`` is the nest in which everything that talks to other processes
lives. Leaving it withdraws what was registered.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.client import Client, open_client
from dynamo_trio.component_metrics import ComponentMetrics
from dynamo_trio.discovery import (
    Discovery,
    EndpointId,
    Instance,
    MemoryDiscovery,
    ModelCard,
    Record,
)
from dynamo_trio.endpoint import EndpointService, Handler
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.plane import MemoryPlane, RequestPlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence


logger = logging.getLogger("dynamo_trio.runtime")

#: How long an unregistering waits for accepted requests to be seen as begun, in seconds.
SETTLE = 1.0


@attrs.define(eq=False)
class DistributedRuntime:
    """One process's place in the fleet (``dynamo.runtime.DistributedRuntime``)."""

    lifecycle: Lifecycle
    discovery: Discovery
    planes: Mapping[str, RequestPlane]
    nursery: trio.Nursery
    instance_id: int = attrs.field(init=False)
    metrics: ComponentMetrics = attrs.field(factory=ComponentMetrics)
    #: Requests that each endpoint takes on at once (``DYN_ENGINE_REQUEST_LIMIT``).
    request_limit: float = math.inf
    #: Invariant: an instance is in here exactly while others may find it.
    _registered: dict[str, Instance] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.instance_id = self.discovery.assign_instance_id()

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint ``ns.comp.ep``, to be served or called.

        Raises:
            InvalidArgument: the name has not three parts.
        """
        return Endpoint(self, EndpointId.parse(name))

    def shutdown(self) -> None:
        """Begin the graceful stop and return at once. Idempotent."""
        self.lifecycle.request_stop("runtime.shutdown()")

    async def register(self, instance: Instance) -> None:
        """Let others find this instance."""
        await self.discovery.register(instance)
        self._registered[instance.key] = instance

    async def unregister(self, instance: Instance) -> None:
        """Leave the routing pool; requests that are running, or still arrive, are served."""
        if self._registered.pop(instance.key, None) is not None:
            await self.discovery.unregister(instance)

    async def unregister_all(self) -> None:
        """Withdraw every instance of this process, all at once."""
        await self._settle()
        async with trio.open_nursery() as nursery:
            for instance in list(self._registered.values()):
                nursery.start_soon(self.unregister, instance)

    async def _settle(self) -> None:
        with trio.move_on_after(SETTLE):
            for plane in self.planes.values():
                await plane.settle()


@attrs.frozen(eq=False)
class Endpoint:
    """A name that can be served or called (``dynamo.runtime.Endpoint``)."""

    runtime: DistributedRuntime
    id: EndpointId

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A client of this endpoint, to be entered with ``async with``."""
        return open_client(self.id, self.runtime.discovery, self.runtime.planes)

    @asynccontextmanager
    async def serving(
        self,
        handler: Handler,
        *,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        request_type: type = object,
        card: ModelCard | None = None,
    ) -> AsyncIterator[Instance]:
        """Serve the endpoint while the block runs; entered, it is registered.

        ``metrics_labels`` are further labels of its metrics. Requests are decoded to
        ``request_type``, or to plain lists, maps and numbers.

        Leaving the block waits for nothing: requests that still run are cancelled.
        The orderly way out is the lifecycle's, which waits before this block is left.
        """
        runtime = self.runtime
        async with trio.open_nursery() as requests:
            service = EndpointService(
                self.id.name,
                handler,
                runtime.lifecycle.work,
                requests,
                runtime.lifecycle,
                runtime.metrics.endpoint(self.id, runtime.instance_id, metrics_labels or ()),
                graceful=graceful_shutdown,
                request_type=request_type,
                request_limit=runtime.request_limit,
            )
            async with self._announced(service, card) as instance:
                yield instance
            requests.cancel_scope.cancel("the endpoint is closed")

    @asynccontextmanager
    async def _announced(
        self, service: EndpointService, card: ModelCard | None
    ) -> AsyncIterator[Instance]:
        runtime = self.runtime
        path = f"{runtime.instance_id:x}/{self.id.name}"
        async with _serve_on_all(runtime.planes, path, service) as transports:
            instance = Instance(self.id, runtime.instance_id, transports)
            records: list[Record] = [instance] if card is None else [card, instance]
            try:
                for record in records:
                    await _publish(runtime, record)
                yield instance
            finally:
                with runtime.lifecycle.cleanup(2.0):
                    await _withdraw(runtime, reversed(records))

    async def serve_endpoint(self, handler: Handler, graceful_shutdown: bool = True) -> None:
        """Serve until the process has stopped (``dynamo.runtime``'s form of :meth:`serving`)."""
        async with self.serving(handler, graceful_shutdown=graceful_shutdown):
            await self.runtime.lifecycle.wait_stopped()


async def _publish(runtime: DistributedRuntime, record: Record) -> None:
    if isinstance(record, Instance):
        await runtime.register(record)
        logger.info("serving %s as instance %x", record.endpoint, record.instance_id)
    else:
        await runtime.discovery.register(record)


async def _withdraw(runtime: DistributedRuntime, records: Iterable[Record]) -> None:
    for record in records:
        if isinstance(record, Instance):
            await runtime.unregister(record)
        else:
            await runtime.discovery.unregister(record)


@asynccontextmanager
async def _serve_on_all(
    planes: Mapping[str, RequestPlane], path: str, service: EndpointService
) -> AsyncIterator[dict[str, str]]:
    """Serve on every plane; yields plane name -> address."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(plane.serve(path, service))
            for name, plane in planes.items()
        }


@asynccontextmanager
async def open_runtime(
    lifecycle: Lifecycle | None = None,
    *,
    discovery: Discovery | None = None,
    planes: Iterable[RequestPlane] = (),
) -> AsyncIterator[DistributedRuntime]:
    """The runtime of one process; by default everything in memory (``mem``).

    Without a ``lifecycle`` it has one of its own, which is stopped gracefully when the
    block is left. A program that gives one runs it, and stops it, itself.
    """
    chosen = {plane.name: plane for plane in planes} or {MemoryPlane.name: MemoryPlane()}
    async with trio.open_nursery() as nursery:
        if lifecycle is None:
            own = lifecycle = Lifecycle(Timetable())
            nursery.start_soon(own.run)
        else:
            own = None
        runtime = DistributedRuntime(lifecycle, discovery or MemoryDiscovery(), chosen, nursery)
        lifecycle.on_unregister(runtime.unregister_all)
        yield runtime
        if own is not None:
            own.request_stop("the runtime is left")
            await own.wait_stopped()
        nursery.cancel_scope.cancel("the runtime is closed")
