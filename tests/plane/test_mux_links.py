"""Connections of the mux plane: how they are made, kept, made again, shared and ended."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from dynamo_trio.errors import (
    CannotConnect,
    Disconnected,
    EngineShutdown,
    NotConnected,
    Overloaded,
    PayloadTooLarge,
    Unknown,
)
from dynamo_trio.plane import INITIAL_CREDIT, RequestHead
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.wire.mux import worker_connection
from tests.plane.mux_peer import ADDRESS, HEAD, PLACE, Pair, Sink, open_pair

if TYPE_CHECKING:
    from dynamo_trio.plane import ClientStream

# --- making them -----------------------------------------------------------------------------


async def test_a_worker_is_connected_when_it_is_found(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        pair.client.instance_found(f"{PLACE}/1f/other")
        pair.client.instance_found("no address")
        await trio.sleep(1000)
        assert pair.dialled_at == [0]
        async with pair.ask(Sink()), pair.ask(Sink()):
            assert len(pair.endpoint.calls) == 2
        assert len(pair.dialled_at) == 1


async def test_a_connection_ends_with_the_last_instance_and_the_last_stream(
    autojump_clock: MockClock,
) -> None:
    other, sink = f"{PLACE}/1f/other", Sink()
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        pair.client.instance_found(other)
        async with pair.ask(sink):
            pair.client.instance_gone(other)
            pair.client.instance_gone(ADDRESS)
            await trio.sleep(100)
            pair.call.outbox.finish(None)
            assert await sink.end() is None
            assert pair.server._links
        await wait_all_tasks_blocked()
        assert not pair.server._links
        assert not pair.client._ways


async def test_a_worker_that_nobody_announced_is_kept_for_a_while(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        for _ in range(3):
            async with pair.ask(Sink()):
                await trio.sleep(0.1)
        assert len(pair.dialled_at) == 1
        await trio.sleep(pair.settings.idle_time - 1)
        assert pair.server._links
        await trio.sleep(2)
        assert not pair.server._links
        assert not pair.client._ways


async def test_nobody_there_is_known_at_once_and_tried_again_ever_more_seldom(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        pair.reachable = False
        pair.client.instance_found(ADDRESS)
        await trio.sleep(600)
        gaps = [b - a for a, b in zip(pair.dialled_at, pair.dialled_at[1:], strict=False)]
        assert gaps[0] < pair.settings.retry_time + 0.1
        assert 60 <= len(gaps) < 200
        assert max(gaps) <= pair.settings.max_retry_time
        assert len({round(gap, 6) for gap in gaps[-10:]}) > 1  # not all clients at once
        before = trio.current_time()
        with pytest.raises(NotConnected):
            async with pair.ask(Sink()):
                raise AssertionError("nobody is there")
        assert trio.current_time() == before
        pair.reachable = True
        await trio.sleep(pair.settings.max_retry_time)
        async with pair.ask(Sink()):
            assert len(pair.endpoint.calls) == 1


async def test_a_new_instance_is_tried_at_once(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.reachable = False
        pair.client.instance_found(ADDRESS)
        await trio.sleep(100)
        pair.reachable = True
        pair.client.instance_found(f"{PLACE}/2f/generate")
        await wait_all_tasks_blocked()
        assert pair.server._links


async def test_who_asks_for_an_unknown_worker_that_is_not_there_hears_it(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        pair.reachable = False
        for _ in range(2):
            with pytest.raises(NotConnected):
                async with pair.ask(Sink()):
                    raise AssertionError("nobody is there")
        await wait_all_tasks_blocked()
        assert not pair.client._ways
        assert len(pair.dialled_at) == 2


async def test_an_address_that_is_none(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        with pytest.raises(CannotConnect, match="no usable address"):
            async with pair.client.open_stream("nonsense", HEAD, b"", Sink()):
                raise AssertionError("there is no such address")
        assert not pair.client.avoids("nonsense")
        pair.client.instance_gone("nonsense")
        pair.server.withdraw("nonsense")
        pair.server.restore("nonsense")


async def test_a_worker_that_says_nothing_is_not_connected(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.shut = True
        with pytest.raises(NotConnected, match="not said hello within 5 s"):
            async with pair.ask(Sink()):
                raise AssertionError("it never said hello")
        assert trio.current_time() == pytest.approx(5)


async def test_a_worker_of_another_version_is_not_connected(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_connection, "VERSIONS", (99,))
    caplog.set_level(logging.INFO)
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        with pytest.raises(NotConnected):
            async with pair.ask(Sink()):
                raise AssertionError("no version in common")
        with pytest.raises(NotConnected):
            async with pair.ask(Sink()):
                raise AssertionError("no version in common")
        await trio.sleep(100)
        assert len(pair.dialled_at) <= 5
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 1
    assert "no version in common" in lines[0]


# --- losing them -----------------------------------------------------------------------------


async def test_streams_of_a_broken_connection_are_disconnected_and_the_next_one_is_made(
    autojump_clock: MockClock,
) -> None:
    sink = Sink()
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await trio.sleep(10)
        async with pair.ask(sink):
            pair.call.outbox.put_tokens([1])
            await wait_all_tasks_blocked()
            pair.cut()
            assert isinstance(await sink.end(), Disconnected)
            await wait_all_tasks_blocked()
            assert pair.call.cancels == 1
            async with pair.ask(Sink()):
                assert len(pair.endpoint.calls) == 2
    assert sink.tokens == [1]
    assert pair.dialled_at == [0, 10]


async def test_a_request_that_never_left_goes_over_the_next_connection(
    autojump_clock: MockClock,
) -> None:
    """It is no attempt: the worker cannot have seen it."""
    sink = Sink()
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await trio.sleep(10.5)  # between two heartbeats
        pair.to_client.stuck = True
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with pair.ask(Sink(), b"x" * 300_000):
                    await trio.sleep(1000)

            async def ask_behind() -> None:
                async with pair.ask(sink):
                    assert await sink.end() is None

            with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012 - two at once
                async with trio.open_nursery() as first:
                    first.start_soon(ask)
                    await wait_all_tasks_blocked()
                    nursery.start_soon(ask_behind)
                    await wait_all_tasks_blocked()
                    pair.cut()
            assert raised.group_contains(CannotConnect)
            await wait_all_tasks_blocked()
            assert len(pair.dialled_at) == 2
            pair.call.outbox.finish(None)
    assert len(pair.endpoint.calls) == 1


async def test_a_worker_that_takes_nothing_is_cut_after_the_stall_time(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heart beats, for what it sends comes; but nothing that is sent to it leaves."""
    settings = MuxSettings(stall_time=30, heartbeat=1000, patience=1000)
    sink = Sink()
    async with open_pair(settings) as pair, pair.ask(sink):
        pair.to_client.stuck = True
        with pytest.raises(CannotConnect):
            async with pair.ask(Sink()):
                raise AssertionError("its OPEN never left")
        assert trio.current_time() == pytest.approx(30)
        assert isinstance(await sink.end(), Disconnected)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "has taken nothing for 30 s" in line


