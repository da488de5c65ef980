"""The mux plane's two sides over memory streams that can be shut, cut and watched."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio
from trio.testing import memory_stream_pair

from dynamo_trio.plane import AcceptedCall, Outbox, RequestHead
from dynamo_trio.plane.mux.answer import Answer
from dynamo_trio.plane.mux.client_side import MuxClientSide
from dynamo_trio.plane.mux.server_side import MuxServerSide
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.wire.dynamo.addresses import HostPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane import ClientStream
    from dynamo_trio.wire.dynamo.codec import Codec

PLACE = HostPort("10.0.0.1", 7000)
PATH = "1f/generate"
ADDRESS = f"{PLACE}/{PATH}"
HEAD = RequestHead("request-1")


@attrs.define(eq=False)
class Sink:
    """Keeps what a stream brings; ``log`` says when, on Trio's clock."""

    items: list[bytes] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    #: How many tokens came with each call.
    batches: list[int] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)
    ended_at: float | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

    def expect(self, codec: Codec) -> None:
        """All codecs are alike here."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert not self.ends
        self.items.extend(payloads)

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        assert not self.ends
        self.tokens.extend(token_ids)
        self.batches.append(len(token_ids))

    def finish(self, error: DynamoException | None) -> None:
        self.ends.append(error)
        self.ended_at = trio.current_time()
        self.ended.set()

    async def end(self) -> DynamoException | None:
        await self.ended.wait()
        (end,) = self.ends
        return end


@attrs.define(eq=False)
class Call(AcceptedCall):
    """Does nothing by itself; ends when it is cancelled, as real calls do."""

    outbox: Outbox
    head: RequestHead
    payload: bytes
    cancels: int = 0
    stops: int = 0
    fed: list[bytes] = attrs.field(factory=list)
    input_ends: int = 0

    @property
    def finished(self) -> bool:
        assert isinstance(self.outbox, Answer)
        return self.outbox.finished

    def cancel(self) -> None:
        self.cancels += 1
        self.outbox.finish(None)

    def stop(self) -> None:
        self.stops += 1

    def feed(self, payloads: Sequence[bytes]) -> None:
        self.fed.extend(payloads)

    def finish_input(self, error: DynamoException | None) -> None:
        assert error is None
        self.input_ends += 1


@attrs.define(eq=False)
class Endpoint:
    refusal: Exception | None = None
    calls: list[Call] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(Call(outbox, head, payload))
        return self.calls[-1]


@attrs.define(eq=False)
class Valve(trio.abc.Stream):
    """A stream whose incoming side can be shut: what comes waits. ``cut`` ends both ways."""

    inner: trio.abc.Stream
    shut: bool = False
    #: Takes nothing more of what is sent.
    stuck: bool = False
    sent: int = 0
    #: Called with what is sent.
    on_send: Callable[[bytes], object] = lambda _: None
    _waiting: bytes | bytearray = b""
    _turn: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def open(self) -> None:
        self.shut = self.stuck = False
        self._turn.unpark_all()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._waiting:
            self._waiting = await self.inner.receive_some(max_bytes)
        while self.shut:
            await self._turn.park()
        data, self._waiting = self._waiting, b""
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        while self.stuck:
            await self._turn.park()
        await self.inner.send_all(data)
        self.sent += len(data)
        self.on_send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await self.inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.inner.aclose()


@attrs.define(eq=False)
class Pair:
    """A worker and a client. Whether the worker can be connected is ``reachable``."""

    settings: MuxSettings
    nursery: trio.Nursery
    endpoint: Endpoint = attrs.field(factory=Endpoint)
    reachable: bool = True
    refusal: OSError = attrs.field(factory=lambda: ConnectionRefusedError("nobody there"))
    #: One for each connection that was made: the client's end, the worker's end.
    valves: list[tuple[Valve, Valve]] = attrs.field(factory=list)
    dialled_at: list[float] = attrs.field(factory=list)
    server: MuxServerSide = attrs.field(init=False)
    client: MuxClientSide = attrs.field(init=False)
    #: How streams to the worker begin their life.
    shut: bool = False

    def __attrs_post_init__(self) -> None:
        self.server = MuxServerSide(self.settings, self.nursery)
        self.server._acceptors[PATH] = self.endpoint, True
        self.client = MuxClientSide(self.settings, self.nursery, self.dial)

    async def dial(self, address: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.dialled_at.append(trio.current_time())
        if not self.reachable:
            raise self.refusal
        ours, theirs = memory_stream_pair()
        client, worker = Valve(ours, shut=self.shut), Valve(theirs)
        self.valves.append((client, worker))
        self.nursery.start_soon(self.server.serve_stream, worker, "the client")
        return client

    @property
    def to_client(self) -> Valve:
        """The client's end of the last connection: shut, it hears nothing."""
        return self.valves[-1][0]

    @property
    def to_worker(self) -> Valve:
        return self.valves[-1][1]

    def cut(self) -> None:
        """The last connection breaks without a word."""
        for valve in self.valves[-1]:
            inner = valve.inner
            assert isinstance(inner, trio.StapledStream)
            inner.send_stream.close()
            inner.receive_stream.close()

    def ask(
        self, sink: Sink, payload: bytes = b"question", head: RequestHead = HEAD
    ) -> AbstractAsyncContextManager[ClientStream]:
        return self.client.open_stream(ADDRESS, head, payload, sink)

    @property
    def call(self) -> Call:
        return self.endpoint.calls[-1]


@asynccontextmanager
async def open_pair(settings: MuxSettings | None = None) -> AsyncIterator[Pair]:
    async with trio.open_nursery() as nursery:
        yield Pair(settings or MuxSettings(), nursery)
        nursery.cancel_scope.cancel()
