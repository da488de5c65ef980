"""Every request plane keeps these promises: in memory, Dynamo's tcp, and mux, in all ways."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.lowlevel

from dynamo_trio.errors import (
    CannotConnect,
    Disconnected,
    Draining,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
)
from dynamo_trio.plane import (
    INITIAL_CREDIT,
    AcceptedCall,
    MemoryPlane,
    Outbox,
    RequestHead,
    RequestPlane,
)
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, TlsSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.llm import encode_token
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from dynamo_trio.plane import ClientStream

#: Real sockets: no wait takes longer unless something hangs.
PATIENCE = 20.0
#: How long to look for what must not happen.
MOMENT = 0.1


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
            await trio.sleep(0.001)


@attrs.define(eq=False)
class RecordingSink:
    #: Of the stream.
    codec: Codec = MSGPACK
    payloads: list[bytes] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)
    ended: trio.Event = attrs.field(factory=trio.Event)

    def expect(self, codec: Codec) -> None:
        """Whoever opens a stream on a plane directly has said it already."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert not self.ends
        self.payloads.extend(payloads)

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        self.feed([encode_token(self.codec, token_id) for token_id in token_ids])

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
class FakeCall(AcceptedCall):
    """Does nothing by itself; the test plays the handler."""

    outbox: Outbox
    payload: bytes
    head: RequestHead
    cancelled: int = 0
    stopped: int = 0

    def cancel(self) -> None:
        self.cancelled += 1

    def stop(self) -> None:
        self.stopped += 1


@attrs.define(eq=False)
class FakeEndpoint:
    refusal: DynamoException | None = None
    calls: list[FakeCall] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> FakeCall:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(FakeCall(outbox, payload, head))
        return self.calls[-1]

    @property
    def call(self) -> FakeCall:
        (call,) = self.calls
        return call


@attrs.frozen
class Kind:
    """A plane under test. ``open``: the worker's process and the client's."""

    open: Callable[[Path], AbstractAsyncContextManager[tuple[RequestPlane, RequestPlane]]]
    codec: Codec = MSGPACK


@asynccontextmanager
async def memory(_: Path) -> AsyncIterator[tuple[RequestPlane, RequestPlane]]:
    plane = MemoryPlane()
    yield plane, plane


@asynccontextmanager
async def sockets(
    tls: TlsSettings,
) -> AsyncIterator[tuple[RequestPlane, RequestPlane]]:
    settings = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1", tls=tls)
    async with open_tcp_plane(settings) as worker, open_tcp_plane(settings) as client:
        yield worker, client


@asynccontextmanager
async def mux(tls: TlsSettings) -> AsyncIterator[tuple[RequestPlane, RequestPlane]]:
    settings = MuxSettings(host="127.0.0.1", tls=tls)
    async with open_mux_plane(settings) as worker, open_mux_plane(settings) as client:
        yield worker, client


KINDS = {
    "mem": Kind(memory),
    "tcp-msgpack": Kind(lambda _: sockets(TlsSettings())),
    "tcp-json": Kind(lambda _: sockets(TlsSettings()), JSON),
    "tcp-tls": Kind(lambda folder: sockets(mutual_tls(folder))),
    "mux-msgpack": Kind(lambda _: mux(TlsSettings())),
    "mux-json": Kind(lambda _: mux(TlsSettings()), JSON),
    "mux-tls": Kind(lambda folder: mux(mutual_tls(folder))),
}


