"""The parts of a process's end, one by one."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.lifecycle import Lifecycle, ShutdownReport, Timetable
from dynamo_trio.process import (
    ExitCode,
    ProcessContext,
    exit_codes,
    last_words,
    signals,
    strongest,
    watchdog,
)
from dynamo_trio.process.run import _arm_late
from dynamo_trio.process.signals import RULES, SignalDesk, Stage, Verb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((), 0),
        ((0, 0), 0),
        ((0, 3), 3),
        ((3, 1), 1),
        ((1, 64), 64),
        ((64, 70), 70),
        ((1, 70, 130, 3), 130),
    ],
)
def test_the_strongest_code_wins(codes: tuple[int, ...], code: int) -> None:
    assert strongest(*codes) == code
    assert strongest(*reversed(codes)) == code
    assert set(exit_codes.ExitCode) >= {ExitCode.OK, ExitCode.FATAL}


# --- signals -----------------------------------------------------------------------------


def test_the_table_of_signals_is_complete() -> None:
    assert set(RULES) == set(itertools.product(Stage, (signal.SIGTERM, signal.SIGINT)))
    assert all(verb is not Verb.LEAVE for (_, s), (verb, _) in RULES.items() if s is signal.SIGTERM)


def test_a_desk_remembers_what_came_before_a_lifecycle() -> None:
    desk, early = SignalDesk(), []
    desk.on_early = lambda: early.append("early")
    assert [desk.stop_pending] == [False]
    desk.handle(signal.SIGTERM, None)
    desk.handle(signal.SIGTERM, None)
    desk.handle(signal.SIGINT, None)
    assert desk.stop_pending
    assert early == ["early"] * 3
    assert [verb for verb, _, _ in desk._inbox] == [Verb.STOP, Verb.REPEAT, Verb.ESCALATE]


# --- last words ----------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A pipe in place of stderr: (read end, write end)."""
    read, write = os.pipe()
    monkeypatch.setattr(last_words, "STDERR", write)
    yield read, write
    os.close(read)
    os.close(write)


def test_last_words_are_said_once(pipe: tuple[int, int]) -> None:
    words = last_words.LastWords()
    words.say(130)
    words.say(70)
    [line] = os.read(pipe[0], 10_000).splitlines()
    assert json.loads(line)["exit_code"] == 130


def test_a_cause_is_found_for_who_was_never_told_to_stop(pipe: tuple[int, int]) -> None:
    report = ShutdownReport(cause="none", phase="serving", exit_code=0, errors=("OSError: gone",))
    last_words.LastWords(source=lambda: report, errors=["and more"]).say(1)
    said = json.loads(os.read(pipe[0], 10_000))
    assert said["cause"] == "OSError: gone"
    assert said["errors"] == ["OSError: gone", "and more"]


def test_the_last_of_three_signals_may_come_before_the_first_is_handled(
    pipe: tuple[int, int],
) -> None:
    report = ShutdownReport(
        cause="none", phase="serving", exit_code=0, gates={"http": {}}, inside={"http": 2}
    )
    last_words.LastWords(source=lambda: report).say(130)
    said = json.loads(os.read(pipe[0], 10_000))
    assert said["cause"] == "SIGINT"
    assert said["requests"]["lost"] == 2


def test_nobody_waits_for_a_reader_that_has_fallen_behind(
    pipe: tuple[int, int], tmp_path: Path
) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while os.write(write, b"x" * 4096):
            pass
    os.set_blocking(write, True)
    last_words.LastWords(path=tmp_path / "report").say(0)
    assert json.loads((tmp_path / "report").read_text())["exit_code"] == 0
    assert b"shutdown_report" not in os.read(read, 1 << 20)


def test_a_path_without_a_reader_holds_nobody(pipe: tuple[int, int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    last_words.LastWords(path=tmp_path / "fifo").say(0)
    said = os.read(pipe[0], 10_000)
    assert b"cannot write the shutdown report" in said
    assert said.endswith(b"}\n")


# --- watchdog ------------------------------------------------------------------------------


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What faulthandler is told, in place of doing it."""
    told: list[float] = []

    def later(seconds: float, *, exit: bool, file: int) -> None:
        assert exit
        assert file == 2
        told.append(round(seconds))

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    return told


def test_the_watchdog_only_shrinks(timers: list[float]) -> None:
    dog = watchdog.Watchdog(lambda code: None)
    for seconds in (100, 200, 50):
        dog.arm(seconds)
    assert timers == [102, 52]


def test_a_handler_that_interrupts_the_arming_is_not_overruled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dog = watchdog.Watchdog(lambda code: None)
    told: list[float] = []

    def later(seconds: float, **_: object) -> None:
        if not told:  # the signal comes right before the longer limit is set
            told.append(0)
            dog.arm(12)
        told.append(round(seconds))

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    dog.arm(60)
    assert told == [0, 14, 62, 14]


def test_the_watchdog_does_without_its_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    watchdog.Watchdog(lambda code: None).arm(10)


def test_the_handler_arms_by_what_the_signal_means(timers: list[float]) -> None:
    dog, lifecycle = watchdog.Watchdog(lambda code: None), Lifecycle(Timetable(total=57))
    for verb in (Verb.STOP, Verb.REPEAT, Verb.ESCALATE, Verb.STOP):
        _arm_late(dog, verb, lifecycle)
    assert timers == [62 + 2, 12 + 2]


async def test_the_second_line_is_before_the_kill_too(
    timers: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "desk", signals.SignalDesk())
    words = last_words.LastWords()
    dog = watchdog.Watchdog(words.say)
    lifecycle = Lifecycle(Timetable(total=57, killed_after=60))
    ProcessContext(words, dog).attach(lifecycle)
    _arm_late(dog, Verb.STOP, lifecycle)
    assert timers == [58 + 1]


def test_the_handler_arms_for_a_fast_exit(
    timers: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Lifecycle(Timetable(total=57, fast_exit=True))
    for cause in ("SIGTERM", "SIGINT"):
        monkeypatch.setattr(signals.desk, "cause", cause)
        _arm_late(watchdog.Watchdog(lambda code: None), Verb.STOP, fast)
    assert timers == [10 + 2, 62 + 2]


def test_a_first_guess_gives_way(timers: list[float]) -> None:
    dog = watchdog.Watchdog(lambda code: None)
    dog.arm_early()
    dog.arm_early()
    dog.arm(1000)
    dog.arm_early()
    assert timers == [37, 1002]


def test_the_report_may_be_asked_for_late(tmp_path: Path) -> None:
    words = last_words.LastWords()
    context = ProcessContext(words, watchdog.Watchdog(words.say))
    assert context.report_path is None
    context.report_path = tmp_path / "report"
    assert words.path == context.report_path
    assert not context.stop_pending
