"""Every request plane keeps these promises about requests that stream in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.errors import DynamoException, InvalidArgument
from dynamo_trio.plane import INITIAL_CREDIT, AcceptedCall, Outbox, RequestHead
from tests.plane.test_plane_contract import (
    KINDS,
    MOMENT,
    PATIENCE,
    FakeEndpoint,
    RecordingSink,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from dynamo_trio.plane import ClientStream, RequestPlane
    from dynamo_trio.wire.dynamo.codec import Codec


@attrs.define(eq=False)
class InCall(AcceptedCall):
    """Notes what it is told; the test plays the handler."""

    outbox: Outbox
    payload: bytes
    head: RequestHead
    items: list[bytes] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)
    cancelled: int = 0
    stopped: int = 0

    def cancel(self) -> None:
        self.cancelled += 1

    def stop(self) -> None:
        self.stopped += 1

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert not self.ends
        self.items.extend(payloads)

    def finish_input(self, error: DynamoException | None) -> None:
        self.ends.append(error)


@attrs.define(eq=False)
class InEndpoint:
    calls: list[InCall] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> InCall:
        self.calls.append(InCall(outbox, payload, head))
        return self.calls[-1]

    @property
    def call(self) -> InCall:
        (call,) = self.calls
        return call


@attrs.define(eq=False)
class Bench:
    worker: RequestPlane
    client: RequestPlane
    codec: Codec
    endpoint: InEndpoint
    address: str
    sink: RecordingSink

    @property
    def head(self) -> RequestHead:
        return RequestHead("request-1", {"a": "b"}, self.codec, streams_in=True)

    @property
    def call(self) -> InCall:
        return self.endpoint.call

    def value(self, value: object) -> bytes:
        return self.codec.encode(value)

    def ask(self, sink: RecordingSink | None = None) -> AbstractAsyncContextManager[ClientStream]:
        return self.client.open_stream(self.address, self.head, b"", sink or self.sink)


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    kind = KINDS[request.param]
    endpoint = InEndpoint()
    async with (
        kind.open(tmp_path) as (worker, client),
        worker.serve("1f/generate", endpoint) as address,
    ):
        yield Bench(worker, client, kind.codec, endpoint, address, RecordingSink())


# --- the ordinary way ------------------------------------------------------------------------


async def test_items_stream_in_while_others_stream_out(bench: Bench) -> None:
    async with bench.ask() as stream:
        assert (bench.call.payload, bench.call.head) == (b"", bench.head)
        bench.call.outbox.begin()
        for number in range(5):
            stream.put(bench.value(number))
            await until(lambda: len(bench.call.items) == number + 1)  # noqa: B023 - used at once
            bench.call.outbox.put(bench.call.items[-1])
            await until(lambda: len(bench.sink.payloads) == number + 1)  # noqa: B023 - as above
        assert bench.call.ends == []
        stream.finish_input()
        await until(lambda: bool(bench.call.ends))
        bench.call.outbox.put(bench.value("last"))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.call.ends == [None]
    assert bench.call.items == [bench.value(n) for n in range(5)]
    assert bench.sink.payloads == [*bench.call.items, bench.value("last")]
    assert bench.call.cancelled == bench.call.stopped == 0


async def test_items_that_are_put_before_the_handler_begins_are_there(bench: Bench) -> None:
    async with bench.ask() as stream:
        stream.put(bench.value("early"))
        stream.finish_input()
        stream.put(bench.value("late"))
        stream.finish_input()
        await until(lambda: bool(bench.call.ends))
        assert bench.call.items == [bench.value("early")]
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.call.ends == [None]


async def test_a_request_may_end_without_an_item(bench: Bench) -> None:
    async with bench.ask() as stream:
        stream.finish_input()
        await until(lambda: bool(bench.call.ends))
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert (bench.call.items, bench.call.ends) == ([], [None])


async def test_a_large_item(bench: Bench) -> None:
    item = bench.value("x" * 3_000_000)
    async with bench.ask() as stream:
        stream.put(item)
        stream.put(bench.value("small"))
        await until(lambda: len(bench.call.items) == 2)
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        await bench.sink.end()
    assert bench.call.items == [item, bench.value("small")]


async def test_streams_at_once_do_not_mix(bench: Bench) -> None:
    async def ask(number: int) -> None:
        sink = RecordingSink()
        async with bench.ask(sink) as stream:
            for _ in range(3):
                stream.put(bench.value(number))
                await trio.lowlevel.checkpoint()
            stream.finish_input()
            assert await sink.end() is None

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
        await until(lambda: sum(bool(call.ends) for call in bench.endpoint.calls) == 20)
        for call in bench.endpoint.calls:
            call.outbox.begin()
            call.outbox.finish(None)
    found = sorted(call.items for call in bench.endpoint.calls)
    assert found == sorted([bench.value(n)] * 3 for n in range(20))


# --- ends ------------------------------------------------------------------------------------


async def test_the_answer_may_end_first(bench: Bench) -> None:
    """A client that never ends its input holds nothing up."""
    async with bench.ask() as stream:
        stream.put(bench.value(1))
        await until(lambda: bool(bench.call.items))
        bench.call.outbox.begin()
        bench.call.outbox.put(bench.value("enough"))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
        with trio.fail_after(PATIENCE):
            while not stream.has_credit:
                await stream.wait_credit()
        stream.put(bench.value(2))
        stream.finish_input()
        await trio.sleep(MOMENT)
    assert bench.sink.payloads == [bench.value("enough")]
    assert bench.call.items == [bench.value(1)]
    assert bench.call.cancelled == 0


async def test_an_answer_that_fails_ends_the_request(bench: Bench) -> None:
    async with bench.ask() as stream:
        bench.call.outbox.begin()
        bench.call.outbox.finish(InvalidArgument("no"))
        end = await bench.sink.end()
        assert (type(end), str(end)) == (InvalidArgument, "no")
        stream.put(bench.value(1))
        await trio.sleep(MOMENT)
    assert bench.call.items == []


async def test_leaving_cancels_the_call(bench: Bench) -> None:
    async with bench.ask() as stream:
        bench.call.outbox.begin()
        stream.put(bench.value(1))
        await until(lambda: bool(bench.call.items))
    await until(lambda: bench.call.cancelled > 0)
    assert (bench.sink.payloads, bench.sink.ends) == ([], [])


async def test_stop_ends_the_input_too(bench: Bench) -> None:
    async with bench.ask() as stream:
        bench.call.outbox.begin()
        stream.put(bench.value(1))
        await until(lambda: bool(bench.call.items))
        stream.stop()
        stream.put(bench.value(2))
        await until(lambda: bench.call.stopped > 0)
        bench.call.outbox.put(bench.value("bye"))
        bench.call.outbox.finish(None)
        assert await bench.sink.end() is None
    assert bench.sink.payloads == [bench.value("bye")]
    assert bench.call.items == [bench.value(1)]
    assert bench.call.cancelled == 0
    assert set(bench.call.ends) <= {None}


# --- credit ----------------------------------------------------------------------------------


async def test_a_call_that_grants_nothing_holds_its_client_back(bench: Bench) -> None:
    item = bench.value("x" * 50_000)
    async with bench.ask() as stream, trio.open_nursery() as nursery:
        bench.call.outbox.begin()
        sent, held_back = 0, False
        while not held_back:
            while stream.has_credit:
                stream.put(item)
                sent += 1
                assert sent < 2000, "nothing holds the client back"
            with trio.move_on_after(3 * MOMENT) as waiting:
                await stream.wait_credit()
            held_back = waiting.cancelled_caught
        assert len(bench.call.items) <= INITIAL_CREDIT
        nursery.start_soon(stream.wait_credit)
        granted = 0
        while granted < sent:
            fresh = len(bench.call.items) - granted
            bench.call.outbox.grant(fresh)
            granted += fresh
            await trio.sleep(0.01)
        await until(lambda: stream.has_credit)
        bench.call.outbox.finish(None)
        await bench.sink.end()
    assert bench.call.items == [item] * sent


async def test_a_client_that_waits_for_credit_hears_of_the_end(bench: Bench) -> None:
    async with bench.ask() as stream:
        bench.call.outbox.begin()
        while stream.has_credit:
            stream.put(bench.value("x" * 50_000))
            await trio.sleep(0.002)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.wait_credit)
            bench.call.outbox.finish(None)
            with trio.fail_after(PATIENCE):
                assert await bench.sink.end() is None


async def test_a_call_that_reads_nothing_holds_back_only_its_own_client(bench: Bench) -> None:
    other = RecordingSink()
    async with bench.ask() as slow, bench.ask(other) as quick:
        for call in bench.endpoint.calls:
            call.outbox.begin()
        while slow.has_credit:
            slow.put(bench.value("x" * 50_000))
            await trio.sleep(0.002)
        quick.put(bench.value("quick"))
        await until(lambda: bench.endpoint.calls[1].items == [bench.value("quick")])
        for call in bench.endpoint.calls:
            call.outbox.finish(None)
        assert await other.end() is None


# --- an ordinary request beside it ------------------------------------------------------------


async def test_an_ordinary_request_takes_no_items(bench: Bench) -> None:
    plain = FakeEndpoint()
    head = attrs.evolve(bench.head, streams_in=False)
    async with (
        bench.worker.serve("1f/plain", plain) as address,
        bench.client.open_stream(address, head, bench.value("q"), bench.sink) as stream,
    ):
        assert not plain.call.head.streams_in
        stream.put(bench.value("x"))
        stream.finish_input()
        with trio.fail_after(PATIENCE):
            await stream.wait_credit()
        plain.call.outbox.begin()
        plain.call.outbox.finish(None)
        assert await bench.sink.end() is None