@attrs.define(eq=False)
class Bench:
    """A plane, an endpoint on it that is served, and what is needed to ask it."""

    worker: RequestPlane
    client: RequestPlane
    codec: Codec
    endpoint: FakeEndpoint
    address: str
    sink: RecordingSink = attrs.field(factory=RecordingSink)

    @property
    def head(self) -> RequestHead:
        return RequestHead("request-1", {"traceparent": "00-1"}, self.codec)

    @property
    def call(self) -> FakeCall:
        return self.endpoint.call

    def value(self, value: object) -> bytes:
        return self.codec.encode(value)

    def ask(self, sink: RecordingSink | None = None) -> AbstractAsyncContextManager[ClientStream]:
        question = self.value("question")
        return self.client.open_stream(self.address, self.head, question, sink or self.sink)


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    kind = KINDS[request.param]
    endpoint = FakeEndpoint()
    async with (
        kind.open(tmp_path) as (worker, client),
        worker.serve("1f/generate", endpoint) as address,
    ):
        sink = RecordingSink(kind.codec)
        yield Bench(worker, client, kind.codec, endpoint, address, sink)


# --- the ordinary way ------------------------------------------------------------------------


async def test_items_arrive_in_order_and_then_the_end(bench: Bench) -> None:
    async with bench.ask():
        assert bench.call.payload == bench.value("question")
        assert bench.call.head == bench.head
        bench.call.outbox.begin()
        for item in ("a", {"b": [1, None]}, "c"):
            bench.call.outbox.put(bench.value(item))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
        assert bench.sink.payloads == [bench.value(i) for i in ("a", {"b": [1, None]}, "c")]
    assert bench.call.cancelled == bench.call.stopped == 0


async def test_an_item_arrives_while_the_next_is_not_there_yet(bench: Bench) -> None:
    async with bench.ask():
        bench.call.outbox.begin()
        for number in range(5):
            bench.call.outbox.put(bench.value(number))
            await until(lambda: len(bench.sink.payloads) == number + 1)  # noqa: B023 - used at once
        assert not bench.sink.ends


async def test_streams_at_once_do_not_mix(bench: Bench) -> None:
    sinks = [RecordingSink() for _ in range(20)]

    async def ask(number: int) -> None:
        question = bench.value(number)
        async with bench.client.open_stream(bench.address, bench.head, question, sinks[number]):
            assert await sinks[number].end() is None

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
        await until(lambda: len(bench.endpoint.calls) == 20)
        for call in bench.endpoint.calls:
            call.outbox.begin()
        for _ in range(3):
            for call in bench.endpoint.calls:
                call.outbox.put(call.payload)
        for call in bench.endpoint.calls:
            call.outbox.finish(None)
    assert [sink.payloads for sink in sinks] == [[bench.value(n)] * 3 for n in range(20)]


async def test_a_large_question_and_a_large_answer(bench: Bench) -> None:
    question, answer = bench.value("q" * 3_000_000), bench.value("a" * 3_000_000)
    async with bench.client.open_stream(bench.address, bench.head, question, bench.sink):
        assert bench.call.payload == question
        bench.call.outbox.begin()
        bench.call.outbox.put(answer)
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.sink.payloads == [answer]


async def test_an_endpoint_may_answer_without_the_annotated_envelope(bench: Bench) -> None:
    bare = FakeEndpoint()
    head = attrs.evolve(bench.head, annotated=False)
    async with (
        bench.worker.serve("1f/bare", bare, annotated=False) as address,
        bench.client.open_stream(address, head, bench.value("question"), bench.sink),
    ):
        assert bare.call.head.annotated is False
        bare.call.outbox.begin()
        bare.call.outbox.put(bench.value({"data": 1}))
        bare.call.outbox.put_tokens([7])
        bare.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.sink.payloads == [bench.value({"data": 1}), bench.value({"token_ids": [7]})]


async def test_tokens_arrive_in_order_among_items(bench: Bench) -> None:
    def token(token_id: int) -> bytes:
        return encode_token(bench.codec, token_id)

    async with bench.ask():
        outbox = bench.call.outbox
        outbox.begin()
        outbox.put_tokens([1])
        outbox.put_tokens([2, 3])
        outbox.put(bench.value("between"))
        outbox.put_tokens([])
        outbox.put_tokens([2**31])
        outbox.put(bench.value("last"))
        outbox.finish(None)
        outbox.put_tokens([4])
        assert await bench.sink.end() is None
    between, last = bench.value("between"), bench.value("last")
    assert bench.sink.payloads == [*map(token, (1, 2, 3)), between, token(2**31), last]


