"""The client side of the ``tcp`` plane: requests out, answers in.

Theory of operation
-------------------
A request goes out on a connection that it shares with others
(:mod:`~dynamo_trio.plane.tcp.pipeline`) and names the address at which this process
listens, and a *subject*. The worker acknowledges it there, connects to that address, names the
subject and sends its answer (:mod:`~dynamo_trio.plane.tcp.answer`). The table of streams is
what joins the two ways: a stream is in it from before its request is sent, since the call may
come before the acknowledgement, until its client leaves.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import msgspec

from dynamo_trio.errors import (
    CannotConnect,
    LocalProtocolError,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.plane.net.tls import dialer_context, listener_context
from dynamo_trio.plane.tcp.call_home_server import CallHomeServer
from dynamo_trio.plane.tcp.items_out import ItemsOut
from dynamo_trio.plane.tcp.pool import RequestPool, dialer
from dynamo_trio.plane.tcp.silence import SilenceWatch
from dynamo_trio.plane.tcp.streams import StreamTable
from dynamo_trio.wire.dynamo.ack import refused
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.control import ControlMessage, ReplyTo, encode_payload
from dynamo_trio.wire.dynamo.request_frame import (
    ENDPOINT_PATH,
    REQUEST_ID,
    SEND_TIME_NS,
    RequestFrame,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from dynamo_trio.plane.abc import ClientStream, ItemSink, RequestHead, Traffic
    from dynamo_trio.plane.tcp.settings import TcpSettings


@attrs.define(eq=False)
class TcpClientSide:
    """Its tasks live in ``nursery``, and end when that is cancelled.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """

    settings: TcpSettings
    nursery: trio.Nursery
    streams: StreamTable = attrs.field(factory=StreamTable)
    _pool: RequestPool = attrs.field(init=False)
    _server: CallHomeServer = attrs.field(init=False)
    _silence: SilenceWatch = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        tls = self.settings.tls
        dial = dialer(self.settings, dialer_context(tls))
        self._pool = RequestPool(self.settings, dial, self.nursery)
        context = listener_context(tls)
        self._server = CallHomeServer(
            self.streams, self.settings, context, self.nursery, self._pool.traffic
        )
        self._silence = SilenceWatch(self.streams, self._pool, self.nursery)

    @asynccontextmanager
    async def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.open_stream`.

        Raises:
            CannotConnect: nobody serves that address, or this process cannot listen.
            ConnectionTimeout: the worker does not acknowledge.
            Draining, Overloaded, NoWorker, PayloadTooLarge: it refused.
            PayloadTooLarge: the request is above the limit.
        """
        target = _target(address)
        home = await self._server.address()
        items = ItemsOut(self.settings) if head.streams_in else None
        stream = self.streams.add(
            str(target), head.codec, sink, annotated=head.annotated, items=items
        )
        try:
            reply_to = ReplyTo(home, stream.subject, head.request_id)
            items_from = None if items is None else attrs.evolve(reply_to, subject=items.subject)
            frame = _frame(target, head, reply_to, items_from, payload)
            ack = await self._pool.send(target.address, frame)
            if (error := refused(ack)) is not None:
                raise error
            yield stream
        finally:
            self.streams.remove(stream)

    async def listen_for_answers(self) -> None:
        """As :meth:`~dynamo_trio.plane.tcp.plane.TcpPlane.listen_for_answers`."""
        await self._server.listen()

    @property
    def traffic(self) -> Traffic:
        """As :attr:`~dynamo_trio.plane.abc.RequestPlane.traffic`."""
        return self._pool.traffic

    @property
    def connections(self) -> int:
        """To workers, on which requests are sent."""
        return self._pool.count

    def instance_gone(self, address: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.instance_gone`."""
        try:
            self._silence.begin(TcpTarget.parse(address))
        except RemoteProtocolError:
            return  # no request was ever sent there


def _target(address: str) -> TcpTarget:
    try:
        return TcpTarget.parse(address)
    except RemoteProtocolError as exc:
        raise CannotConnect(f"the worker has no usable address: {exc}") from None


def _frame(
    target: TcpTarget,
    head: RequestHead,
    reply_to: ReplyTo,
    items_from: ReplyTo | None,
    body: bytes,
) -> RequestFrame:
    control = ControlMessage.for_request(reply_to, head.codec, items_from)
    if head.metadata:
        control = msgspec.structs.replace(control, metadata=dict(head.metadata))
    headers = {
        REQUEST_ID: head.request_id,
        ENDPOINT_PATH: target.path,
        SEND_TIME_NS: str(time.time_ns()),
        **head.headers,
    }
    try:
        payload = encode_payload(control, body)
    except LocalProtocolError:
        raise PayloadTooLarge(f"The request takes {len(body)} bytes, too many to send.") from None
    return RequestFrame(target.path, payload, headers)
