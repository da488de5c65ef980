"""A worker of the tcp plane by hand: raw streams, the sans-IO ends, and a test that plays it."""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import DynamoException
from dynamo_trio.plane.abc import RequestHead
from dynamo_trio.plane.tcp import TcpPlane, TcpSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.ack import ACCEPTED, Ack
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.annotated import annotate
from dynamo_trio.wire.dynamo.call_home import WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    DownEvent,
    Handshake,
    Item,
    Sentinel,
    UpEvent,
)
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec
from dynamo_trio.wire.dynamo.control import ControlMessage, decode_payload
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.request_plane import RequestServer
from dynamo_trio.wire.llm import encode_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dynamo_trio.plane.abc import ClientStream

PATH = "1f/generate"
#: Real sockets: no wait takes longer unless something hangs.
PATIENCE = 20.0

#: A whole answer, after the handshake.
ENDING = (CompleteFinal(), Sentinel())


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
            await trio.sleep(0.001)


def item(value: object, codec: Codec = MSGPACK) -> Item:
    return Item(annotate(codec, codec.encode(value)))


async def receive(stream: trio.abc.ReceiveStream) -> bytes | bytearray:
    try:
        return await stream.receive_some(64 * 1024)
    except trio.BrokenResourceError:
        return b""


def reset(stream: trio.abc.Stream) -> None:
    """Close with a reset, as a process does that dies with unread data."""
    assert isinstance(stream, trio.SocketStream)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@attrs.define(eq=False)
class Collector:
    """A sink that grants what it is given, unless told not to."""

    codec: Codec = MSGPACK
    grants: bool = True
    batches: list[list[object]] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)
    stream: ClientStream | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def items(self) -> list[object]:
        return [item for batch in self.batches for item in batch]

    def expect(self, codec: Codec) -> None:
        self.codec = codec

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert not self.ends
        read = self.codec.decoder(object, "item")
        self.batches.append([read(payload) for payload in payloads])
        if self.grants and self.stream is not None:
            self.stream.grant(len(payloads))

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        self.feed([encode_token(MSGPACK, token_id) for token_id in token_ids])

    def finish(self, error: DynamoException | None) -> None:
        self.ends.append(error)
        self.ended.set()

    async def end(self) -> DynamoException | None:
        """The end, and there is only one."""
        with trio.fail_after(PATIENCE):
            await self.ended.wait()
        (end,) = self.ends
        return end


@attrs.define(eq=False)
class Request:
    """One request as the worker sees it."""

    connection: RequestEnd
    frame: RequestFrame
    control: ControlMessage
    body: bytes
    _callers: list[Caller]

    @property
    def subject(self) -> str:
        return self.control.reply_to().subject

    async def accept(self) -> Caller:
        """Acknowledge it, call home and begin."""
        await self.connection.acknowledge()
        return await self.call_home(Accepted())

    async def call_home(self, *events: UpEvent) -> Caller:
        """Connect, shake hands, and say ``events``."""
        caller = await self.dial()
        await caller.say(Handshake(self.subject), *events)
        return caller

    async def dial(self) -> Caller:
        """Connect, and say nothing."""
        address = self.control.reply_to().address
        stream = await trio.open_tcp_stream(address.host, address.port)
        self._callers.append(Caller(stream, self.control.body_codec()))
        return self._callers[-1]


@attrs.define(eq=False)
class Caller:
    """The worker's end of one answer."""

    stream: trio.abc.Stream
    codec: Codec = MSGPACK
    end: WorkerEnd = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.end = WorkerEnd(self.codec)

    async def say(self, *events: UpEvent) -> None:
        """Everything in one write."""
        await self.stream.send_all(b"".join(map(self.end.send, events)))

    async def items(self, *values: object) -> None:
        await self.say(*(item(value, self.codec) for value in values))

    async def next_wish(self) -> DownEvent | Closed:
        with trio.fail_after(PATIENCE):
            while (event := self.end.next_event()) is None:
                self.end.receive_data(await receive(self.stream))
        return event

    async def wishes(self) -> list[DownEvent]:
        """All that the client says until it closes."""
        wishes: list[DownEvent] = []
        while not isinstance(event := await self.next_wish(), Closed):
            wishes.append(event)
        return wishes


