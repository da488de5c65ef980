"""Two peers, any order of what they do, any cut: every stream ends once, and nothing is left."""

from __future__ import annotations

from array import array
from itertools import cycle
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from dynamo_trio.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    Overloaded,
)
from dynamo_trio.plane import INITIAL_CREDIT, RequestHead
from dynamo_trio.plane.mux.client_side import MuxClientSide
from dynamo_trio.plane.mux.server_side import MuxServerSide
from dynamo_trio.plane.mux.settings import MuxSettings
from tests.plane.mux_peer import ADDRESS, PATH, PLACE, Call, Endpoint, Sink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_trio.plane import ClientStream
    from dynamo_trio.wire.dynamo.addresses import HostPort
    from dynamo_trio.wire.mux.streams import Stream

HEAD = RequestHead("request", streams_in=True)


@attrs.define(eq=False)
class Torn(trio.abc.Stream):
    """Bytes come in pieces of any size, and after so many nothing comes any more."""

    inner: trio.abc.Stream
    #: Bytes that still come.
    left: int
    sizes: Iterator[int]

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        size = min(next(self.sizes), self.left)
        if not size:
            await self.inner.aclose()
            raise trio.BrokenResourceError("cut")
        data = await self.inner.receive_some(size)
        self.left -= len(data)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.inner.aclose()


@attrs.define(eq=False)
class Trace(Sink):
    """What came, tokens and items in their order."""

    seen: list[int | bytes] = attrs.field(factory=list)

    def feed(self, payloads: Sequence[bytes]) -> None:
        super().feed(payloads)
        self.seen += payloads

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        super().feed_tokens(token_ids)
        self.seen += token_ids


@attrs.define(eq=False)
class Request:
    """One stream, as both ends see it."""

    number: int
    sink: Trace = attrs.field(factory=Trace)
    leaves: trio.Event = attrs.field(factory=trio.Event)
    #: Cancels it, also while it waits to be accepted.
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    stream: ClientStream | None = None
    refused: DynamoException | None = None
    left: bool = False
    granted: int = INITIAL_CREDIT
    #: What the worker sent, and how it ended the stream, if it did so itself.
    sent: list[int | bytes] = attrs.field(factory=list)
    end: list[DynamoException | None] = attrs.field(factory=list)
    #: What the client sent.
    said: list[bytes] = attrs.field(factory=list)

    def check(self, call: Call | None) -> None:
        seen, ends = self.sink.seen, self.sink.ends
        assert seen == self.sent[: len(seen)], "lost, doubled or out of order"
        # An item is delivered as a whole whatever it costs, as long as there is any credit.
        assert len(seen) <= self.granted
        if call is not None:
            assert call.fed == self.said[: len(call.fed)]
        if self.refused is not None:
            assert not seen
            assert not ends
            assert isinstance(self.refused, CannotConnect | Disconnected | Overloaded)
            return
        assert len(ends) == (0 if self.left else 1)
        if not ends:
            return
        if isinstance(ends[0], Disconnected):
            return
        (end,) = self.end
        assert type(end) is type(ends[0])
        if end is None:  # an error drops what had no credit
            assert seen == self.sent


@attrs.define(eq=False)
class World:
    nursery: trio.Nursery
    cuts: Iterator[tuple[int, int]]
    sizes: Iterator[int]
    endpoint: Endpoint = attrs.field(factory=Endpoint)
    requests: list[Request] = attrs.field(factory=list)
    server: MuxServerSide = attrs.field(init=False)
    client: MuxClientSide = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        config = MuxSettings(high_water=4096, low_water=1024, max_streams=8)
        self.server = MuxServerSide(config, self.nursery)
        self.server._acceptors[PATH] = self.endpoint, True
        self.client = MuxClientSide(config, self.nursery, self._dial)
        self.client.instance_found(ADDRESS)

    async def _dial(self, address: HostPort) -> trio.abc.Stream:
        assert address == PLACE
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        to_client, to_worker = next(self.cuts)
        served = Torn(theirs, to_worker, self.sizes)
        self.nursery.start_soon(self.server.serve_stream, served, "the client")
        return Torn(ours, to_client, self.sizes)

    def call(self, request: Request) -> Call | None:
        """The worker's side of it, if its OPEN came."""
        wanted = b"%d" % request.number
        return next((c for c in self.endpoint.calls if c.payload.rstrip(b".") == wanted), None)

    # --- what may happen ---------------------------------------------------------------------

    def open(self, size: int) -> None:
        request = Request(len(self.requests))
        self.requests.append(request)
        self.nursery.start_soon(self._run, request, b"%d" % request.number + b"." * size)

    async def _run(self, request: Request, payload: bytes) -> None:
        with request.scope:
            try:
                async with self.client.open_stream(ADDRESS, HEAD, payload, request.sink) as stream:
                    request.stream = stream
                    await request.leaves.wait()
                    request.left = not request.sink.ends
            except DynamoException as exc:
                request.refused = exc
        if request.scope.cancelled_caught:
            request.left = not request.sink.ends

    def act(self, what: str, request: Request, number: int) -> None:
        call = self.call(request)
        if what in ("grant", "stop", "say", "shut") and request.stream is not None:
            self._act_as_client(what, request, request.stream, number)
        elif what == "abandon":
            request.scope.cancel("the test abandons it")
        elif what == "leave":
            request.leaves.set()
        elif call is not None and not request.end:
            self._act_as_worker(what, request, call, number)

    def _act_as_client(self, what: str, request: Request, stream: ClientStream, n: int) -> None:
        if what == "grant":
            request.granted += n
            stream.grant(n)
        elif what == "stop":
            stream.stop()
        elif what == "say" and stream.has_credit:
            request.said.append(b"%d" % len(request.said) + b"." * n * 100)
            stream.put(request.said[-1])
        elif what == "shut":
            stream.finish_input()

    def _act_as_worker(self, what: str, request: Request, call: Call, n: int) -> None:
        if what == "tokens":
            # Few at a time, so that items find credit too; sometimes more than there is at all.
            count = n if n > 90 else 1 + n % 8
            tokens = list(range(len(request.sent), len(request.sent) + count))
            request.sent += tokens
            call.outbox.put_tokens(tokens)
        elif what == "item" and call.outbox.has_credit:
            request.sent.append(b"%d" % len(request.sent) + b"." * n * 1000)
            item = request.sent[-1]
            assert isinstance(item, bytes)
            call.outbox.put(item)
        elif what == "take":
            call.outbox.grant(n)
        elif what in ("finish", "fail"):
            end = None if what == "finish" else EngineShutdown("over", planned=True)
            if not call.cancels:
                request.end.append(end)
            call.outbox.finish(end)

    def settle(self) -> None:
        """The worker ends what runs, and the clients take everything."""
        for request in self.requests:
            self.act("finish", request, 0)
            self.act("grant", request, 100_000)