async def test_tokens_wait_for_a_slow_reader_and_none_is_lost(bench: Bench) -> None:
    """An engine does not stop for one slow reader: it is not even asked."""
    count = 5 * INITIAL_CREDIT
    async with bench.ask() as stream:
        outbox = bench.call.outbox
        outbox.begin()
        for token_id in range(count):
            outbox.put_tokens([token_id])
        outbox.put(bench.value("last"))
        outbox.finish(None)
        await until(lambda: len(bench.sink.payloads) >= INITIAL_CREDIT)
        stream.grant(count)
        assert await bench.sink.end() is None
    expected = [encode_token(bench.codec, n) for n in range(count)]
    assert bench.sink.payloads == [*expected, bench.value("last")]


# --- other ends ------------------------------------------------------------------------------


async def test_the_first_end_wins_and_nothing_follows_it(bench: Bench) -> None:
    async with bench.ask():
        outbox = bench.call.outbox
        outbox.begin()
        outbox.put(bench.value("early"))
        outbox.finish(EngineShutdown("gone"))
        outbox.finish(None)
        outbox.put(bench.value("late"))
        end = await bench.sink.end()
        assert (type(end), str(end)) == (EngineShutdown, "gone")
        await trio.sleep(MOMENT)
    assert bench.sink.payloads == [bench.value("early")]
    assert len(bench.sink.ends) == 1


async def test_an_error_does_not_wait_behind_what_has_no_credit(bench: Bench) -> None:
    """A reader that takes nothing must still hear in time that its stream goes elsewhere.

    On Dynamo's tcp everything is in one pipe, so there it hears it once it takes what lies there.
    """
    count = 5 * INITIAL_CREDIT
    async with bench.ask() as stream:
        outbox = bench.call.outbox
        outbox.begin()
        for token_id in range(count):
            outbox.put_tokens([token_id])
        outbox.put(bench.value("last"))
        outbox.finish(EngineShutdown("handed over", planned=True))
        if bench.worker.name == "tcp":
            stream.grant(count + 1)
        end = await bench.sink.end()
        assert isinstance(end, EngineShutdown)
        assert end.planned == (bench.worker.name != "tcp")
    expected = [*(encode_token(bench.codec, n) for n in range(count)), bench.value("last")]
    if bench.worker.name != "tcp":
        del expected[INITIAL_CREDIT:]
    assert bench.sink.payloads == expected


async def test_an_invalid_request_ends_its_stream_before_it_begins(bench: Bench) -> None:
    async with bench.ask():
        bench.call.outbox.finish(InvalidArgument("no such thing"))
        end = await bench.sink.end()
        assert (type(end), str(end)) == (InvalidArgument, "no such thing")
    assert bench.sink.payloads == []
    assert bench.call.cancelled == 0


async def test_a_stream_may_end_without_an_item(bench: Bench) -> None:
    async with bench.ask():
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None


async def test_leaving_cancels_the_call_and_detaches_the_sink(bench: Bench) -> None:
    async with bench.ask():
        bench.call.outbox.begin()
        bench.call.outbox.put(bench.value(1))
        await until(lambda: len(bench.sink.payloads) == 1)
        bench.call.outbox.put(bench.value(2))
        seen = len(bench.sink.payloads)
    await until(lambda: bench.call.cancelled > 0)
    bench.call.outbox.put(bench.value("late"))
    bench.call.outbox.finish(None)
    await trio.sleep(MOMENT)
    assert len(bench.sink.payloads) == seen
    assert bench.sink.ends == []


