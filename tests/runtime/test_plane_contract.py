"""Every request plane keeps these promises; the memory plane is the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.errors import CannotConnect, Draining, DynamoException, EngineShutdown
from dynamo_trio.plane import (
    INITIAL_CREDIT,
    MemoryPlane,
    Outbox,
    RequestHead,
    RequestPlane,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@attrs.define(eq=False)
class RecordingSink:
    payloads: list[bytes] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)

    def feed(self, payloads: Sequence[bytes]) -> None:
        self.payloads.extend(payloads)

    def finish(self, error: DynamoException | None) -> None:
        self.ends.append(error)


@attrs.define(eq=False)
class FakeCall:
    outbox: Outbox
    payload: bytes
    head: RequestHead
    cancelled: int = 0

    def cancel(self) -> None:
        self.cancelled += 1


@attrs.define(eq=False)
class FakeEndpoint:
    refusal: DynamoException | None = None
    calls: list[FakeCall] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> FakeCall:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(FakeCall(outbox, payload, head))
        return self.calls[-1]


@pytest.fixture(params=[MemoryPlane], ids=["mem"])
def plane(request: pytest.FixtureRequest) -> RequestPlane:
    make: Callable[[], RequestPlane] = request.param
    return make()


HEAD = RequestHead("request-1", {"traceparent": "00-1"})


async def test_items_arrive_in_order_and_then_the_end(plane: RequestPlane) -> None:
    endpoint, sink = FakeEndpoint(), RecordingSink()
    async with (
        plane.serve("1/generate", endpoint) as address,
        plane.open_stream(address, HEAD, b"question", sink),
    ):
        call = endpoint.calls[0]
        assert (call.payload, call.head) == (b"question", HEAD)
        call.outbox.put(b"a")
        call.outbox.put(b"b")
        call.outbox.finish(None)
        await trio.testing.wait_all_tasks_blocked()
        assert (sink.payloads, sink.ends) == ([b"a", b"b"], [None])
    assert call.cancelled == 0


async def test_the_first_end_wins_and_nothing_follows_it(plane: RequestPlane) -> None:
    endpoint, sink = FakeEndpoint(), RecordingSink()
    async with (
        plane.serve("1/generate", endpoint) as address,
        plane.open_stream(address, HEAD, b"", sink),
    ):
        outbox, error = endpoint.calls[0].outbox, EngineShutdown("gone")
        outbox.finish(error)
        outbox.finish(None)
        outbox.put(b"late")
        await trio.testing.wait_all_tasks_blocked()
        assert (sink.payloads, sink.ends) == ([], [error])


async def test_leaving_cancels_the_call_and_detaches_the_sink(plane: RequestPlane) -> None:
    endpoint, sink = FakeEndpoint(), RecordingSink()
    async with plane.serve("1/generate", endpoint) as address:
        async with plane.open_stream(address, HEAD, b"", sink):
            pass
        call = endpoint.calls[0]
        call.outbox.put(b"late")
        call.outbox.finish(None)
        await trio.testing.wait_all_tasks_blocked()
        assert call.cancelled == 1
        assert (sink.payloads, sink.ends) == ([], [])


async def test_a_refusal_reaches_the_client_as_it_was_raised(plane: RequestPlane) -> None:
    endpoint = FakeEndpoint(refusal=Draining("stopping"))
    async with plane.serve("1/generate", endpoint) as address:
        with pytest.raises(Draining):
            async with plane.open_stream(address, HEAD, b"", RecordingSink()):
                raise AssertionError("a refused stream must not open")


async def test_nobody_at_the_address_is_cannot_connect(plane: RequestPlane) -> None:
    async with plane.serve("1/generate", FakeEndpoint()) as address:
        pass
    with pytest.raises(CannotConnect):
        async with plane.open_stream(address, HEAD, b"", RecordingSink()):
            raise AssertionError("a stream to nobody must not open")


async def test_credit_runs_out_and_comes_back(plane: RequestPlane) -> None:
    endpoint = FakeEndpoint()
    async with (
        plane.serve("1/generate", endpoint) as address,
        plane.open_stream(address, HEAD, b"", RecordingSink()) as stream,
        trio.open_nursery() as nursery,
    ):
        outbox = endpoint.calls[0].outbox
        for _ in range(INITIAL_CREDIT):
            assert outbox.has_credit
            outbox.put(b"x")
        assert not outbox.has_credit
        nursery.start_soon(outbox.wait_credit)
        await trio.testing.wait_all_tasks_blocked()
        stream.grant(3)
        await trio.testing.wait_all_tasks_blocked()
        assert outbox.has_credit


async def test_a_cut_wakes_whoever_waits_for_credit(plane: RequestPlane) -> None:
    endpoint = FakeEndpoint()
    async with (
        plane.serve("1/generate", endpoint) as address,
        plane.open_stream(address, HEAD, b"", RecordingSink()),
        trio.open_nursery() as nursery,
    ):
        outbox = endpoint.calls[0].outbox
        nursery.start_soon(outbox.wait_credit)
        await trio.testing.wait_all_tasks_blocked()
        outbox.wake()


async def test_two_endpoints_cannot_share_a_path(plane: RequestPlane) -> None:
    async with plane.serve("1/generate", FakeEndpoint()):
        with pytest.raises(ValueError, match="1/generate"):
            async with plane.serve("1/generate", FakeEndpoint()):
                raise AssertionError("the path is taken")