ACTS = [
    *("open", "open", "pause", "pause", "pause", "tokens", "tokens", "tokens", "tokens", "item"),
    *("item", "grant", "grant", "say", "take", "stop", "shut", "finish", "fail", "leave"),
    "abandon",
]
STEP = st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.integers(1, 100))
STEPS = st.lists(STEP, min_size=10, max_size=80)
#: Some streams are there from the beginning, else most of what happens would happen to none.
OPENS = st.lists(st.tuples(st.just("open"), st.integers(0, 4), st.just(0)), min_size=1, max_size=4)
SCRIPTS = st.builds(lambda opens, steps: [*opens, ("pause", 0, 0), *steps], OPENS, STEPS)
#: Bytes of a request, and seconds of a pause.
REQUESTS = (0, 10, 0, 40_000, 200_000)
PAUSES = (0.0, 0.0, 0.0, 0.5, 2.5)
#: Bytes that a connection carries before it is cut, on the way to the client and to the worker.
FAR = 10**9
PLACES = st.one_of(st.just(FAR), st.integers(0, 3000))
CUTS: st.SearchStrategy[list[tuple[int, int]]] = st.one_of(
    st.just([]), st.lists(st.tuples(PLACES, PLACES), max_size=3)
)
SIZES = st.lists(st.sampled_from([1, 2, 3, 7, 100, 5000, 10**6, 10**6]), min_size=1, max_size=5)


async def play(
    script: list[tuple[str, int, int]], cuts: list[tuple[int, int]], sizes: list[int]
) -> None:
    async with trio.open_nursery() as nursery:
        endless = iter([*cuts, *[(FAR, FAR)] * 10_000])
        # A message of many bytes in pieces of one would take all day.
        world = World(nursery, endless, cycle([*sizes, 10**6]))
        for what, which, number in script:
            if what == "open":
                world.open(REQUESTS[which])
            elif what == "pause":
                await trio.sleep(PAUSES[which])
                await wait_all_tasks_blocked()
                check_bounded(world)
            elif world.requests:
                world.act(what, world.requests[which % len(world.requests)], number)
        for _ in range(3):
            await wait_all_tasks_blocked()
            world.settle()
        await trio.sleep(60)
        for request in world.requests:
            request.check(world.call(request))
            request.leaves.set()
        await wait_all_tasks_blocked()
        check_empty(world)
        nursery.cancel_scope.cancel()


def check_bounded(world: World) -> None:
    """Whenever all is quiet both ends keep what has no credit, and nothing else."""
    unseen = sum(len(r.sent) - len(r.sink.seen) for r in world.requests)
    links = [*world.server._links, *(way._link for way in world.client._ways.values())]
    for link in links:
        if link is None or link.over or not link.established:
            continue
        assert link.wire.streams <= world.server.settings.max_streams
        assert link.wire.backlog == 0
        assert link.wire.arriving == 0
        assert sum(map(held, link.wire._streams.values())) <= unseen


def held(stream: Stream) -> int:
    """Tokens and items that wait for credit."""
    assert not stream.queue
    counts = (len(e) if isinstance(e, array) else isinstance(e, bytes) for e in stream.held)
    return sum(counts)


def check_empty(world: World) -> None:
    """Nothing is left in either table."""
    assert len(world.server._links) == 1
    for link in world.server._links:
        assert not link._answers
        assert not link.has_last_words
        assert not link.wire.streams
        assert not link.wire.wants_to_send
    (way,) = world.client._ways.values()
    assert way._users == 0
    assert way._link is not None
    assert not way._link._streams
    assert not way._link.wire.streams
    for call in world.endpoint.calls:
        assert call.finished


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS, CUTS, SIZES)
def test_every_stream_ends_once_and_nothing_is_left(
    script: list[tuple[str, int, int]], cuts: list[tuple[int, int]], sizes: list[int]
) -> None:
    trio.run(play, script, cuts, sizes, clock=MockClock(autojump_threshold=0))


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=1200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS, CUTS, SIZES)
def test_every_stream_ends_once_and_nothing_is_left_for_long(
    script: list[tuple[str, int, int]], cuts: list[tuple[int, int]], sizes: list[int]
) -> None:
    trio.run(play, script, cuts, sizes, clock=MockClock(autojump_threshold=0))
