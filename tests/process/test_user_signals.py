"""SIGUSR1 and SIGUSR2: who is called, when, and that neither kills."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import trio
import trio.testing

from dynamo_trio.process.user_signals import Switchboard


async def calls_of(board: Switchboard, *signums: signal.Signals) -> None:
    for signum in signums:
        board.handle(signum, None)
    await trio.testing.wait_all_tasks_blocked()


async def test_callbacks_run_in_the_loop_in_their_order() -> None:
    board, called = Switchboard(), []
    board.attach(trio.lowlevel.current_trio_token())
    board.on_signal(signal.SIGUSR2, lambda: called.append("first"))
    board.on_signal(signal.SIGUSR2, lambda: called.append("second"))
    board.handle(signal.SIGUSR2, None)
    assert called == []
    await trio.testing.wait_all_tasks_blocked()
    assert called == ["first", "second"]
    await calls_of(board, signal.SIGUSR2)
    assert called == ["first", "second"] * 2


async def test_a_signal_that_comes_before_the_loop_waits_for_it() -> None:
    board, called = Switchboard(), []
    board.handle(signal.SIGUSR2, None)
    board.on_signal(signal.SIGUSR2, lambda: called.append(2))
    assert called == []
    board.attach(trio.lowlevel.current_trio_token())
    await trio.testing.wait_all_tasks_blocked()
    assert called == [2]


async def test_a_signal_that_nobody_hears_calls_the_first_who_listens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board, called = Switchboard(), list[str]()
    board.attach(trio.lowlevel.current_trio_token())
    with caplog.at_level("INFO"):
        await calls_of(board, signal.SIGUSR2)
    assert "SIGUSR2: nothing listens to it" in caplog.text
    for name in ("first", "second"):
        board.on_signal(signal.SIGUSR2, partial(called.append, name))
        await trio.testing.wait_all_tasks_blocked()
    assert called == ["first"]


async def test_a_callback_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    board, called = Switchboard(), []
    board.attach(trio.lowlevel.current_trio_token())
    board.on_signal(signal.SIGUSR1, lambda: 1 / 0)
    board.on_signal(signal.SIGUSR1, lambda: called.append(1))
    await calls_of(board, signal.SIGUSR1)
    assert called == [1]
    assert "SIGUSR1: a callback failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_the_other_signals_are_not_for_callbacks() -> None:
    with pytest.raises(ValueError, match="SIGTERM: only SIGUSR1 and SIGUSR2 are heard"):
        Switchboard().on_signal(signal.SIGTERM, lambda: None)


def test_a_signal_after_the_loop_calls_nobody() -> None:
    board, called = Switchboard(), []
    board.on_signal(signal.SIGUSR2, lambda: called.append(2))

    async def main() -> None:
        board.attach(trio.lowlevel.current_trio_token())
        await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    board.handle(signal.SIGUSR2, None)
    assert called == []
