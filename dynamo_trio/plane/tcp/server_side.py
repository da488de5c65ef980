"""The server side of the ``tcp`` plane: requests in, answers out."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import DynamoException, RemoteProtocolError, Unknown
from dynamo_trio.plane.abc import Acceptor, RequestHead
from dynamo_trio.plane.net.accepting import accept_connections, open_listener, peer_of
from dynamo_trio.plane.net.dialling import dial
from dynamo_trio.plane.net.hosts import listening_host
from dynamo_trio.plane.net.tls import dialer_context, listener_context, shake_hands
from dynamo_trio.plane.tcp.call_home import CallHome
from dynamo_trio.plane.tcp.worker_connection import WorkerConnection
from dynamo_trio.wire.dynamo.ack import ACCEPTED, Ack, refusal, unknown_endpoint, unreadable
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.control import decode_payload
from dynamo_trio.wire.trace import picked

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.dynamo.control import ControlMessage, ReplyTo
    from dynamo_trio.wire.dynamo.request_frame import RequestFrame

logger = logging.getLogger("dynamo_trio.plane.tcp")

_SETTING = "DYN_TCP_RPC_"


@attrs.frozen
class Served:
    """What is served under a path."""

    acceptor: Acceptor
    annotated: bool = True


@attrs.define(eq=False)
class TcpServerSide:
    """Its tasks live in ``nursery``, and end when that is cancelled."""

    settings: TcpSettings
    nursery: trio.Nursery
    #: A client has sent a request; no client here can say that it saw an instance leave.
    has_silent_peers: bool = False
    #: From clients, on which requests come.
    connections: int = 0
    _served: dict[str, Served] = attrs.field(factory=dict)
    #: Log lines about refused requests, of which eight bytes make one; and about clients that
    #: cannot be called.
    _refused: Seldom = attrs.field(factory=Seldom)
    _unreached: Seldom = attrs.field(factory=Seldom)
    #: Where it can be reached, once it listens.
    _address: HostPort | None = None
    _binding: trio.Lock = attrs.field(factory=trio.Lock)
    _answers: set[CallHome] = attrs.field(factory=set)
    _unsettled: set[CallHome] = attrs.field(factory=set)
    #: Where one waits for answers to begin, or to end.
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _listener_tls: ssl.SSLContext | None = attrs.field(init=False)
    _dialer_tls: ssl.SSLContext | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listener_tls = listener_context(self.settings.tls)
        self._dialer_tls = dialer_context(self.settings.tls)

    # --- what the plane offers ----------------------------------------------------------------

    @asynccontextmanager
    async def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AsyncIterator[str]:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.serve`."""
        if path in self._served:
            raise ValueError(f"the path {path!r} is already served on this plane")
        self._served[path] = Served(acceptor, annotated)
        try:
            yield str(TcpTarget(await self._listen(), path))
        finally:
            del self._served[path]

    async def settle(self) -> None:
        """Wait until the answers to all that was accepted so far have begun, or ended."""
        await trio.lowlevel.checkpoint()
        waiting = set(self._unsettled)
        while waiting & self._unsettled:
            await self._changed.park()

    async def say_farewell(self) -> None:
        """Give answers that are finished a moment to leave."""
        with trio.move_on_after(self.settings.farewell_time):
            while any(answer.finished for answer in self._answers):
                await self._changed.park()

    # --- connections --------------------------------------------------------------------------

    async def _listen(self) -> HostPort:
        async with self._binding:
            if self._address is None:
                bind, tell = listening_host(self.settings.rpc_host, f"{_SETTING}HOST")
                listener = await open_listener(bind, self.settings.rpc_port, _SETTING)
                self._address = HostPort(tell, listener.socket.getsockname()[1])
                logger.info("requests are taken at %s", self._address)
                self.nursery.start_soon(
                    accept_connections, listener, self._serve_connection, self.nursery
                )
            return self._address

    async def _serve_connection(
        self, plain: trio.SocketStream, is_ours: Callable[[], None]
    ) -> None:
        stream: trio.abc.Stream = plain
        peer = peer_of(plain)
        if self._listener_tls is not None:
            try:
                limit = self.settings.tls.handshake_time
                stream = await shake_hands(plain, self._listener_tls, limit)
            except OSError as exc:
                logger.warning("a request connection from %s is closed: %s", peer, exc)
                return
        self.connections += 1
        try:
            await WorkerConnection(stream, self.answer, self.settings, is_ours, peer).run()
        finally:
            self.connections -= 1

    async def _dial(self, address: HostPort) -> trio.abc.Stream:
        return await dial(address, self._dialer_tls, self.settings)

    # --- requests -----------------------------------------------------------------------------

    def answer(self, frame: RequestFrame) -> Ack:
        """Accept a request, or say why not. Never raises; the body is not looked at."""
        self.has_silent_peers = True
        served = self._served.get(frame.path)
        if served is None:
            self._tell(logging.INFO, f"for {frame.path!r}, which is not served here")
            return unknown_endpoint(frame.path)
        try:
            control, body = decode_payload(frame.payload)
            reply_to = control.reply_to()
        except RemoteProtocolError as exc:
            self._tell(logging.WARNING, f"that says not where to answer: {exc}")
            return unreadable(exc)
        return self._accept(served, control, reply_to, body, frame)

    def _tell(self, level: int, which: str) -> None:
        self._refused.log(logger, level, "refused a request %s", which)

    def _accept(
        self,
        served: Served,
        control: ControlMessage,
        reply_to: ReplyTo,
        body: bytes,
        frame: RequestFrame,
    ) -> Ack:
        try:
            codec, items_from = control.body_codec(), control.items_from()
            if body and items_from is not None:
                raise RemoteProtocolError("the peer sent a request that streams in with a body")
        except RemoteProtocolError as exc:
            logger.warning("request %.64s cannot be served: %s", control.id, exc)
            answer = self._call_home(reply_to, JSON, annotated=served.annotated)
            answer.finish(exc)
        else:
            answer = self._call_home(reply_to, codec, annotated=served.annotated)
            head = RequestHead(
                control.id,
                control.metadata or {},
                codec,
                frame.sent_at_ns,
                streams_in=items_from is not None,
                annotated=served.annotated,
                headers=picked(frame.headers),
            )
            try:
                answer.call = served.acceptor.accept(head, body, answer)
            except Exception as exc:
                return _refusal(exc)
            if items_from is not None and not answer.finished:
                answer.stream_in(items_from)
        self._start(answer)
        return ACCEPTED

    def _call_home(self, reply_to: ReplyTo, codec: Codec, *, annotated: bool) -> CallHome:
        return CallHome(
            *(reply_to, codec, self._dial, self.settings, self._settled),
            annotated=annotated,
            unreached=self._unreached,
        )

    def _start(self, answer: CallHome) -> None:
        self._answers.add(answer)
        if not answer.settled:
            self._unsettled.add(answer)
        self.nursery.start_soon(self._run, answer)

    async def _run(self, answer: CallHome) -> None:
        try:
            await answer.run()
        except* Exception as group:
            logger.error("an answer ended in a mistake of ours", exc_info=group)
        finally:
            self._answers.discard(answer)
            self._settled(answer)

    def _settled(self, answer: CallHome) -> None:
        self._unsettled.discard(answer)
        self._changed.unpark_all()


def _refusal(error: Exception) -> Ack:
    if isinstance(error, DynamoException):
        return refusal(error)
    logger.error("a request could not be taken on", exc_info=error)
    return refusal(Unknown("the worker failed to take the request on"))
