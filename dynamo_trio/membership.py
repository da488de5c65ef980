"""Which instances of this process others may find: what is served, and what speaks against it.

Theory of operation
-------------------
An instance that is served is to be found, unless one of these says no::

    a stop              for good
    a drain             until it is taken back
    its health check    until it passes again
    the program         unregistered, until it is registered

What is to be found is in ``_registered`` from before others can find it. One that waits for
its health, or for the end of a drain, is remembered beside it, and comes back by itself; what
the program has unregistered is forgotten by both, so it stays away.

What is to be found no longer is in ``_leaving`` until the store has let it go: a withdrawal
that fails, or is cut short, is taken up again by the next one, whoever wants it. And what its
endpoint has taken out for good (:meth:`Membership.serves`) is not registered by anybody.

Peers that a plane can tell know of a withdrawal before the store does.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import InvalidArgument, StoreUnavailable
from dynamo_trio.lifecycle import ReversibleDrain
from dynamo_trio.lifecycle.withdrawal import all_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.discovery import Discovery, EndpointId, Instance, ModelCard
    from dynamo_trio.lifecycle import Lifecycle
    from dynamo_trio.plane import Planes

logger = logging.getLogger("dynamo_trio.runtime")

#: How long an unregistering waits for accepted requests to be seen as begun, in seconds.
SETTLE = 1.0
#: How often a drain asks whether a store that was away has forgotten this process, in seconds.
ASK_AGAIN = 0.25


@attrs.define(eq=False)
class Membership:
    """The instances of one process, as the fleet sees them."""

    lifecycle: Lifecycle
    discovery: Discovery
    planes: Planes
    #: Others could find an endpoint of this process, at least once.
    was_found: bool = attrs.field(init=False, default=False)
    #: Out of routing and back again, while the process lives.
    drain: ReversibleDrain = attrs.field(init=False)
    #: Every instance that is being served, found by others or not.
    _served: dict[EndpointId, Instance] = attrs.field(init=False, factory=dict)
    #: Endpoints that say nothing about whether this process is ready.
    _unlisted: set[EndpointId] = attrs.field(init=False, factory=set)
    #: Invariant: holds every instance that others may find, from before they can.
    _registered: dict[str, Instance] = attrs.field(init=False, factory=dict)
    #: Invariant: keys of those in ``_registered`` whose registration has come into the store.
    _found: set[str] = attrs.field(init=False, factory=set)
    #: Invariant: holds every instance that others may still find, although they are not to.
    _leaving: dict[str, Instance] = attrs.field(init=False, factory=dict)
    #: Keys of instances of which peers were told that they are to get no new requests.
    _withdrawn: set[str] = attrs.field(init=False, factory=set)
    #: Keys of instances that do not answer health checks, or have not yet.
    _unhealthy: set[str] = attrs.field(init=False, factory=set)
    #: Invariant: those that would be in ``_registered``, were they not in ``_unhealthy``.
    _held_back: dict[str, Instance] = attrs.field(init=False, factory=dict)
    #: Instances that are to be registered again when a drain is taken back.
    _drained: dict[str, Instance] = attrs.field(init=False, factory=dict)

    @drain.default
    def _drain_default(self) -> ReversibleDrain:
        return ReversibleDrain(self.lifecycle, self._leave_for_now, self._come_back)

    async def register(self, instance: Instance) -> None:
        """Let others find this instance. A process that is stopping stays unfound.

        One that is not healthy is found once it is, one that is drained when it serves again;
        one whose endpoint is closed never is.
        """
        if not self._is_served(instance):
            logger.info("%s is not registered: it is closed", instance.endpoint)
            await trio.lowlevel.checkpoint()
            return
        if self.lifecycle.stopping:
            logger.info("%s is not registered: the process is stopping", instance.endpoint)
            await trio.lowlevel.checkpoint()
            return
        if self.drain.is_wanted:
            self._drained[instance.key] = instance
            logger.info("%s is not registered: the process is drained", instance.endpoint)
            await trio.lowlevel.checkpoint()
            return
        if instance.key in self._unhealthy:
            self._held_back[instance.key] = instance
            logger.info("%s is not registered: it has to pass a health check", instance.endpoint)
            await trio.lowlevel.checkpoint()
            return
        self._registered[instance.key] = instance
        self._leaving.pop(instance.key, None)
        if instance.key in self._withdrawn:
            self._withdrawn.remove(instance.key)
            self.planes.restore(instance.transports)
        await self.discovery.register(instance)
        if instance.key not in self._registered:
            # It was withdrawn while this waited, and may have come into the store only then.
            self._leaving[instance.key] = instance
            await self._leave(instance)
            return
        self._found.add(instance.key)
        listed = instance.endpoint not in self._unlisted
        self.was_found = self.was_found or listed
        level = logging.INFO if listed else logging.DEBUG
        logger.log(level, "serving %s as instance %x", instance.endpoint, instance.instance_id)

    def served(self, endpoint: EndpointId) -> Instance:
        """The instance of an endpoint that is being served here.

        Raises:
            InvalidArgument: it is not.
        """
        if endpoint not in self._served:
            raise InvalidArgument(f"{endpoint} is not served by this process")
        return self._served[endpoint]

    def _is_served(self, instance: Instance) -> bool:
        return self._served.get(instance.endpoint) is instance

    def endpoint_states(self) -> dict[str, bool]:
        """Name of every endpoint that is served here -> can others find it?

        One that comes back cannot until the store has it again, which takes some seconds.
        """
        states: dict[str, bool] = {}
        for endpoint, instance in self._served.items():
            if endpoint in self._unlisted:
                continue
            found = instance.key in self._found
            states[endpoint.name] = states.get(endpoint.name, True) and found
        return states

    @contextmanager
    def serves(self, instance: Instance, *, listed: bool = True) -> Iterator[None]:
        """Note that ``instance`` is served while the block runs."""
        self._served[instance.endpoint] = instance
        if not listed:
            self._unlisted.add(instance.endpoint)
        try:
            yield
        finally:
            del self._served[instance.endpoint]
            self._unlisted.discard(instance.endpoint)
            self._unhealthy.discard(instance.key)
            self._held_back.pop(instance.key, None)
            self._drained.pop(instance.key, None)

    async def unregister(self, instance: Instance) -> None:
        """Leave the routing pool; requests that are running, or still arrive, are served.

        Peers that a plane can tell know of it before the store does.
        """
        self._held_back.pop(instance.key, None)
        self._drained.pop(instance.key, None)
        self._withdraw(instance)
        await self._leave(instance)

    async def retire(self, instance: Instance, card: ModelCard | None) -> None:
        """Take out what an endpoint has registered, after its end (:meth:`serves`).

        It ends all the same if the store fails: that is logged.
        """
        jobs = [partial(self.unregister, instance)]
        if card is not None:
            jobs.append(partial(self.discovery.unregister, card))
        try:
            await all_at_once("unregistering", jobs)
        except* Exception as group:
            logger.error(
                "%s may still be found, though it is closed", instance.endpoint, exc_info=group
            )

    def is_wanted(self, instance: Instance) -> bool:
        """May others find it, or would they, were it healthy?"""
        if self.lifecycle.stopping or self.drain.is_wanted:
            return False
        return instance.key in self._registered or instance.key in self._held_back

    async def set_healthy(self, instance: Instance, healthy: bool) -> None:
        """Take an instance out of the routing pool for its health, or let it back in.

        What was unregistered on purpose stays so. Coming back takes some seconds, as with
        :meth:`Endpoint.register_endpoint_instance`. Whoever tells of a failure of the store may
        say the same again: what was not done is then done.
        """
        if not self._is_served(instance):
            await trio.lowlevel.checkpoint()
            return
        if healthy:
            self._unhealthy.discard(instance.key)
            if instance.key in self._held_back:
                await self.register(instance)
                self._held_back.pop(instance.key, None)  # not before: the store may be away
            return
        self._unhealthy.add(instance.key)
        if instance.key in self._registered:
            self._held_back[instance.key] = instance
            self._withdraw(instance)
        await self._leave(instance)

    async def unregister_all(self) -> None:
        """Withdraw every instance of this process, all at once.

        Peers go on asking helpers (``listed=False``) that they know until those are closed.

        Raises:
            StoreUnavailable, ExceptionGroup: some may still be found, after all of them have been
                tried. The store goes on trying.
        """
        self._held_back.clear()
        registered = list(self._registered.values())
        self._withdraw(*(i for i in registered if i.endpoint not in self._unlisted))
        await self._settle()
        there = (self._registered | self._leaving).values()
        await all_at_once("unregistering", [partial(self._leave, one) for one in there])
        await self.discovery.wait_withdrawn()

    async def _leave_for_now(self) -> None:
        """Withdraw every instance until :meth:`_come_back`; also from a store that is away now.

        As long as it is, whoever cannot be told by a plane routes here, and is served.
        """
        self._drained |= self._registered | self._held_back
        with suppress(StoreUnavailable):  # the log was told
            await self.unregister_all()
        while not self.discovery.has_withdrawn:  # noqa: ASYNC110 - the store tells nobody
            await trio.sleep(ASK_AGAIN)

    async def _come_back(self) -> None:
        async with trio.open_nursery() as nursery:
            for instance in list(self._drained.values()):
                nursery.start_soon(self._bring_back, instance)

    async def _bring_back(self, instance: Instance) -> None:
        if instance.key not in self._drained:
            return  # it was unregistered in the same instant
        await self.register(instance)
        self._drained.pop(instance.key, None)  # not before: this may be cancelled

    def _withdraw(self, *instances: Instance) -> None:
        known = self._registered.keys() - self._withdrawn
        told = [instance for instance in instances if instance.key in known]
        if told:
            self._withdrawn.update(instance.key for instance in told)
            self.planes.withdraw(*(instance.transports for instance in told))

    async def _leave(self, instance: Instance) -> None:
        self._found.discard(instance.key)
        if self._registered.pop(instance.key, None) is not None:
            self._leaving[instance.key] = instance
        if instance.key in self._leaving:
            await self.discovery.unregister(instance)
            self._leaving.pop(instance.key, None)  # not before: this may be cancelled, or fail

    async def _settle(self) -> None:
        with trio.move_on_after(SETTLE):
            await self.planes.settle()
