"""Long messages that are half sent, and what goes around them: drains, goodbyes, cancels."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import CannotConnect, Disconnected, EngineShutdown
from dynamo_trio.plane import INITIAL_CREDIT, RequestHead
from dynamo_trio.wire.mux.frames import HEAD as FRAME_HEAD
from dynamo_trio.wire.mux.frames import FrameType, decode
from tests.plane.mux_peer import ADDRESS, Pair, Sink, Valve, open_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = b"x" * 3_000_000
TALK = RequestHead("talk", streams_in=True)


def kinds(data: bytes) -> list[str]:
    """The frames that some bytes hold; a PART that follows a PART is left out."""
    found: list[str] = []
    while data:
        size, kind = FRAME_HEAD.unpack_from(data)
        assert decode(kind, data[FRAME_HEAD.size : 4 + size]) is not None
        name = FrameType(kind).name
        if found[-1:] != [name] or name != "PART":
            found.append(name)
        data = data[4 + size :]
    return found


async def has_sent(valve: Valve, count: int) -> None:
    """Wait until so many bytes more were sent, and let no further one leave."""
    begun = trio.Event()
    goal = valve.sent + count

    def look(_: bytes) -> None:
        if valve.sent >= goal:
            valve.stuck = True
            begun.set()

    valve.on_send = look
    await begun.wait()
    valve.on_send = lambda _: None
    await wait_all_tasks_blocked()


@asynccontextmanager
async def asking(pair: Pair, *sinks: Sink, payload: bytes) -> AsyncIterator[list[trio.CancelScope]]:
    """Requests whose OPENs need not have left yet; each can be cancelled."""
    scopes = [trio.CancelScope() for _ in sinks]

    async def ask(sink: Sink, scope: trio.CancelScope, payload: bytes) -> None:
        with scope:
            async with pair.ask(sink, payload):
                await sink.end()

    async with trio.open_nursery() as nursery:
        for number, (sink, scope) in enumerate(zip(sinks, scopes, strict=True)):
            nursery.start_soon(ask, sink, scope, payload if number == 0 else b"short")
            await trio.testing.wait_all_tasks_blocked()
        yield scopes


@asynccontextmanager
async def half_an_open(
    *sinks: Sink,
) -> AsyncIterator[tuple[Pair, list[trio.CancelScope], list[bytes]]]:
    """A long OPEN has half left, short ones wait to overtake it. Then what the client sends."""
    said: list[bytes] = []
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(has_sent, pair.to_client, 300_000)
            await wait_all_tasks_blocked()
            async with asking(pair, *sinks, payload=LONG) as scopes:
                await wait_all_tasks_blocked()
                assert pair.to_client.stuck
                pair.to_client.on_send = said.append
                yield pair, scopes, said


async def finish_calls(pair: Pair) -> None:
    await wait_all_tasks_blocked()
    for call in pair.endpoint.calls:
        call.outbox.finish(None)


async def test_an_acknowledgement_comes_behind_a_long_open_and_all_behind_it(
    autojump_clock: MockClock,
) -> None:
    sinks = [Sink(), Sink(), Sink()]
    async with half_an_open(*sinks) as (pair, _, said):
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        assert pair.client.avoids(ADDRESS)
        seen: list[int] = []

        async def wait() -> None:
            await pair.server.wait_acknowledged()
            seen.append(len(pair.endpoint.calls))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert seen == []
            pair.to_client.open()
        assert seen == [3]
        assert [len(call.payload) for call in pair.endpoint.calls] == [5, 5, len(LONG)]
        assert kinds(b"".join(said))[-3:] == ["PART", "OPEN", "ACK"]
        await finish_calls(pair)
    assert [sink.ends for sink in sinks] == [[None]] * 3


async def test_an_acknowledgement_waits_no_longer_for_an_open_that_was_given_up(
    autojump_clock: MockClock,
) -> None:
    sinks = [Sink(), Sink()]
    async with half_an_open(*sinks) as (pair, scopes, said):
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        pair.to_client.open()
        with trio.fail_after(1):
            await pair.server.wait_acknowledged()
        assert [call.payload for call in pair.endpoint.calls] == [b"short"]
        assert kinds(b"".join(said))[-3:] == ["DROP", "OPEN", "ACK"]
        await finish_calls(pair)
    assert [sink.ends for sink in sinks] == [[], [None]]


async def test_a_long_open_that_is_cancelled_half_way_leaves_nothing_behind(
    autojump_clock: MockClock,
) -> None:
    sinks = [Sink(), Sink()]
    async with half_an_open(*sinks) as (pair, scopes, said):
        (link,) = pair.server._links
        assert link.arriving > 100_000
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        pair.to_client.open()
        await wait_all_tasks_blocked()
        assert sum(map(len, said)) < 200_000
        assert [call.payload for call in pair.endpoint.calls] == [b"short"]
        assert (link.arriving, pair.server._arriving, pair.server._arrivals) == (0, 0, {})
        again = Sink()
        async with asking(pair, again, payload=LONG):
            await wait_all_tasks_blocked()
            assert pair.call.payload == LONG
            await finish_calls(pair)
        assert link.wire.streams == 0
    assert [sink.ends for sink in (*sinks, again)] == [[], [None], [None]]


async def test_a_goodbye_comes_behind_a_long_item_that_is_half_sent(
    autojump_clock: MockClock,
) -> None:
    """What is finished leaves before a worker closes, however long it is."""
    sink, said = Sink(), list[bytes]()
    async with open_pair() as pair, pair.ask(sink), trio.open_nursery() as nursery:
        nursery.start_soon(has_sent, pair.to_worker, 300_000)
        await wait_all_tasks_blocked()
        pair.call.outbox.put(LONG)
        pair.call.outbox.finish(None)
        await wait_all_tasks_blocked()
        pair.to_worker.on_send = said.append
        nursery.start_soon(pair.server.say_farewell)
        await trio.sleep(0.1)
        assert not sink.ends
        pair.to_worker.open()
        assert await sink.end() is None
        assert sink.items == [LONG]
        await trio.sleep(1)
        assert kinds(b"".join(said)) == ["PART", "ITEM", "DONE", "GOAWAY"]


async def test_a_hand_over_leaves_in_time_although_its_reader_takes_nothing(
    autojump_clock: MockClock,
) -> None:
    sink, done = Sink(), Sink()
    async with open_pair() as pair, pair.ask(sink), pair.ask(done):
        for call, error in zip(
            pair.endpoint.calls, (EngineShutdown("moved", planned=True), None), strict=True
        ):
            call.outbox.put_tokens(range(10 * INITIAL_CREDIT))
            call.outbox.finish(error)
        await pair.server.say_farewell()
        end = await sink.end()
        assert isinstance(end, EngineShutdown)
        assert end.planned
        assert isinstance(await done.end(), Disconnected)
    assert sink.tokens == done.tokens == [*range(INITIAL_CREDIT)]


async def test_a_client_that_closes_in_the_middle_of_a_long_open(
    autojump_clock: MockClock,
) -> None:
    """The goodbye waits for the rest a moment, and no longer; nothing half comes of it."""
    sink = Sink()
    with pytest.RaisesGroup(CannotConnect, flatten_subgroups=True, allow_unwrapped=True):
        async with half_an_open(sink) as (pair, _, _said):
            await pair.client.say_farewell()
            await trio.sleep(1)
            assert pair.endpoint.calls == []
            assert not pair.server._links
            assert pair.server._arriving == 0


async def test_a_long_item_that_streams_in_is_dropped_when_its_client_leaves(
    autojump_clock: MockClock,
) -> None:
    sink, other = Sink(), Sink()
    async with open_pair() as pair, pair.ask(other), trio.open_nursery() as nursery:
        async with pair.ask(sink, b"first", TALK) as stream:
            nursery.start_soon(has_sent, pair.to_client, 300_000)
            await wait_all_tasks_blocked()
            stream.put(LONG)
            await wait_all_tasks_blocked()
            (link,) = pair.server._links
            assert link.arriving
        pair.to_client.open()
        await wait_all_tasks_blocked()
        first, second = pair.endpoint.calls
        assert (first.cancels, second.cancels, second.fed) == (0, 1, [])
        assert link.arriving == 0
        first.outbox.finish(None)
        assert await other.end() is None