async def test_leaving_at_once_cancels_the_call(bench: Bench) -> None:
    async with bench.ask():
        pass
    await until(lambda: bench.call.cancelled > 0)
    assert (bench.sink.payloads, bench.sink.ends) == ([], [])


async def test_stop_asks_the_call_to_end(bench: Bench) -> None:
    async with bench.ask() as stream:
        bench.call.outbox.begin()
        bench.call.outbox.put(bench.value(1))
        await until(lambda: len(bench.sink.payloads) == 1)
        stream.stop()
        await until(lambda: bench.call.stopped > 0)
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.call.cancelled == 0


async def test_a_cancelled_client_cancels_the_call(bench: Bench) -> None:
    with trio.CancelScope() as scope:
        async with bench.ask():
            scope.cancel()
            await trio.sleep_forever()
    await until(lambda: bench.call.cancelled > 0)
    assert bench.sink.ends == []


# --- not even begun --------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [Draining("stopping"), Overloaded("full")], ids=type)
async def test_a_refusal_reaches_the_client_as_its_class(
    bench: Bench, refusal: DynamoException
) -> None:
    bench.endpoint.refusal = refusal
    with pytest.raises(type(refusal)):
        async with bench.ask():
            raise AssertionError("a refused stream must not open")
    assert (bench.sink.payloads, bench.sink.ends) == ([], [])
    bench.endpoint.refusal = None
    async with bench.ask():  # and the way is open for the next one
        assert bench.call.cancelled == 0


async def test_an_endpoint_that_is_served_no_more_is_cannot_connect(bench: Bench) -> None:
    async with bench.worker.serve("1f/other", FakeEndpoint()) as address:
        pass
    with pytest.raises(CannotConnect):
        async with bench.client.open_stream(address, bench.head, bench.value(1), bench.sink):
            raise AssertionError("a stream to nobody must not open")


async def test_two_endpoints_cannot_share_a_path(bench: Bench) -> None:
    with pytest.raises(ValueError, match="1f/generate"):
        async with bench.worker.serve("1f/generate", FakeEndpoint()):
            raise AssertionError("the path is taken")


async def test_two_paths_are_two_endpoints(bench: Bench) -> None:
    other = FakeEndpoint()
    async with (
        bench.worker.serve("1f/other", other) as address,
        bench.client.open_stream(address, bench.head, bench.value(1), bench.sink),
    ):
        assert len(other.calls) == 1
        assert bench.endpoint.calls == []


# --- credit ----------------------------------------------------------------------------------


async def test_no_more_is_delivered_than_there_is_credit(bench: Bench) -> None:
    """A reader that grants nothing holds the call back; once it grants, everything comes."""
    item = bench.value("x" * 50_000)
    async with bench.ask() as stream, trio.open_nursery() as nursery:
        outbox, sent = bench.call.outbox, 0
        outbox.begin()
        held_back = False
        while not held_back:
            while outbox.has_credit:
                outbox.put(item)
                sent += 1
                assert sent < 2000, "nothing holds the call back"
            with trio.move_on_after(3 * MOMENT) as waiting:
                await outbox.wait_credit()
            held_back = waiting.cancelled_caught
        nursery.start_soon(outbox.wait_credit)
        await until(lambda: len(bench.sink.payloads) == INITIAL_CREDIT)
        await trio.sleep(MOMENT)
        assert len(bench.sink.payloads) == INITIAL_CREDIT
        assert not outbox.has_credit
        stream.grant(sent)
        await until(lambda: outbox.has_credit and len(bench.sink.payloads) == sent)


async def test_a_reader_that_grants_nothing_holds_back_only_itself(bench: Bench) -> None:
    other = RecordingSink()
    async with bench.ask(), bench.ask(other):
        slow, quick = bench.endpoint.calls
        for call in (slow, quick):
            call.outbox.begin()
        while slow.outbox.has_credit:
            slow.outbox.put(bench.value("x" * 50_000))
        quick.outbox.put(bench.value("quick"))
        quick.outbox.finish(None)
        assert await other.end() is None
    assert other.payloads == [bench.value("quick")]


