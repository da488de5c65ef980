"""Gates and admissions."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle import CutReason, Gate, GateStage, Outcome, Peer


@pytest.fixture
def gate() -> Gate:
    return Gate("work")


async def test_a_gate_counts_who_is_inside(gate: Gate) -> None:
    with gate.admit("a 1") as first, gate.admit("b 2", graceful=False) as second:
        assert gate.admissions() == (first, second)
        assert (gate.count, gate.awaited) == (2, 1)
    assert (gate.count, gate.awaited) == (0, 0)
    assert gate.tally == {Outcome.FINISHED: 2}


async def test_nothing_is_admitted_once_the_gate_is_shut(gate: Gate) -> None:
    with gate.admit("a 1") as inside:
        gate.shut()
        assert not gate.is_open
        assert gate.stage is GateStage.SHUT
        with pytest.raises(Draining), gate.admit("b 2"):
            raise AssertionError("admitted")
        assert gate.count == 1
        assert inside.reason is None


async def test_closing_cuts_those_for_whom_nothing_waits(gate: Gate) -> None:
    with gate.admit("a 1") as awaited, gate.admit("b 2", graceful=False) as other:
        gate.close()
        gate.shut()  # never back
        assert gate.stage is GateStage.CLOSED
        assert awaited.reason is None
        assert other.reason is CutReason.ENDPOINT_CLOSED


async def test_the_first_reason_wins(gate: Gate) -> None:
    woken = []
    with gate.admit("a 1") as admission:
        admission.on_cut.append(lambda: woken.append(admission.reason))
        assert admission.cut(CutReason.CLIENT_LEFT)
        assert not admission.cut(CutReason.DRAIN_LIMIT)
        assert gate.cut_all(CutReason.FATAL) == 0
        assert admission.reason is CutReason.CLIENT_LEFT
    assert woken == [CutReason.CLIENT_LEFT]
    assert not admission.cut(CutReason.FATAL)


async def test_the_first_outcome_wins(gate: Gate) -> None:
    with gate.admit("a 1") as admission:
        assert admission.settle(Outcome.HANDED_OVER)
        assert not admission.settle(Outcome.CUT)
        assert not admission.cut(CutReason.DRAIN_LIMIT)  # too late: it is over
    assert gate.tally == {Outcome.HANDED_OVER: 1}
    assert gate.unconfirmed == 1  # no peer had a place for it


async def test_a_cut_ends_the_waiting_but_not_the_farewell(
    gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    said = []

    async def owner() -> None:
        with gate.admit("a 1") as admission:
            with admission.scope:
                await trio.sleep_forever()
            await trio.sleep(1)
            said.append(admission.reason)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner)
        await trio.testing.wait_all_tasks_blocked()
        assert gate.cut_all(CutReason.DRAIN_LIMIT) == 1
        await gate.wait_idle()
        assert said == [CutReason.DRAIN_LIMIT]  # the count falls after the last word
        assert trio.current_time() == 1
    assert gate.tally == {Outcome.CUT: 1}


async def test_a_cut_before_the_waiting_counts_too(gate: Gate) -> None:
    with gate.admit("a 1") as admission:
        admission.cut(CutReason.ESCALATED)
        with admission.scope:
            await trio.sleep_forever()
    assert admission.outcome is Outcome.CUT


@pytest.mark.parametrize(
    ("reason", "places", "outcome"),
    [
        (None, 0, Outcome.FINISHED),
        (CutReason.CLIENT_LEFT, 0, Outcome.CANCELLED),
        (CutReason.HANDOVER, None, Outcome.HANDED_OVER),
        (CutReason.DRAIN_LIMIT, 0, Outcome.CUT),
        (CutReason.ENDPOINT_CLOSED, 0, Outcome.CUT),
    ],
)
async def test_what_nobody_settled(
    gate: Gate, reason: CutReason | None, places: int | None, outcome: Outcome
) -> None:
    with gate.admit("a 1", peer=Peer(places)) as admission:
        if reason is not None:
            admission.cut(reason)
    assert admission.outcome is outcome
    assert gate.unconfirmed == (outcome is Outcome.HANDED_OVER)


async def test_who_does_not_leave_is_counted_when_its_end_is_told(gate: Gate) -> None:
    told = []
    with gate.admit("a 1", peer=Peer(None)) as stuck, gate.admit("b 2") as silent:
        stuck.on_abort.append(lambda: told.append(stuck.settle(stuck.verdict())))
        gate.cut_all(CutReason.DRAIN_LIMIT)
        gate.abort_all()
        gate.abort_all()  # once is enough
        assert told == [True]
        assert gate.tally == {Outcome.HANDED_OVER: 1}
        assert gate.unconfirmed == 1
        assert gate.admissions() == (stuck, silent)  # it is still there, and named
    assert gate.tally == {Outcome.HANDED_OVER: 1, Outcome.CUT: 1}
    assert gate.unconfirmed == 1


async def test_an_exception_is_a_failure(gate: Gate) -> None:
    with pytest.raises(ValueError, match="bad"), gate.admit("a 1"):
        raise ValueError("bad")
    assert gate.tally == {Outcome.FAILED: 1}


async def test_an_exception_after_the_client_left_is_no_failure(gate: Gate) -> None:
    async def owner() -> None:
        with gate.admit("a 1") as admission:
            admission.cut(CutReason.CLIENT_LEFT)
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await owner()
    assert gate.tally == {Outcome.CANCELLED: 1}


async def test_who_is_cancelled_hard_is_lost(gate: Gate) -> None:
    with trio.CancelScope() as nursery, gate.admit("a 1"):
        nursery.cancel()
        await trio.sleep_forever()
    assert gate.tally == {Outcome.LOST: 1}


async def test_idle_means_nobody_who_is_waited_for(
    gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    async def owner(seconds: float, graceful: bool) -> None:
        with gate.admit("a 1", graceful=graceful):
            await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner, 2, True)
        nursery.start_soon(owner, 5, False)
        await trio.testing.wait_all_tasks_blocked()
        await gate.wait_idle()
        assert trio.current_time() == 2
        await gate.wait_empty()
        assert trio.current_time() == 5


async def test_a_waiter_is_not_stranded_by_a_later_admission(
    gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    async def owner(start: float, end: float) -> None:
        await trio.sleep(start)
        with gate.admit("a 1"):
            await trio.sleep(end - start)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner, 0, 2)
        nursery.start_soon(owner, 1, 4)
        await trio.sleep(0.5)
        await gate.wait_idle()
        assert trio.current_time() == 4


async def test_waiting_for_nobody_is_a_checkpoint(gate: Gate) -> None:
    with trio.testing.assert_checkpoints():
        await gate.wait_idle()
    with trio.testing.assert_checkpoints():
        await gate.wait_empty()
