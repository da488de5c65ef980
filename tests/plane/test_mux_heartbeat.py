"""A worker that is silent, a client that was itself frozen, and a prefill that takes long."""

from __future__ import annotations

import errno

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import CannotConnect, Disconnected, NotConnected
from dynamo_trio.plane.mux.heartbeat import Heartbeat, Verdict
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.plane.net.tls import HandshakeTimeout
from dynamo_trio.wire.mux import frames
from tests.plane.mux_peer import ADDRESS, Pair, Sink, open_pair

SETTINGS = MuxSettings()


# --- the pulse alone -------------------------------------------------------------------------


def test_a_peer_is_asked_after_one_interval_silent_after_two_and_lost_after_patience() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert pulse.next_look(0.0) == 1.0
    assert pulse.look(0.9) is Verdict.WAIT
    assert pulse.look(1.0) is Verdict.ASK
    assert pulse.next_look(1.0) == 1.25  # an answer is awaited
    assert pulse.next_look(1.9) == 2.0
    assert pulse.look(1.9) is Verdict.WAIT
    assert pulse.look(2.0) is Verdict.SILENT
    assert pulse.silent
    assert pulse.look(9.9) is Verdict.WAIT
    assert pulse.look(10.0) is Verdict.LOST


def test_a_word_takes_the_doubt_back() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert (pulse.look(1.0), pulse.look(2.0)) == (Verdict.ASK, Verdict.SILENT)
    pulse.hear(7.0)
    assert not pulse.silent
    assert pulse.look(7.9) is Verdict.WAIT
    assert pulse.look(8.0) is Verdict.ASK


def test_a_peer_has_a_whole_interval_to_answer_however_late_it_was_asked() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert pulse.look(1.9) is Verdict.ASK  # this process was busy
    assert pulse.look(2.0) is Verdict.WAIT
    assert pulse.look(2.9) is Verdict.SILENT


def test_looks_are_never_further_apart_than_an_interval() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert (pulse.look(1.0), pulse.look(2.0)) == (Verdict.ASK, Verdict.SILENT)
    assert pulse.next_look(2.0) == 3.0


@pytest.mark.parametrize(
    ("late", "silent"), [(0.0, True), (0.5, True), (0.6, False), (1.0, False), (1.1, False)]
)
def test_time_in_which_this_process_did_not_run_does_not_count(
    late: float, *, silent: bool
) -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert pulse.look(1.0) is Verdict.ASK
    for step in (1.25, 1.5, 1.75):
        assert pulse.next_look(step - 0.25) == step
        pulse.wake(step)
        assert pulse.look(step) is Verdict.WAIT
    now = pulse.next_look(1.75) + late
    pulse.wake(now)
    assert pulse.doubts(now) is silent
    pulse.next_look(now)
    assert pulse.look(now) in ((Verdict.SILENT,) if silent else (Verdict.WAIT, Verdict.ASK))


def test_a_peer_has_an_interval_to_answer_in_which_this_process_ran() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert pulse.look(1.0) is Verdict.ASK
    pulse.next_look(1.0)
    pulse.wake(2.0)  # three quarters late: it may not even have been asked
    assert pulse.next_look(2.0) == 2.25
    assert pulse.look(2.9) is Verdict.WAIT
    assert pulse.look(3.0) is Verdict.SILENT


def test_who_was_frozen_counts_anew_and_forgets_nothing_it_knew() -> None:
    pulse = Heartbeat(1.0, 10.0, 0.0)
    assert (pulse.look(1.0), pulse.look(2.0)) == (Verdict.ASK, Verdict.SILENT)
    pulse.next_look(2.0)
    pulse.wake(60.0)
    assert pulse.silent
    assert pulse.look(69.9) is Verdict.WAIT
    assert pulse.look(70.0) is Verdict.LOST


# --- two sides -------------------------------------------------------------------------------