async def test_a_frame_that_does_not_become_whole_ends_the_connection(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(MuxSettings(heartbeat=1000)) as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        await pair.to_client.inner.send_all(b"\0\0\1\0")
        pair.reachable = False
        while pair.server._links:
            assert trio.current_time() < 100
            await trio.sleep(1)
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                await pair.to_client.inner.send_all(b"\0")
        assert 59 <= trio.current_time() <= 63
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "took over 60 s to arrive" in lines[0]


# --- sharing them ----------------------------------------------------------------------------


async def test_all_tokens_of_a_step_leave_as_one_piece(autojump_clock: MockClock) -> None:
    sinks = [Sink() for _ in range(50)]
    async with open_pair() as pair, trio.open_nursery() as nursery:

        async def ask(sink: Sink) -> None:
            async with pair.ask(sink):
                await sink.end()

        for sink in sinks:
            nursery.start_soon(ask, sink)
        await wait_all_tasks_blocked()
        pieces: list[bytes] = []
        pair.to_worker.on_send = pieces.append
        for step in range(3):
            for call in pair.endpoint.calls:
                call.outbox.put_tokens([step])
            if step == 2:
                for call in pair.endpoint.calls:
                    call.outbox.finish(None)
            await wait_all_tasks_blocked()
            assert len(pieces) == step + 1
    assert all(sink.tokens == [0, 1, 2] and sink.batches == [1, 1, 1] for sink in sinks)


async def test_steps_that_arrive_together_are_handed_on_together(
    autojump_clock: MockClock,
) -> None:
    sink = Sink()
    async with open_pair() as pair, pair.ask(sink):
        pair.to_client.shut = True
        for step in range(5):
            pair.call.outbox.put_tokens([step])
            await wait_all_tasks_blocked()
        pair.to_client.open()
        await wait_all_tasks_blocked()
        # The first of them was waiting alone behind the valve.
        assert sink.tokens == [0, 1, 2, 3, 4]
        assert len(sink.batches) <= 2


async def test_a_large_prompt_delays_no_token(autojump_clock: MockClock) -> None:
    """And no other request: the worker hears of them while the large one is on its way."""
    quick = Sink()
    async with open_pair() as pair, trio.open_nursery() as nursery:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.on_send = lambda _: None
        large = Sink()

        async def ask_large() -> None:
            async with pair.ask(large, b"x" * 20_000_000):
                await large.end()

        nursery.start_soon(ask_large)
        while pair.to_client.sent < 100_000:
            await trio.lowlevel.checkpoint()
        async with pair.ask(quick) as stream:
            sent = pair.to_client.sent
            (call,) = pair.endpoint.calls  # the large one has not come yet
            assert sent < 1_000_000
            call.outbox.put_tokens([1])
            stream.stop()
            while not (quick.tokens and call.stops):
                await trio.lowlevel.checkpoint()
            assert pair.to_client.sent < 2_000_000
            call.outbox.finish(None)
            assert await quick.end() is None
        await wait_all_tasks_blocked()
        assert len(pair.call.payload) == 20_000_000
        pair.call.outbox.finish(None)


async def test_who_produces_items_is_held_back_while_the_peer_takes_nothing(
    autojump_clock: MockClock,
) -> None:
    sink, other = Sink(), Sink()
    async with open_pair() as pair, pair.ask(sink) as stream, pair.ask(other):
        stream.grant(100_000)
        await wait_all_tasks_blocked()
        outbox = pair.endpoint.calls[0].outbox
        pair.to_worker.stuck = True
        count = 0
        while outbox.has_credit:
            outbox.put(b"x" * 10_000)
            count += 1
        assert count * 10_000 <= pair.settings.high_water + 20_000
        assert not pair.endpoint.calls[1].outbox.has_credit  # the connection is full
        woken = []

        async def wait(number: int) -> None:
            await pair.endpoint.calls[number].outbox.wait_credit()
            woken.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 0)
            nursery.start_soon(wait, 1)
            await wait_all_tasks_blocked()
            assert woken == []
            pair.to_worker.open()
        outbox.put(b"last")
        count += 1
        await wait_all_tasks_blocked()
        assert len(sink.items) == count


