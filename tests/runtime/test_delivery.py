"""A request is admitted until the end of its answer has left the process, on every plane."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from dynamo_trio import RequestHead, Timetable
from dynamo_trio.endpoint import EndpointService
from dynamo_trio.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo_trio.lifecycle import CutReason, Lifecycle, Outcome
from dynamo_trio.metrics.component import ComponentMetrics
from dynamo_trio.plane import INITIAL_CREDIT, MemoryPlane
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.plane.tcp.call_home import CallHome
from dynamo_trio.plane.tcp.settings import TcpSettings
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import Handshake, Item, Sentinel
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.control import ReplyTo
from dynamo_trio.wire.names import EndpointId
from tests.plane.mux_peer import PATH, Pair, Sink, Valve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio import Context

#: More than the credit of a stream at first.
TOKENS = 2 * INITIAL_CREDIT
HEAD = RequestHead("request-1")


async def push(request: int, context: Context, output: Output) -> None:
    """An engine does not stop for one slow reader."""
    output.put_tokens(range(request))


async def fail(request: object, context: Context, output: Output) -> None:
    raise InvalidArgument("no")


@attrs.define(eq=False)
class Client:
    """One request, and how much of its answer it takes. By default all, behind :meth:`read`."""

    tokens: list[int] = attrs.field(factory=list)
    #: The errors in which the answer ended, or None where it ended well.
    ends: list[DynamoException | None] = attrs.field(factory=list)
    read: Callable[[], object] = attrs.field(default=lambda: None)
    leave: Callable[[], object] = attrs.field(default=lambda: None)


@asynccontextmanager
async def in_memory(service: EndpointService, tokens: int) -> AsyncIterator[Client]:
    plane, sink = MemoryPlane(), Sink()
    client = Client(sink.tokens, sink.ends)
    async with trio.open_nursery() as nursery, plane.serve(PATH, service) as address:
        opened, leaving = trio.Event(), trio.Event()

        async def ask() -> None:
            payload = MSGPACK.encode(tokens)
            async with plane.open_stream(address, HEAD, payload, sink) as stream:
                client.read = partial(stream.grant, tokens)
                opened.set()
                await leaving.wait()

        nursery.start_soon(ask)
        await opened.wait()
        client.leave = leaving.set
        yield client
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def on_mux(service: EndpointService, tokens: int, *, stuck: bool) -> AsyncIterator[Client]:
    """``stuck``: the connection takes nothing, while the stream has credit; else the reverse."""
    sink = Sink()
    async with trio.open_nursery() as nursery:
        pair = Pair(MuxSettings(heartbeat=1e6), nursery)
        pair.server._acceptors[PATH] = service, True
        payload = MSGPACK.encode(tokens if not stuck else INITIAL_CREDIT)
        leaving = trio.Event()

        async def ask() -> None:
            async with pair.ask(sink, payload) as stream:
                client.read = partial(stream.grant, tokens)
                if stuck:
                    client.read, client.leave = pair.to_worker.open, pair.cut
                opened.set()
                await leaving.wait()

        opened, client = trio.Event(), Client(sink.tokens, sink.ends, leave=leaving.set)
        nursery.start_soon(ask)
        await opened.wait()
        pair.to_worker.stuck = stuck
        yield client
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def on_tcp(service: EndpointService, tokens: int) -> AsyncIterator[Client]:
    ours, theirs = memory_stream_pair()
    valve = Valve(theirs, stuck=True)
    client, end = Client(), ClientEnd()

    async def dial(address: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return valve

    async def receive() -> bytes | bytearray:
        try:
            return await ours.receive_some()
        except trio.ClosedResourceError:
            return b""

    async def listen() -> None:
        while data := await receive():
            end.receive_data(data)
            while (event := end.next_event()) is not None:
                if isinstance(event, Handshake):
                    end.accept(MSGPACK)
                elif isinstance(event, Item):
                    client.tokens.append(len(client.tokens))
                elif isinstance(event, Sentinel):
                    client.ends.append(None)

    def leave() -> None:
        nursery.start_soon(ours.aclose)

    client.read, client.leave = valve.open, leave
    async with trio.open_nursery() as nursery:
        reply_to = ReplyTo(HostPort("10.0.0.2", 1), "subject", "request-1")
        home = CallHome(reply_to, MSGPACK, dial, TcpSettings())
        home.call = service.accept(HEAD, MSGPACK.encode(tokens), home)
        nursery.start_soon(home.run)
        nursery.start_soon(listen)
        yield client
        nursery.cancel_scope.cancel()


Way = Callable[[EndpointService, int], AbstractAsyncContextManager[Client]]

#: Ways to be asked by a client that does not take the whole answer; true if it still can be told
#: something else in place of the end.
WAYS: dict[str, tuple[Way, bool]] = {
    "memory": (in_memory, True),
    "mux, no credit": (partial(on_mux, stuck=False), True),
    "mux, stuck": (partial(on_mux, stuck=True), False),
    "tcp": (on_tcp, False),
}


@attrs.define(eq=False)
class Bench:
    way: Way
    recalls: bool
    lifecycle: Lifecycle
    service: EndpointService

    #: The handler begins.
    go: trio.Event

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[Client]:
        async with self.way(self.service, TOKENS) as client:
            self.go.set()
            await wait_all_tasks_blocked()
            yield client

    @property
    def in_flight(self) -> int:
        return len(self.lifecycle.in_flight())

    @property
    def tally(self) -> dict[Outcome, int]:
        return dict(self.lifecycle.work.tally)


async def _hold_tasks(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


@asynccontextmanager
async def benches(way: str, handler: Any = push) -> AsyncIterator[Bench]:
    lifecycle = Lifecycle(Timetable(grace=0.0, drain=10.0), exit_code_on_loss=9)
    go = trio.Event()

    async def handle(request: object, context: Context, output: Output) -> None:
        await go.wait()
        await handler(request, context, output)

    metrics = ComponentMetrics("1f").endpoint(EndpointId("test", "backend", "generate"))
    async with trio.open_nursery() as nursery:
        tasks = await nursery.start(_hold_tasks)
        lifecycle.on_abort(tasks.cancel_scope.cancel)
        service = EndpointService(
            "generate", PushHandler(handle), lifecycle.work, tasks, lifecycle, metrics
        )
        yield Bench(*WAYS[way], lifecycle, service, go)
        nursery.cancel_scope.cancel()


every_way = pytest.mark.parametrize("way", WAYS)


@every_way
async def test_a_reader_that_stops_and_reads_again_gets_the_whole_answer(
    way: str, autojump_clock: MockClock
) -> None:
    async with benches(way) as bench, bench.asked() as client, trio.open_nursery() as nursery:
        nursery.start_soon(bench.lifecycle.run)
        bench.lifecycle.request_stop("the test")
        await trio.sleep(5)
        assert bench.in_flight == 1
        assert bench.tally == {}
        (admission,) = bench.lifecycle.in_flight()
        assert admission.prospects.estimated() == 0.0  # so nothing of it is handed over
        client.read()
        with trio.fail_after(0.1):
            await bench.lifecycle.wait_stopped()
        await wait_all_tasks_blocked()
        assert client.ends == [None]
        assert len(client.tokens) in (TOKENS, INITIAL_CREDIT)
    assert bench.tally == {Outcome.FINISHED: 1}
    assert bench.lifecycle.exit_code() == 0


@every_way
async def test_a_reader_that_never_reads_is_cut_at_the_limit_and_counted(
    way: str, autojump_clock: MockClock
) -> None:
    async with benches(way) as bench, bench.asked() as client, trio.open_nursery() as nursery:
        nursery.start_soon(bench.lifecycle.run)
        bench.lifecycle.request_stop("the test")
        began = trio.current_time()
        await bench.lifecycle.wait_stopped()
        assert 10 <= trio.current_time() - began <= 12
        await wait_all_tasks_blocked()
        if bench.recalls:
            (error,) = client.ends
            assert isinstance(error, DynamoException)
        else:
            assert client.ends == []
    assert bench.tally == {Outcome.CUT: 1}
    assert bench.lifecycle.exit_code() == 9


@every_way
async def test_a_reader_that_leaves_is_not_waited_for(way: str, autojump_clock: MockClock) -> None:
    async with benches(way) as bench, bench.asked() as client:
        assert bench.in_flight == 1
        client.leave()
        await wait_all_tasks_blocked()
        assert bench.in_flight == 0
        assert bench.tally == {Outcome.CANCELLED: 1}


@every_way
async def test_a_cut_before_the_limit_goes_on_elsewhere_where_that_can_be_told(
    way: str, autojump_clock: MockClock
) -> None:
    async with benches(way) as bench, bench.asked() as client:
        (admission,) = bench.lifecycle.in_flight()
        admission.peer.renew(1)
        assert admission.cut(CutReason.HANDOVER)
        await wait_all_tasks_blocked()
        if not bench.recalls:
            assert client.ends == []
            assert bench.in_flight == 1
            client.read()
            await wait_all_tasks_blocked()
            assert client.ends == [None]
            assert bench.tally == {Outcome.FINISHED: 1}
            return
        (error,) = client.ends
        assert isinstance(error, EngineShutdown)
        assert error.planned
        assert client.tokens == list(range(INITIAL_CREDIT))
        assert bench.tally == {Outcome.HANDED_OVER: 1}


@pytest.mark.parametrize("way", ["mux, stuck", "tcp"])
async def test_an_error_is_admitted_until_it_has_left(way: str, autojump_clock: MockClock) -> None:
    async with benches(way, fail) as bench, bench.asked() as client:
        assert bench.in_flight == 1
        client.read()
        await wait_all_tasks_blocked()
        assert bench.in_flight == 0
        assert bench.tally == {Outcome.FAILED: 1}
