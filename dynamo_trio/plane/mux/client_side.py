"""The client side of the ``mux`` plane: a connection to each worker, and requests on them."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import CannotConnect, NotConnected, RemoteProtocolError
from dynamo_trio.plane.mux.way import Dial, Way
from dynamo_trio.plane.net.dialling import dial
from dynamo_trio.plane.net.sockets import start_apart
from dynamo_trio.plane.net.tls import dialer_context
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from dynamo_trio.plane.abc import ClientStream, ItemSink, RequestHead
    from dynamo_trio.plane.mux.settings import MuxSettings
    from dynamo_trio.plane.mux.stream import MuxStream


@attrs.define(eq=False)
class MuxClientSide:
    """Its tasks live in ``nursery``, and end when that is cancelled.

    ``dial`` makes connections; None: over sockets, with TLS if the settings say so.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """

    settings: MuxSettings
    nursery: trio.Nursery
    _dial: Dial | None = None
    #: What tells this process from others.
    process: str = attrs.field(factory=partial(secrets.token_hex, 8), kw_only=True)
    #: Invariant: a way is in here exactly while its task runs.
    _ways: dict[HostPort, Way] = attrs.field(factory=dict)
    _closed: bool = False

    def __attrs_post_init__(self) -> None:
        context = dialer_context(self.settings.tls)
        if self._dial is None:
            self._dial = partial(dial, context=context, settings=self.settings)

    def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.open_stream`.

        Raises:
            NotConnected: there is no connection to the worker, and nothing was sent.
            CannotConnect: nobody serves that address, or the worker is silent or lost.
            Draining, Overloaded: it refused, or had said so before.
            PayloadTooLarge, InvalidArgument: the request is above one of its limits.
        """
        return _Opening(self, address, head, payload, sink)

    def instance_found(self, address: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.instance_found`."""
        try:
            target = TcpTarget.parse(address)
            self._way(target.address).found(target.path)
        except (RemoteProtocolError, NotConnected):
            return  # a request to it will say so

    def instance_gone(self, address: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.instance_gone`."""
        if (found := self._find(address)) is not None:
            way, path = found
            way.gone(path)

    def avoids(self, address: str) -> bool:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.avoids`."""
        if (found := self._find(address)) is None:
            return False
        way, path = found
        return way.avoids(path)

    @property
    def connections(self) -> int:
        """Those that stand, to workers."""
        return sum(way.connected for way in self._ways.values())

    async def say_farewell(self) -> None:
        """Tell every worker that this client leaves."""
        self._closed = True
        with trio.move_on_after(self.settings.farewell_time):
            async with trio.open_nursery() as nursery:
                for way in list(self._ways.values()):
                    nursery.start_soon(way.leave, "the client is closed")

    # --- ways ---------------------------------------------------------------------------------

    def _find(self, address: str) -> tuple[Way, str] | None:
        try:
            target = TcpTarget.parse(address)
        except RemoteProtocolError:
            return None
        way = self._ways.get(target.address)
        return None if way is None else (way, target.path)

    def _way(self, address: HostPort) -> Way:
        """The way there.

        Raises:
            NotConnected: the plane is closed.
        """
        way = self._ways.get(address)
        if way is None or way.closed:
            if self._closed:
                raise NotConnected("the request plane is closed")
            assert self._dial is not None
            way = Way(address, self.settings, self._dial, self.nursery, self.process)
            try:
                start_apart(self.nursery, self._keep, way)
            except RuntimeError:
                raise NotConnected("the request plane is closed") from None
            self._ways[address] = way
        return way

    async def _keep(self, way: Way) -> None:
        try:
            await way.run()
        finally:
            if self._ways.get(way.address) is way:
                del self._ways[way.address]


@attrs.define(eq=False)
class _Opening:
    """See :meth:`MuxClientSide.open_stream`. A class, and no generator: it is for every request."""

    _side: MuxClientSide
    _address: str
    _head: RequestHead
    _payload: bytes
    _sink: ItemSink
    _way: Way = attrs.field(init=False)
    _stream: MuxStream = attrs.field(init=False)

    async def __aenter__(self) -> ClientStream:
        target = _target(self._address)
        self._way = way = self._side._way(target.address)
        way.take_up()
        try:
            self._stream = await self._open(way, target.path)
        except BaseException:
            way.put_down()
            raise
        return self._stream

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.detach()
        self._way.put_down()

    async def _open(self, way: Way, path: str) -> MuxStream:
        """Returns a stream that is accepted. A connection that ended before anything was sent
        is no attempt."""
        while True:
            link = await way.ready()
            stream = link.open(path, self._head, self._payload, self._sink)
            try:
                await stream.wait_accepted()
            except NotConnected:
                continue
            except BaseException:
                stream.detach()
                raise
            return stream


def _target(address: str) -> TcpTarget:
    try:
        return TcpTarget.parse(address)
    except RemoteProtocolError as exc:
        raise CannotConnect(f"the worker has no usable address: {exc}") from None
