"""The distributed runtime: names, registrations and the nurseries that hold them.

``open_runtime`` is the nest in which everything that talks to other processes
lives. Leaving it withdraws what was registered.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.client import INHIBITED, Client, open_client
from dynamo_trio.discovery import (
    Discovery,
    EndpointId,
    Instance,
    MemoryDiscovery,
    ModelCard,
)
from dynamo_trio.endpoint import EndpointService, Handler
from dynamo_trio.errors import InvalidArgument
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.metrics.component import ComponentMetrics
from dynamo_trio.plane import MemoryPlane, RequestPlane
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence


#: What a status server calls for ``/engine/{route}``.
EngineRoute = Callable[[dict[str, object]], Awaitable[object]]

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
    metrics: ComponentMetrics = attrs.field(init=False)
    #: Requests that each endpoint takes on at once (``DYN_ENGINE_REQUEST_LIMIT``).
    request_limit: float = math.inf
    #: In which our endpoints want their requests (``DYN_REQUEST_PLANE_CODEC``).
    codec: Codec = MSGPACK
    #: For how long clients leave out an instance that they could not reach, in seconds.
    inhibited: float = INHIBITED
    #: Routes below ``/engine/`` of the status server; see :meth:`register_engine_route`.
    engine_routes: dict[str, EngineRoute] = attrs.field(factory=dict)
    #: Where other machines reach the status server of this process; None: there is none.
    status_url: str | None = None
    #: Told of each card before others can see it, so that its files can be offered.
    offer_card: Callable[[ModelCard], object] = lambda card: None
    #: Others could find an endpoint of this process, at least once.
    was_found: bool = False
    #: Every instance that is being served, found by others or not.
    _served: dict[EndpointId, Instance] = attrs.field(factory=dict)
    #: Invariant: holds every instance that others may find, from before they can.
    _registered: dict[str, Instance] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.instance_id = self.discovery.assign_instance_id()
        self.metrics = ComponentMetrics(f"{self.instance_id:x}")
        self.metrics.work.watch(lambda: self.lifecycle.work.count, lambda: self.request_limit)

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint ``ns.comp.ep``, to be served or called.

        Raises:
            InvalidArgument: the name has not three parts.
        """
        return Endpoint(self, EndpointId.parse(name))

    def register_engine_route(self, route: str, callback: EngineRoute) -> None:
        """Answer ``/engine/{route}`` of the status server with ``callback``.

        It takes the body as a dict, and returns a dict or a list, which is sent as JSON.

        Raises:
            ValueError: the route is taken, or it is empty or begins with a slash.
        """
        if not route or route.startswith("/") or route in self.engine_routes:
            raise ValueError(f"engine route {route!r}: must be new, not empty, with no slash first")
        self.engine_routes[route] = callback

    def shutdown(self) -> None:
        """Begin the graceful stop and return at once. Idempotent."""
        self.lifecycle.request_stop("runtime.shutdown()")

    async def register(self, instance: Instance) -> None:
        """Let others find this instance. A process that is stopping stays unfound."""
        if self.lifecycle.stopping:
            logger.info("%s is not registered: the process is stopping", instance.endpoint)
            await trio.lowlevel.checkpoint()
            return
        self._registered[instance.key] = instance
        await self.discovery.register(instance)
        if instance.key not in self._registered:
            return  # it was withdrawn while this waited
        self.was_found = True
        logger.info("serving %s as instance %x", instance.endpoint, instance.instance_id)

    def served(self, endpoint: EndpointId) -> Instance:
        """The instance of an endpoint that is being served here.

        Raises:
            InvalidArgument: it is not.
        """
        if endpoint not in self._served:
            raise InvalidArgument(f"{endpoint} is not served by this process")
        return self._served[endpoint]

    def endpoint_states(self) -> dict[str, bool]:
        """Name of every endpoint that is served here -> may others find it?"""
        states: dict[str, bool] = {}
        for endpoint, instance in self._served.items():
            found = instance.key in self._registered
            states[endpoint.name] = states.get(endpoint.name, True) and found
        return states

    @contextmanager
    def serves(self, instance: Instance) -> Iterator[None]:
        """Note that ``instance`` is served while the block runs."""
        self._served[instance.endpoint] = instance
        try:
            yield
        finally:
            del self._served[instance.endpoint]

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

    def connection_id(self) -> int:
        """The instance id under which this process serves."""
        return self.runtime.instance_id

    async def register_endpoint_instance(self) -> None:
        """Come back into the routing pool after :meth:`unregister_endpoint_instance`.

        Takes some seconds where peers remember the removal for a while and would fail what
        they sent here meanwhile.

        Raises:
            InvalidArgument: the endpoint is not served here.
        """
        await self.runtime.register(self.runtime.served(self.id))

    async def unregister_endpoint_instance(self) -> None:
        """Leave the routing pool; requests that are running, or still arrive, are served.

        Raises:
            InvalidArgument: the endpoint is not served here.
        """
        await self.runtime.unregister(self.runtime.served(self.id))

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A client of this endpoint, to be entered with ``async with``."""
        runtime = self.runtime
        return open_client(self.id, runtime.discovery, runtime.planes, inhibited=runtime.inhibited)

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
        ``request_type``, or to plain lists, maps and numbers. With a ``card`` frontends offer
        its model (:func:`~dynamo_trio.models.card_builder.make_card`).

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
                runtime.metrics.endpoint(self.id, metrics_labels or ()),
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
            instance = Instance(self.id, runtime.instance_id, transports, runtime.codec)
            with runtime.serves(instance):
                try:
                    if card is not None:
                        runtime.offer_card(card)
                        await runtime.discovery.register(card)
                    await runtime.register(instance)
                    yield instance
                finally:
                    with runtime.lifecycle.cleanup(2.0):
                        await runtime.unregister(instance)
                        if card is not None:
                            await runtime.discovery.unregister(card)

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        health_check_payload: Mapping[str, object] | None = None,
    ) -> None:
        """Serve until the process has stopped (``dynamo.runtime``'s form of :meth:`serving`).

        Raises:
            InvalidArgument: there is a ``health_check_payload``: nothing would ever send it.
        """
        if health_check_payload is not None:
            raise InvalidArgument(
                "health_check_payload: canary health checks are not there yet; leave it None",
                param="health_check_payload",
            )
        serving = self.serving(
            handler, graceful_shutdown=graceful_shutdown, metrics_labels=metrics_labels
        )
        async with serving:
            await self.runtime.lifecycle.wait_stopped()


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
    codec: Codec = MSGPACK,
    request_limit: float = math.inf,
    inhibited: float = INHIBITED,
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
        runtime = DistributedRuntime(
            lifecycle,
            discovery or MemoryDiscovery(),
            chosen,
            nursery,
            codec=codec,
            request_limit=request_limit,
            inhibited=inhibited,
        )
        lifecycle.on_unregister(runtime.unregister_all)
        yield runtime
        if own is not None:
            own.request_stop("the runtime is left")
            await own.wait_stopped()
        nursery.cancel_scope.cancel("the runtime is closed")
