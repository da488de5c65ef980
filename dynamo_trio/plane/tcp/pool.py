"""The connections on which requests are sent, by worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import CannotConnect, DynamoException, Overloaded
from dynamo_trio.plane.abc import Traffic
from dynamo_trio.plane.net.dialling import dial
from dynamo_trio.plane.net.sockets import start_apart
from dynamo_trio.plane.tcp.pipeline import Pipeline

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    import trio

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.ack import Ack
    from dynamo_trio.wire.dynamo.addresses import HostPort
    from dynamo_trio.wire.dynamo.request_frame import RequestFrame

    Dialer = Callable[[HostPort], Awaitable[trio.abc.Stream]]


def dialer(settings: TcpSettings, context: ssl.SSLContext | None) -> Dialer:
    """How connections to workers are made; raises OSError."""
    return partial(dial, context=context, settings=settings)


@attrs.define(eq=False)
class RequestPool:
    """Requests to one worker share a connection, and take another only when it is crowded."""

    _settings: TcpSettings
    _dialer: Dialer
    _nursery: trio.Nursery
    traffic: Traffic = attrs.field(factory=Traffic)
    #: Invariant: a connection is in here exactly while its task runs; no empty lists.
    _connections: dict[HostPort, list[Pipeline]] = attrs.field(factory=dict)

    @property
    def count(self) -> int:
        """How many connections there are."""
        return sum(len(connections) for connections in self._connections.values())

    async def send(self, address: HostPort, frame: RequestFrame) -> Ack:
        """Send a request and wait for its acknowledgement, accepting or not.

        Raises:
            CannotConnect: the worker cannot be reached, or closed without an answer.
            ConnectionTimeout: it does not acknowledge.
            Overloaded: as many requests wait for it as may.
            PayloadTooLarge: the request is above the limit.
            RemoteProtocolError: what came is no acknowledgement.
        """
        sending = self._choose(address).put(frame)
        try:
            return await sending.wait()
        except DynamoException:
            if not sending.stale:
                raise
        # The worker had closed an idle connection, and has most likely not seen the request.
        return await self._open(address).put(frame).wait()

    async def ask_alone(self, address: HostPort, frame: RequestFrame) -> Ack:
        """As :meth:`send`, on a connection of its own."""
        connection = self._make(address)
        self._start(connection.run)
        try:
            return await connection.put(frame).wait()
        finally:
            connection.close()

    def _choose(self, address: HostPort) -> Pipeline:
        connections = [c for c in self._connections.get(address, ()) if not c.closed]
        for connection in connections:
            if not connection.is_crowded:
                return connection
        if len(connections) < self._settings.pool_size:
            return self._open(address)
        emptiest = min(connections, key=lambda connection: connection.outstanding)
        if emptiest.outstanding >= self._settings.channel_buffer:
            raise Overloaded("too many requests wait for the worker's acknowledgement")
        return emptiest

    def _open(self, address: HostPort) -> Pipeline:
        connection = self._make(address)
        self._start(self._keep, address, connection)
        self._connections.setdefault(address, []).append(connection)
        return connection

    def _make(self, address: HostPort) -> Pipeline:
        return Pipeline(partial(self._dialer, address), self._settings, str(address), self.traffic)

    def _start(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            start_apart(self._nursery, task, *args)
        except RuntimeError:
            raise CannotConnect("the request plane is closed") from None

    async def _keep(self, address: HostPort, connection: Pipeline) -> None:
        try:
            await connection.run()
        finally:
            connections = self._connections[address]
            connections.remove(connection)
            if not connections:
                del self._connections[address]
