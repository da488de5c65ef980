"""The consumer's end of a request."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from dynamo_trio.engines import Delta, DeltaStream, Request
from dynamo_trio.errors import EngineDead, Unknown


@pytest.fixture
def stream() -> DeltaStream:
    return DeltaStream(Request(request_id="r", token_ids=(1,), max_tokens=5))


async def test_it_gives_deltas_in_order_and_ends_after_the_last(stream: DeltaStream) -> None:
    sent = [Delta("r", (1,)), Delta("r", (2,)), Delta("r", (3,), "length")]
    for delta in sent:
        stream.push(delta)
    assert [delta async for delta in stream] == sent
    with pytest.raises(trio.EndOfChannel):
        await stream.receive()


async def test_a_waiting_consumer_is_woken(stream: DeltaStream) -> None:
    got: list[Delta] = []
    async with trio.open_nursery() as nursery:

        async def consume() -> None:
            got.append(await stream.receive())

        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        stream.push(Delta("r", (1,)))
    assert got == [Delta("r", (1,))]


async def test_an_error_comes_after_what_was_before_it(stream: DeltaStream) -> None:
    stream.push(Delta("r", (1,)))
    stream.push(Delta("r", (2,)))
    stream.push(Delta("r", (), "error", EngineDead("gone")))
    assert await stream.receive_batch() == [Delta("r", (1,)), Delta("r", (2,))]
    with pytest.raises(EngineDead, match="gone"):
        await stream.receive_batch()
    with pytest.raises(trio.EndOfChannel):
        stream.receive_nowait()


async def test_an_error_without_a_cause_is_unknown(stream: DeltaStream) -> None:
    stream.push(Delta("r", (), "error"))
    with pytest.raises(Unknown):
        stream.receive_nowait()


async def test_nothing_there_is_would_block(stream: DeltaStream) -> None:
    with pytest.raises(trio.WouldBlock):
        stream.receive_nowait()


async def test_a_cancelled_receive_loses_nothing(stream: DeltaStream) -> None:
    stream.push(Delta("r", (1,)))
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive()
    assert scope.cancelled_caught
    assert stream.receive_nowait() == Delta("r", (1,))


async def test_closing_wakes_the_consumer(stream: DeltaStream) -> None:
    async with trio.open_nursery() as nursery:

        async def consume() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await stream.receive()

        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()


async def test_receiving_always_yields_to_other_tasks(stream: DeltaStream) -> None:
    stream.push(Delta("r", (1,)))
    with trio.testing.assert_checkpoints():
        await stream.receive()