@attrs.define(eq=False)
class RequestEnd:
    """The worker's end of one request connection."""

    stream: trio.abc.Stream
    callers: list[Caller] = attrs.field(factory=list)
    server: RequestServer = attrs.field(factory=RequestServer)

    async def next_request(self) -> Request:
        event = await self.next_event()
        assert isinstance(event, RequestFrame)
        return Request(self, event, *decode_payload(event.payload), self.callers)

    async def next_event(self) -> RequestFrame | Closed:
        with trio.fail_after(PATIENCE):
            while (event := self.server.next_event()) is None:
                self.server.receive_data(await receive(self.stream))
        return event

    async def acknowledge(self, *acks: Ack) -> None:
        await self.stream.send_all(b"".join(map(self.server.send, acks or (ACCEPTED,))))


@attrs.define(eq=False)
class Bench:
    """A client's plane over sockets, and a worker that does what the test does."""

    plane: TcpPlane
    listener: trio.SocketListener
    nursery: trio.Nursery
    _connections: list[RequestEnd] = attrs.field(factory=list)
    #: What is closed with the test.
    callers: list[Caller] = attrs.field(factory=list)

    @property
    def address(self) -> str:
        host, port = self.listener.socket.getsockname()[:2]
        return str(TcpTarget(HostPort(host, port), PATH))

    async def next_connection(self) -> RequestEnd:
        with trio.fail_after(PATIENCE):
            self._connections.append(RequestEnd(await self.listener.accept(), self.callers))
        return self._connections[-1]

    async def next_request(self) -> Request:
        """The next request, on the connection that was opened last."""
        if not self._connections:
            await self.next_connection()
        return await self._connections[-1].next_request()

    def ask(self, codec: Codec = MSGPACK, *, grants: bool = True) -> Asked:
        """A request in a task of its own."""
        sink = Collector(codec, grants=grants)
        asked = Asked(self, sink, RequestHead("id-1", codec=codec))
        self.nursery.start_soon(asked.run)
        return asked

    async def call(self, codec: Codec = MSGPACK, *, grants: bool = True) -> tuple[Asked, Caller]:
        """A request that is accepted, and whose answer has begun."""
        asked = self.ask(codec, grants=grants)
        request = await self.next_request()
        return asked, await request.accept()

    def close(self) -> None:
        streams = [c.stream for c in self._connections] + [c.stream for c in self.callers]
        for stream in streams:
            assert isinstance(stream, trio.SocketStream)
            stream.socket.close()


@attrs.define(eq=False)
class Asked:
    """A client's request, and what became of it."""

    bench: Bench
    sink: Collector
    head: RequestHead
    body: bytes = b"\xc0"
    #: Raised by opening.
    error: DynamoException | None = None
    opened: trio.Event = attrs.field(factory=trio.Event)
    left: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        try:
            with self.scope:
                async with self.bench.plane.open_stream(
                    self.bench.address, self.head, self.body, self.sink
                ) as stream:
                    self.sink.stream = stream
                    self.opened.set()
                    await trio.sleep_forever()
        except DynamoException as exc:
            self.error = exc
        finally:
            self.left.set()

    @property
    def stream(self) -> ClientStream:
        assert self.sink.stream is not None
        return self.sink.stream

    async def open(self) -> None:
        with trio.fail_after(PATIENCE):
            await self.opened.wait()

    async def failure(self) -> DynamoException | None:
        with trio.fail_after(PATIENCE):
            await self.left.wait()
        return self.error

    async def leave(self) -> None:
        """Leave the stream's block."""
        self.scope.cancel()
        with trio.fail_after(PATIENCE):
            await self.left.wait()


LOOPBACK = TcpSettings(response_host="127.0.0.1")


@asynccontextmanager
async def open_bench(settings: TcpSettings = LOOPBACK) -> AsyncIterator[Bench]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener, open_tcp_plane(settings) as plane, trio.open_nursery() as nursery:
        bench = Bench(plane, listener, nursery)
        try:
            yield bench
        finally:
            nursery.cancel_scope.cancel()
            bench.close()
