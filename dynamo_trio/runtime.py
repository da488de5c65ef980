"""The distributed runtime: names, registrations and the nurseries that hold them.

``open_runtime`` is the nest in which everything that talks to other processes
lives. Leaving it withdraws what was registered.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
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
from dynamo_trio.endpoint import AnyHandler, EndpointService
from dynamo_trio.errors import InvalidArgument, LocalProtocolError
from dynamo_trio.events import EventPlane, MemoryEvents
from dynamo_trio.health import Canary, CanarySettings, watched
from dynamo_trio.lifecycle import Gate, Lifecycle, Timetable
from dynamo_trio.membership import Membership
from dynamo_trio.metrics.component import ComponentMetrics
from dynamo_trio.metrics.planes import PlaneMetrics
from dynamo_trio.metrics.shutdown import ShutdownMetrics
from dynamo_trio.plane import MemoryPlane, Planes, RequestPlane
from dynamo_trio.plane.net.hosts import routable_address
from dynamo_trio.temporary import temporary_folder
from dynamo_trio.turns import Turns
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from dynamo_trio.metrics.component import EndpointMetrics


#: What a status server calls for ``/engine/{route}``.
EngineRoute = Callable[[dict[str, object]], Awaitable[object]]

logger = logging.getLogger("dynamo_trio.runtime")


@attrs.define(eq=False)
class DistributedRuntime(Membership):
    """One process's place in the fleet (``dynamo.runtime.DistributedRuntime``)."""

    nursery: trio.Nursery
    instance_id: int = attrs.field(init=False)
    metrics: ComponentMetrics = attrs.field(init=False)
    #: Requests that each endpoint works on at once (``DYN_ENGINE_REQUEST_LIMIT``).
    request_limit: float = math.inf
    #: Requests that may wait for that (``DYN_DYNAMO_REQUEST_QUEUE_LIMIT``).
    queue_limit: int = 0
    #: In which our endpoints want their requests (``DYN_REQUEST_PLANE_CODEC``).
    codec: Codec = MSGPACK
    #: For how long clients leave out an instance that they could not reach, in seconds.
    inhibited: float = INHIBITED
    #: How this process tells events, and hears those of others.
    events: EventPlane = attrs.field(factory=MemoryEvents)
    #: Whether, when and with what endpoints with a payload are checked.
    canary: CanarySettings = attrs.field(factory=CanarySettings)
    #: Routes below ``/engine/`` of the status server; see :meth:`register_engine_route`.
    engine_routes: dict[str, EngineRoute] = attrs.field(factory=dict)
    #: Where other machines reach the status server of this process; None: there is none.
    status_url: str | None = None
    #: Told of each card before others can see it, so that its files can be offered.
    offer_card: Callable[[ModelCard], object] = lambda card: None
    #: What the program itself says of its health (:meth:`set_health_status`); None: nothing.
    declared_ready: bool | None = None

    def __attrs_post_init__(self) -> None:
        self.instance_id = self.discovery.assign_instance_id()
        self.metrics = ComponentMetrics(f"{self.instance_id:x}")
        self.metrics.registry.register(PlaneMetrics(self.planes))
        self.metrics.registry.register(ShutdownMetrics(self.lifecycle))
        self.metrics.work.watch(
            lambda: self.lifecycle.work.count, self.request_limit, self.queue_limit
        )

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

    def set_health_status(self, ready: bool) -> None:
        """Say whether the process as a whole is healthy, besides what its endpoints say.

        False: ``/health`` is 503 whatever they say. True: it is 200 without any, too. An endpoint
        that is not ready, a drain or a stop make it 503 all the same.
        """
        self.declared_ready = ready

    def shutdown(self) -> None:
        """Begin the graceful stop and return at once. Idempotent."""
        self.lifecycle.request_stop("runtime.shutdown()")

    def temporary_folder(self, prefix: str = "dynamo_trio-") -> AbstractAsyncContextManager[Path]:
        """A new folder for ``async with``, removed when the block is left, however it is left.

        The removal takes at most 5 s, and less where a stop has less time left.

        Raises:
            OSError: when entered: it cannot be made.
        """
        return temporary_folder(self.lifecycle, prefix)


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
        handler: AnyHandler,
        *,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        request_type: type = object,
        card: ModelCard | None = None,
        annotated: bool = True,
        listed: bool = True,
        streams_in: bool = False,
        health_check_payload: Mapping[str, object] | None = None,
    ) -> AsyncIterator[Instance]:
        """Serve the endpoint while the block runs; entered, it is registered.

        ``metrics_labels`` are further labels of its metrics. Requests are decoded to
        ``request_type``, or to plain lists, maps and numbers. With a ``card`` frontends offer
        its model (:func:`~dynamo_trio.models.card_builder.make_card`). ``annotated=False`` is
        for the few endpoints whose items lie in no ``Annotated`` on Dynamo's wire; on that wire
        a failure is then only an answer that breaks off. ``listed=False``: it is a helper of
        others, and the process's health says nothing of it. ``streams_in``: see
        :meth:`serving_bidirectional`.

        With a ``health_check_payload``, and ``DYN_HEALTH_CHECK_ENABLED``, the handler is given it
        as a request now and then (:mod:`dynamo_trio.health.canary`), the first time before the
        endpoint is registered. While it does not answer, the endpoint is not found.

        Leaving the block waits for nothing: requests that still run are cancelled.
        The orderly way out is the lifecycle's, which waits before this block is left.

        Raises:
            InvalidArgument: ``health_check_payload`` is no mapping, or has what the codec cannot
                spell; or requests stream in, and have no payload.
        """
        runtime = self.runtime
        payload = _payload(health_check_payload, runtime.codec, streams_in=streams_in)
        async with trio.open_nursery() as requests:
            make = partial(
                EndpointService,
                self.id.name,
                handler,
                nursery=requests,
                lifecycle=runtime.lifecycle,
                request_type=request_type,
            )
            service = make(
                gate=runtime.lifecycle.work,
                metrics=runtime.metrics.endpoint(self.id, metrics_labels or ()),
                graceful=graceful_shutdown,
                streams_in=streams_in,
                turns=Turns(runtime.request_limit, runtime.queue_limit),
            )
            canary: _CanaryOf | None = None
            if payload is not None and runtime.canary.enabled:
                canary = partial(self._canary, make, service.metrics, payload)
            announced = self._announced(service, card, canary, annotated=annotated, listed=listed)
            async with announced as instance:
                yield instance
            requests.cancel_scope.cancel("the endpoint is closed")

    @asynccontextmanager
    async def _announced(
        self,
        service: EndpointService,
        card: ModelCard | None,
        canary: _CanaryOf | None,
        *,
        annotated: bool,
        listed: bool,
    ) -> AsyncIterator[Instance]:
        runtime = self.runtime
        path = f"{runtime.instance_id:x}/{self.id.name}"
        serving = _serve_on_all(runtime.planes, path, service, annotated=annotated)
        async with serving as transports:
            instance = Instance(self.id, runtime.instance_id, transports, runtime.codec)
            try:
                with runtime.serves(instance, listed=listed):
                    if card is not None:
                        runtime.offer_card(card)
                        await runtime.discovery.register(card)
                    async with AsyncExitStack() as checks:
                        if canary is not None:
                            await runtime.set_healthy(instance, False)
                            await checks.enter_async_context(watched(canary(instance)))
                        await runtime.register(instance)
                        yield instance
            finally:
                with runtime.lifecycle.cleanup(2.0):
                    await runtime.retire(instance, card)

    def _canary(
        self,
        make: Callable[..., EndpointService],
        metrics: EndpointMetrics,
        payload: bytes,
        instance: Instance,
    ) -> Canary:
        """The health checks of an instance: they pass through no gate that a stop waits for,
        and count in no metrics of requests."""
        runtime = self.runtime
        gate = Gate(f"canary of {self.id.name}")
        runtime.lifecycle.watch_probes(gate)
        apart = ComponentMetrics(f"{runtime.instance_id:x}").endpoint(self.id)
        return Canary(
            str(self.id),
            payload,
            runtime.canary,
            make(gate=gate, metrics=apart),
            gate,
            activity=metrics.given,
            wanted=partial(runtime.is_wanted, instance),
            tell=partial(runtime.set_healthy, instance),
            stopping=runtime.lifecycle.wait_stop_requested,
            codec=runtime.codec,
        )

    async def serve_endpoint(
        self,
        handler: AnyHandler,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        health_check_payload: Mapping[str, object] | None = None,
    ) -> None:
        """Serve until the process has stopped (``dynamo.runtime``'s form of :meth:`serving`).

        Raises:
            InvalidArgument: as :meth:`serving`.
        """
        serving = self.serving(
            handler,
            graceful_shutdown=graceful_shutdown,
            metrics_labels=metrics_labels,
            health_check_payload=health_check_payload,
        )
        async with serving:
            await self.runtime.lifecycle.wait_stopped()

    def serving_bidirectional(
        self,
        handler: AnyHandler,
        *,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        request_type: type = object,
        card: ModelCard | None = None,
    ) -> AbstractAsyncContextManager[Instance]:
        """As :meth:`serving`, for requests that stream in.

        The handler is given a :class:`~dynamo_trio.request_stream.RequestStream`, over items of
        ``request_type``, where others are given a request. That it ends says only that the
        client sends no more: the handler goes on until it returns, or
        ``context.is_stopped()``.
        """
        return self.serving(
            handler,
            graceful_shutdown=graceful_shutdown,
            metrics_labels=metrics_labels,
            request_type=request_type,
            card=card,
            streams_in=True,
        )

    async def serve_bidirectional_endpoint(
        self,
        handler: AnyHandler,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """Serve until the process has stopped: ``dynamo.runtime``'s form of
        :meth:`serving_bidirectional`."""
        serving = self.serving_bidirectional(
            handler, graceful_shutdown=graceful_shutdown, metrics_labels=metrics_labels
        )
        async with serving:
            await self.runtime.lifecycle.wait_stopped()


#: Makes the health checks of an instance.
_CanaryOf = Callable[[Instance], Canary]


def _payload(given: object, codec: Codec, *, streams_in: bool) -> bytes | None:
    """A ``health_check_payload`` as a request's; raises InvalidArgument."""
    if given is None:
        return None
    if streams_in:
        raise _bad_payload("requests that stream in have no payload")
    if not isinstance(given, Mapping):
        raise _bad_payload(f"it must be a mapping, not {type(given).__name__}")
    try:
        return codec.encode(dict(given))
    except LocalProtocolError as exc:
        raise _bad_payload(str(exc)) from None


def _bad_payload(why: str) -> InvalidArgument:
    return InvalidArgument(f"health_check_payload: {why}", param="health_check_payload")


@asynccontextmanager
async def _serve_on_all(
    planes: Planes, path: str, service: EndpointService, *, annotated: bool
) -> AsyncIterator[dict[str, str]]:
    """Serve on every plane; yields plane name -> address."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                plane.serve(path, planes.counting(name, service), annotated=annotated)
            )
            for name, plane in planes.items()
        }


def _events_for(discovery: Discovery) -> EventPlane:
    """Events go as far as records do."""
    if not discovery.shared:
        return MemoryEvents()
    from dynamo_trio.events.sockets import ZmqEvents

    return ZmqEvents(routable_address())


@asynccontextmanager
async def open_runtime(
    lifecycle: Lifecycle | None = None,
    *,
    discovery: Discovery | None = None,
    planes: RequestPlane | Iterable[RequestPlane] | Planes = (),
    codec: Codec = MSGPACK,
    request_limit: float = math.inf,
    queue_limit: int = 0,
    inhibited: float = INHIBITED,
    events: EventPlane | None = None,
    canary: CanarySettings | None = None,
) -> AsyncIterator[DistributedRuntime]:
    """The runtime of one process; by default everything in memory (``mem``).

    Endpoints are served on all ``planes``; clients take the first that an instance offers too.
    Where processes share the ``discovery``, events travel over ZeroMQ unless ``events`` says
    otherwise, and what is published listens at this machine's routable address:
    ``events=ZmqEvents("127.0.0.1")`` keeps it on this machine.
    Without a ``lifecycle`` it has one of its own, which is stopped gracefully when the
    block is left. A program that gives one runs it, and stops it, itself.

    Raises:
        TypeError, ValueError: ``planes`` holds something else, or two of one name.
    """
    chosen = Planes.of(planes)
    if not chosen:
        chosen = Planes.of([MemoryPlane()])
    discovery = discovery or MemoryDiscovery()
    async with trio.open_nursery() as nursery:
        if lifecycle is None:
            own = lifecycle = Lifecycle(Timetable())
            nursery.start_soon(own.run)
        else:
            own = None
        runtime = DistributedRuntime(
            lifecycle,
            discovery,
            chosen,
            nursery,
            codec=codec,
            request_limit=request_limit,
            queue_limit=queue_limit,
            inhibited=inhibited,
            events=events or _events_for(discovery),
            canary=canary or CanarySettings(),
        )
        lifecycle.on_unregister(runtime.unregister_all)
        nursery.start_soon(runtime.drain.run)
        yield runtime
        if own is not None:
            own.request_stop("the runtime is left")
            await own.wait_stopped()
        nursery.cancel_scope.cancel("the runtime is closed")