# --- requests that stream in ------------------------------------------------------------------


def may_send(stream: ClientStream) -> bool:
    return stream.has_credit


async def test_a_request_that_streams_in(autojump_clock: MockClock) -> None:
    sink, head = Sink(), RequestHead("talk", streams_in=True)
    async with open_pair() as pair, pair.ask(sink, b"first", head) as stream:
        call = pair.call
        assert call.head.streams_in
        sent = 0
        while may_send(stream):
            stream.put(b"%d" % sent)
            sent += 1
        assert sent == INITIAL_CREDIT
        await wait_all_tasks_blocked()
        assert call.fed == [b"%d" % n for n in range(sent)]
        with trio.move_on_after(5) as scope:
            await stream.wait_credit()
        assert scope.cancelled_caught
        call.outbox.grant(sent)
        await stream.wait_credit()
        stream.put(b"last")
        stream.finish_input()
        stream.finish_input()
        await wait_all_tasks_blocked()
        assert (call.fed[-1], call.input_ends) == (b"last", 1)
        call.outbox.put(b"answer")
        call.outbox.finish(None)
        assert await sink.end() is None
        stream.put(b"late")
        stream.finish_input()
        assert may_send(stream)  # what is put now is dropped
        await stream.wait_credit()
    assert sink.items == [b"answer"]


async def test_the_end_of_a_stream_wakes_who_waits_to_send(autojump_clock: MockClock) -> None:
    sink, head = Sink(), RequestHead("talk", streams_in=True)
    async with open_pair() as pair, pair.ask(sink, b"first", head) as stream:
        while stream.has_credit:
            stream.put(b"item")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.wait_credit)
            await wait_all_tasks_blocked()
            pair.call.outbox.finish(EngineShutdown("stopped", planned=True))
        end = await sink.end()
    assert isinstance(end, EngineShutdown)
    assert end.planned


# --- limits and mistakes ---------------------------------------------------------------------


