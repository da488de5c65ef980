"""A client of the tcp plane made of raw sockets and the sans-IO ends, and a fake endpoint."""

from __future__ import annotations

import itertools
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import LocalProtocolError
from dynamo_trio.plane.abc import AcceptedCall, Outbox, RequestHead
from dynamo_trio.plane.tcp import TcpPlane, TcpSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.ack import Ack
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import DownEvent, Handshake, UpEvent
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec
from dynamo_trio.wire.dynamo.control import ControlMessage, ReplyTo, encode_payload
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.request_plane import RequestClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.errors import DynamoException

LOOPBACK = TcpSettings(rpc_host="127.0.0.1")
PATH = "1f/generate"


@attrs.define(eq=False)
class FakeCall(AcceptedCall):
    """Counts what it is told; the test speaks for it."""

    head: RequestHead
    payload: bytes
    outbox: Outbox
    cancels: int = 0
    stops: int = 0
    told: trio.Event = attrs.field(factory=trio.Event)

    def cancel(self) -> None:
        self.cancels += 1
        self.told.set()

    def stop(self) -> None:
        self.stops += 1
        self.told.set()


@attrs.define(eq=False)
class FakeEndpoint:
    """Accepts everything, or refuses everything with ``refusal``."""

    refusal: Exception | None = None
    calls: list[FakeCall] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> FakeCall:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(FakeCall(head, payload, outbox))
        return self.calls[-1]


@attrs.define(eq=False)
class Home:
    """The client's end of one answer."""

    stream: trio.abc.Stream
    end: ClientEnd = attrs.field(factory=ClientEnd)
    codec: Codec = MSGPACK

    async def next_event(self) -> UpEvent | Closed:
        while (event := self.end.next_event()) is None:
            try:
                data = await self.stream.receive_some(64 * 1024)
            except trio.BrokenResourceError:
                data = b""
            self.end.receive_data(data)
        if isinstance(event, Handshake):
            self.end.accept(self.codec)
        return event

    async def events(self, count: int) -> list[UpEvent | Closed]:
        return [await self.next_event() for _ in range(count)]

    async def until_closed(self) -> list[UpEvent | Closed]:
        events = [await self.next_event()]
        while not isinstance(events[-1], Closed):
            events.append(await self.next_event())
        return events

    async def send(self, event: DownEvent) -> None:
        await self.stream.send_all(self.end.send(event))

    def reset(self) -> None:
        reset(self.stream)


def reset(stream: trio.abc.Stream) -> None:
    """Close with a reset, as Dynamo's frontend does."""
    assert isinstance(stream, trio.SocketStream)
    linger = struct.pack("ii", 1, 0)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    stream.socket.close()


@attrs.define(eq=False)
class Peer:
    """One client: a request connection, and a listener for answers."""

    target: TcpTarget
    stream: trio.abc.Stream
    listener: trio.SocketListener
    client: RequestClient = attrs.field(factory=RequestClient)
    codec: Codec = MSGPACK
    homes: list[Home] = attrs.field(factory=list)
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count)

    @property
    def home_address(self) -> HostPort:
        host, port = self.listener.socket.getsockname()[:2]
        return HostPort(host, port)

    def reply_to(self, name: str = "") -> ReplyTo:
        return ReplyTo(self.home_address, name or f"subject-{next(self._numbers)}", "id-1")

    def frame(
        self, body: bytes = b"\xc0", *, path: str = "", control: ControlMessage | None = None
    ) -> RequestFrame:
        control = control or ControlMessage.for_request(self.reply_to(), self.codec)
        return RequestFrame(path or self.target.path, encode_payload(control, body))

    async def send(self, *frames: RequestFrame) -> None:
        await self.stream.send_all(b"".join(map(self.client.send, frames)))

    async def next_ack(self) -> Ack | Closed:
        while (event := self.client.next_event()) is None:
            try:
                data = await self.stream.receive_some(64 * 1024)
            except trio.BrokenResourceError:
                data = b""
            self.client.receive_data(data)
        return event

    async def ask(self, frame: RequestFrame) -> Ack | Closed:
        await self.send(frame)
        return await self.next_ack()

    async def next_home(self) -> Home:
        self.homes.append(Home(await self.listener.accept(), codec=self.codec))
        return self.homes[-1]

    async def call(self) -> Home:
        """One request that is accepted and greeted."""
        assert await self.ask(self.frame()) == Ack()
        home = await self.next_home()
        event = await home.next_event()
        if not isinstance(event, Handshake):
            raise LocalProtocolError(f"no handshake but {event}")
        return home


@asynccontextmanager
async def open_peer(address: str) -> AsyncIterator[Peer]:
    target = TcpTarget.parse(address)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    stream = await trio.open_tcp_stream(target.address.host, target.address.port)
    async with listener, stream:
        peer = Peer(target, stream, listener)
        try:
            yield peer
        finally:
            for home in peer.homes:
                await trio.aclose_forcefully(home.stream)


@attrs.define(eq=False)
class Bench:
    """A worker's plane that serves one endpoint, and a client of it."""

    plane: TcpPlane
    address: str
    endpoint: FakeEndpoint
    peer: Peer

    @property
    def call(self) -> FakeCall:
        return self.endpoint.calls[-1]


@asynccontextmanager
async def open_bench(
    settings: TcpSettings = LOOPBACK, refusal: DynamoException | None = None
) -> AsyncIterator[Bench]:
    endpoint = FakeEndpoint(refusal)
    async with (
        open_tcp_plane(settings) as plane,
        plane.serve(PATH, endpoint) as address,
        open_peer(address) as peer,
    ):
        yield Bench(plane, address, endpoint, peer)