async def test_a_frozen_worker_is_found_after_exactly_two_intervals(
    autojump_clock: MockClock,
) -> None:
    begun, untouched = Sink(), Sink()
    async with open_pair(SETTINGS) as pair:
        async with pair.ask(begun), pair.ask(untouched):
            first = pair.endpoint.calls[0]
            first.outbox.put_tokens([1])
            await wait_all_tasks_blocked()
            assert begun.tokens == [1]
            heard = trio.current_time()
            pair.to_client.shut = True
            first.outbox.put_tokens([2])

            await trio.sleep(1.999)
            assert not pair.client.avoids(ADDRESS)
            assert not untouched.ends
            await trio.sleep(0.002)
            assert pair.client.avoids(ADDRESS)
            assert isinstance(await untouched.end(), Disconnected)
            assert untouched.ended_at == pytest.approx(heard + 2)
            with pytest.raises(CannotConnect, match="does not answer"):
                async with pair.ask(Sink()):
                    raise AssertionError("a silent worker gets nothing")
            assert not begun.ends
            await wait_all_tasks_blocked()
            assert pair.endpoint.calls[1].cancels == 1

            assert isinstance(await begun.end(), Disconnected)
            assert begun.ended_at == pytest.approx(heard + 10)
            assert begun.tokens == [1]


async def test_a_late_answer_makes_all_as_it_was(autojump_clock: MockClock) -> None:
    begun = Sink()
    async with open_pair(SETTINGS) as pair:
        async with pair.ask(begun):
            pair.call.outbox.put_tokens([1])
            await wait_all_tasks_blocked()
            pair.to_client.shut = True
            pair.call.outbox.put_tokens([2])
            await trio.sleep(9)
            assert pair.client.avoids(ADDRESS)
            pair.to_client.open()
            await wait_all_tasks_blocked()
            assert not pair.client.avoids(ADDRESS)
            assert begun.tokens == [1, 2]
            async with pair.ask(Sink()):
                assert len(pair.endpoint.calls) == 2
            await trio.sleep(60)
            pair.endpoint.calls[0].outbox.finish(None)
            assert await begun.end() is None
    assert len(pair.dialled_at) == 1


async def test_a_long_prefill_is_no_silence(autojump_clock: MockClock) -> None:
    sink = Sink()
    async with open_pair(SETTINGS) as pair:
        async with pair.ask(sink):
            for _ in range(60):
                await trio.sleep(1)
                assert not pair.client.avoids(ADDRESS)
            pair.call.outbox.put_tokens([1])
            pair.call.outbox.finish(None)
            assert await sink.end() is None
    assert sink.tokens == [1]
    assert len(pair.dialled_at) == 1


async def test_a_client_that_was_frozen_itself_judges_nobody(mock_clock: MockClock) -> None:
    sink = Sink()
    async with open_pair(SETTINGS) as pair:
        async with pair.ask(sink):
            pair.call.outbox.put_tokens([1])
            await wait_all_tasks_blocked()
            mock_clock.jump(60)  # nothing ran meanwhile
            await wait_all_tasks_blocked()
            assert not pair.client.avoids(ADDRESS)
            for _ in range(30):
                mock_clock.jump(0.5)
                await wait_all_tasks_blocked()
                assert not pair.client.avoids(ADDRESS)
            pair.call.outbox.finish(None)
            await wait_all_tasks_blocked()
            assert sink.ends == [None]


async def test_who_wakes_beside_a_dead_worker_still_finds_out(mock_clock: MockClock) -> None:
    async with open_pair(SETTINGS) as pair:
        async with pair.ask(Sink()):
            await wait_all_tasks_blocked()
            pair.to_client.shut = True
            mock_clock.jump(60)
            await wait_all_tasks_blocked()
            assert not pair.client.avoids(ADDRESS)
            for _ in range(8):
                assert not pair.client.avoids(ADDRESS)
                mock_clock.jump(0.25)
                await wait_all_tasks_blocked()
            assert pair.client.avoids(ADDRESS)


async def test_a_worker_that_was_given_up_is_avoided_until_it_says_hello_again(
    autojump_clock: MockClock,
) -> None:
    async with open_pair(SETTINGS) as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = pair.shut = True  # and whatever is dialled again hears nothing
        await trio.sleep(20)
        assert len(pair.dialled_at) > 1
        assert pair.client.avoids(ADDRESS)
        with pytest.raises(CannotConnect, match="does not answer"):
            async with pair.ask(Sink()):
                raise AssertionError("a silent worker gets nothing")
        pair.shut = False
        await trio.sleep(30)
        assert not pair.client.avoids(ADDRESS)
        async with pair.ask(Sink()):
            assert pair.call.cancels == 0