async def test_a_cancelled_request_counts_until_its_call_has_ended(
    autojump_clock: MockClock,
) -> None:
    async with open_pair(MuxSettings(max_streams=2)) as pair:
        async with pair.ask(Sink()):
            async with pair.ask(Sink()):
                with pytest.raises(Overloaded):
                    async with pair.ask(Sink()):
                        raise AssertionError("there are two")
            await wait_all_tasks_blocked()
            async with pair.ask(Sink()):  # its call ends when it is cancelled
                assert len(pair.endpoint.calls) == 3


async def test_a_peer_too_many_is_turned_away(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(MuxSettings(max_peers=1)) as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        second = Pair(pair.settings, pair.nursery)
        second.server = pair.server
        with pytest.raises(NotConnected, match="too many peers"):
            async with second.ask(Sink()):
                raise AssertionError("one too many")
    assert "is turned away" in caplog.text


async def test_a_request_above_the_limit_is_refused_before_it_is_sent(
    autojump_clock: MockClock,
) -> None:
    async with open_pair(MuxSettings(max_message=1000)) as pair:
        with pytest.raises(PayloadTooLarge):
            async with pair.ask(Sink(), b"x" * 1001):
                raise AssertionError("it is too large")
        async with pair.ask(Sink(), b"x" * 1000):
            assert len(pair.call.payload) == 1000


async def test_a_mistake_of_an_endpoint_ends_one_request(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair() as pair:
        pair.endpoint.refusal = ZeroDivisionError("oops")
        with pytest.raises(Unknown, match="failed to take the request on"):
            async with pair.ask(Sink()):
                raise AssertionError("it was refused")
        pair.endpoint.refusal = None
        async with pair.ask(Sink()):
            assert len(pair.endpoint.calls) == 1
    assert "could not be taken on" in caplog.text


async def test_a_mistake_of_a_sink_ends_one_stream(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    @attrs.define(eq=False)
    class Broken(Sink):
        def feed_tokens(self, token_ids: object) -> None:
            raise ZeroDivisionError("oops")

    broken, good = Broken(), Sink()
    async with open_pair() as pair, pair.ask(broken), pair.ask(good):
        for call in pair.endpoint.calls:
            call.outbox.put_tokens([1])
        assert isinstance(await broken.end(), Unknown)
        await wait_all_tasks_blocked()
        assert good.tokens == [1]
        assert [call.cancels for call in pair.endpoint.calls] == [1, 0]
    assert "an answer could not be taken" in caplog.text


# --- the end of a plane ----------------------------------------------------------------------


async def test_what_is_finished_leaves_before_a_worker_closes(autojump_clock: MockClock) -> None:
    done, running = Sink(), Sink()
    async with open_pair() as pair, pair.ask(done) as stream, pair.ask(running):
        outbox = pair.endpoint.calls[0].outbox
        outbox.put_tokens(range(INITIAL_CREDIT + 10))  # the rest waits for the client
        outbox.finish(None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.server.say_farewell)
            await trio.sleep(0.3)
            assert not done.ends
            stream.grant(INITIAL_CREDIT)
            assert await done.end() is None
            assert len(done.tokens) == INITIAL_CREDIT + 10
        assert isinstance(await running.end(), Disconnected)
        assert pair.endpoint.calls[1].cancels == 1
        assert trio.current_time() < 1.1


async def test_a_farewell_ends_in_time_although_nobody_listens(autojump_clock: MockClock) -> None:
    async with open_pair() as pair, pair.ask(Sink()):
        pair.call.outbox.put_tokens(range(INITIAL_CREDIT + 10))
        pair.call.outbox.finish(None)
        pair.to_worker.stuck = pair.to_worker.shut = True
        await pair.server.say_farewell()
        assert trio.current_time() <= pair.settings.farewell_time + 0.1


async def test_a_client_that_closes_says_so(autojump_clock: MockClock) -> None:
    sink = Sink()
    async with open_pair() as pair, pair.ask(sink):
        await pair.client.say_farewell()
        await wait_all_tasks_blocked()
        assert pair.call.cancels == 1
        assert not pair.server._links
        assert isinstance(await sink.end(), Disconnected)
        with pytest.raises(NotConnected):
            async with pair.ask(Sink()):
                raise AssertionError("the plane is closed")


async def test_a_client_that_speaks_something_else_is_cut(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair() as pair:
        ours, theirs = memory_stream_pair()
        pair.nursery.start_soon(pair.server.serve_stream, theirs, "a stranger")
        await ours.send_all(b"GET / HTTP/1.1\r\n\r\n")
        assert await ours.receive_some() == b""  # it would not understand a GOAWAY
        await ours.aclose()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "a stranger" in line