async def test_a_cut_wakes_whoever_waits_for_credit(bench: Bench) -> None:
    async with bench.ask():
        outbox, woken = bench.call.outbox, trio.Event()
        outbox.begin()
        while outbox.has_credit:
            outbox.put(bench.value("x" * 50_000))

        async def wait() -> None:
            await outbox.wait_credit()
            woken.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(MOMENT)
            outbox.wake()
            with trio.fail_after(PATIENCE):
                await woken.wait()


# --- leaving discovery -----------------------------------------------------------------------


async def test_an_instance_that_leaves_interrupts_nothing(bench: Bench) -> None:
    async with bench.ask():
        bench.call.outbox.begin()
        bench.client.instance_gone(bench.address)
        await trio.sleep(MOMENT)
        bench.call.outbox.put(bench.value(1))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.sink.payloads == [bench.value(1)]


async def test_settling_waits_for_an_answer_to_begin(bench: Bench) -> None:
    async with bench.ask():
        with trio.fail_after(PATIENCE):
            bench.call.outbox.begin()
            await bench.worker.settle()
        bench.client.instance_gone(bench.address)
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None


async def test_what_is_withdrawn_is_served_to_its_end_and_may_come_back(bench: Bench) -> None:
    bench.client.instance_found(bench.address)
    async with bench.ask():
        bench.call.outbox.begin()
        bench.worker.withdraw(bench.address)
        with trio.fail_after(PATIENCE):
            await bench.worker.wait_acknowledged()
        assert bench.worker.places == 0
        bench.call.outbox.put(bench.value(1))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    bench.worker.restore(bench.address)
    await until(lambda: not bench.client.avoids(bench.address))
    again = RecordingSink(bench.codec)
    async with bench.ask(again):
        bench.endpoint.calls[1].outbox.finish(None)
        assert await again.end() is None


async def test_what_a_peer_can_place_elsewhere_is_known_as_far_as_it_can_say(bench: Bench) -> None:
    async with bench.ask():
        can_say = bench.worker.name != "tcp"
        assert bench.call.outbox.peer.places == (0 if can_say else None)
        bench.call.outbox.finish(None)


async def test_who_avoids_a_worker_sends_it_nothing_and_who_does_not_is_served(
    bench: Bench,
) -> None:
    assert not bench.client.avoids(bench.address)
    async with bench.ask():
        bench.worker.withdraw(bench.address)
        with trio.fail_after(PATIENCE):
            await bench.worker.wait_acknowledged()
        if not bench.client.avoids(bench.address):
            async with bench.ask(RecordingSink()):
                assert len(bench.endpoint.calls) == 2
            return
        with pytest.raises(Draining):
            async with bench.ask(RecordingSink()):
                raise AssertionError("it is avoided")
        assert len(bench.endpoint.calls) == 1


async def test_an_instance_that_is_found_and_gone_is_found_again(bench: Bench) -> None:
    for number in range(3):
        bench.client.instance_found(bench.address)
        async with bench.ask(RecordingSink()):
            assert len(bench.endpoint.calls) == number + 1
        bench.client.instance_gone(bench.address)


# --- a plane that is closed ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "mem"])
async def test_streams_end_with_their_plane(kind: str, tmp_path: Path) -> None:
    endpoint, sink = FakeEndpoint(), RecordingSink()
    head = RequestHead("1", codec=KINDS[kind].codec)
    async with KINDS[kind].open(tmp_path) as (worker, client):
        async with worker.serve("1f/generate", endpoint) as address:
            stream = client.open_stream(address, head, head.codec.encode(1), sink)
            await stream.__aenter__()
            endpoint.call.outbox.begin()
    assert isinstance(await sink.end(), Disconnected)
    await stream.__aexit__(None, None, None)