async def test_a_worker_gives_up_a_silent_client_only_after_long(
    autojump_clock: MockClock,
) -> None:
    # The client asks nothing by itself, and does not give the worker up.
    settings = attrs.evolve(SETTINGS, heartbeat=10_000, patience=10_000)
    async with open_pair(settings) as pair:
        async with pair.ask(Sink()):
            await wait_all_tasks_blocked()
            pair.to_client.shut = True
            await trio.sleep(SETTINGS.stall_time - 5)
            assert pair.call.cancels == 0
            await trio.sleep(10)
            assert pair.call.cancels == 1


async def test_a_frame_that_was_half_there_when_this_process_froze_may_become_whole(
    mock_clock: MockClock,
) -> None:
    later = frames.HEAD.pack(101, frames.OPTIONAL) + bytes(100)  # of a later version: ignored
    async with open_pair(SETTINGS) as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        await pair.to_client.inner.send_all(later[:50])
        await wait_all_tasks_blocked()
        mock_clock.jump(2 * SETTINGS.frame_time)
        await wait_all_tasks_blocked()
        await pair.to_client.inner.send_all(later[50:])
        async with pair.ask(Sink()):
            assert pair.call.cancels == 0
    assert len(pair.dialled_at) == 1


# --- a worker that was given up ---------------------------------------------------------------


async def given_up(pair: Pair) -> None:
    """Connected, frozen for long, and not avoided for nothing."""
    pair.client.instance_found(ADDRESS)
    await wait_all_tasks_blocked()
    pair.to_client.shut = pair.shut = True
    await trio.sleep(SETTINGS.patience + 1)
    assert pair.client.avoids(ADDRESS)


async def falls_back(pair: Pair) -> None:
    """It is not avoided, and its mux is not connected: another plane may be tried."""
    assert not pair.client.avoids(ADDRESS)
    with pytest.raises(NotConnected):
        async with pair.ask(Sink()):
            raise AssertionError("there is no connection")


async def test_who_cannot_even_be_connected_any_more_is_not_avoided(
    autojump_clock: MockClock,
) -> None:
    """Only this port may have become unreachable. No other plane would ever be tried."""
    async with open_pair(SETTINGS) as pair:
        await given_up(pair)
        pair.reachable = False
        await trio.sleep(2 * SETTINGS.max_retry_time)
        await falls_back(pair)
        # Also when its kernel accepts again, for nobody has just been given up.
        pair.reachable = True
        await trio.sleep(2 * SETTINGS.max_retry_time)
        await falls_back(pair)
        pair.shut = False
        await trio.sleep(2 * SETTINGS.max_retry_time)
        async with pair.ask(Sink()):
            assert pair.call.cancels == 0


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (ConnectionRefusedError("refused"), False),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
        (ConnectionError("not connected within 5 s"), False),
        (ConnectionError("the TLS handshake failed: a certificate"), False),
        (HandshakeTimeout("the TLS handshake failed: it took over 3 s"), True),
    ],
    ids=str,
)
async def test_what_a_failed_attempt_says_of_a_worker_that_was_given_up(
    error: OSError, *, avoided: bool, autojump_clock: MockClock
) -> None:
    async with open_pair(SETTINGS) as pair:
        await given_up(pair)
        pair.reachable, pair.refusal = False, error
        await trio.sleep(100)
        assert pair.client.avoids(ADDRESS) is avoided
        with pytest.raises(CannotConnect) as raised:
            async with pair.ask(Sink()):
                raise AssertionError("there is no connection")
        assert isinstance(raised.value, NotConnected) is not avoided


async def test_who_answers_anything_at_all_is_not_frozen(autojump_clock: MockClock) -> None:
    async with open_pair(SETTINGS) as pair:
        await given_up(pair)
        pair.shut = False
        pair.server.settings = attrs.evolve(SETTINGS, max_peers=0)  # each is turned away
        await trio.sleep(2 * SETTINGS.max_retry_time)
        await falls_back(pair)


async def test_a_port_that_becomes_silent_without_having_spoken_is_no_frozen_worker(
    autojump_clock: MockClock,
) -> None:
    async with open_pair(SETTINGS) as pair:
        pair.shut = True
        pair.client.instance_found(ADDRESS)
        await trio.sleep(100)
        assert len(pair.dialled_at) > 1
        await falls_back(pair)
