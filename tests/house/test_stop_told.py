"""What a person, or a log, is told while a process stops."""

from __future__ import annotations

import io
import logging
import math
import subprocess
import sys
from typing import TYPE_CHECKING, cast

import attrs
import pytest
import trio
import trio.testing
from rich.cells import cell_len
from rich.text import Text

from dynamo_trio.console import InFlight, StopLine, Terminal
from dynamo_trio.lifecycle import DrainPolicy, Lifecycle, Timetable
from dynamo_trio.program.stopping import stop_line, tell_stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

TWO = (InFlight("chat young", 1.0), InFlight("chat old", 9.0, 2.5))


def test_the_words() -> None:
    assert StopLine("draining", 4.0, TWO).words == (
        "2 requests still running, to be ended in 4.0 s; the oldest:"
        " chat old: running for 9.0 s, about 2.5 s to go"
    )
    assert StopLine("grace", 34.0, TWO).words.startswith(
        "2 requests still running and served on, to be ended in 34.0 s; the oldest:"
    )
    assert StopLine("grace", 3.0).words == "others may still send requests here, for 3.0 s at most"
    assert StopLine("stopped", math.inf, steps=("engine_close",)).words == (
        "closing what is left (engine_close)"
    )
    assert StopLine("draining", 4.0).words == "nothing is in flight, for 4.0 s at most"


@pytest.mark.parametrize(
    ("line", "worth"),
    [
        (StopLine("draining", 4.0), False),
        (StopLine("grace", 4.0), True),
        (StopLine("draining", 4.0, TWO), True),
        (StopLine("stopped", 4.0, steps=("engine_close",)), True),
        (StopLine("stopped", 4.0), False),
    ],
)
def test_what_is_over_in_a_moment_is_not_told(line: StopLine, worth: bool) -> None:
    assert line.is_worth_a_line == worth


@pytest.mark.parametrize("columns", [10, 40, 200])
@pytest.mark.parametrize("label", ["chat 日本語", "chat [red]x[/red]", "chat :smile: 10.1.2.3"])
def test_a_line_fits(monkeypatch: pytest.MonkeyPatch, columns: int, label: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    running = (InFlight(label, 1.0),)
    shown = StopLine("draining", 4.0, running)()
    plain = Text.from_ansi(shown).plain
    assert "\n" not in shown
    assert cell_len(plain) <= columns - 1
    assert plain.endswith("…") == (columns < 200)
    assert shown.startswith("\x1b[1;33m")
    if columns == 200:
        assert label in plain  # as it is: no markup, no emoji
    assert StopLine("draining", 4.0, running, color=False)() == plain


def test_a_line_with_colour_is_not_cut_by_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    terminal = Terminal(stream, is_terminal=True)
    terminal.set_status(StopLine("draining", 4.0, TWO))
    assert terminal.flush(10)
    terminal.set_status(lambda: "x" * 100)
    assert terminal.flush(10)
    terminal.set_status(None)
    terminal.close(10)
    shown = stream.getvalue()
    assert "\x1b[0m" in shown
    assert "2 requests"[:8] + "…" in shown  # as far as there is room
    assert "x" * 19 in shown
    assert "x" * 20 not in shown


@attrs.define(eq=False)
class Screen:
    """In the place of a terminal."""

    is_terminal: bool = True
    shown: list[tuple[float, str | None]] = attrs.field(factory=list)

    def set_status(self, render: Callable[[], str] | None) -> None:
        words = render.words if isinstance(render, StopLine) else None
        self.shown.append((round(trio.current_time(), 3), words))


async def stop_slowly(screen: Screen, seconds: float) -> None:
    """Stop a process, at 10 s, that has a request for so many seconds more."""
    lifecycle = Lifecycle(Timetable(grace=0.0, drain=100.0))

    async def request() -> None:
        with lifecycle.work.admit("generate one") as admission, admission.scope:
            await trio.sleep(10 + seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_stop, lifecycle, cast("Terminal", screen))
        nursery.start_soon(lifecycle.run)
        nursery.start_soon(request)
        await trio.sleep(10)
        lifecycle.request_stop("test")
        await lifecycle.wait_stopped()
        nursery.cancel_scope.cancel()


async def test_a_terminal_has_one_line_renewed_every_second(autojump_clock: MockClock) -> None:
    screen = Screen()
    await stop_slowly(screen, 2.5)
    times = [at for at, words in screen.shown if words]
    assert times == [10.0, 11.0, 12.0]
    words = screen.shown[2][1] or ""
    assert words.startswith("1 request still running, to be ended in 98.0 s; the oldest: generate")
    assert screen.shown[-1] == (12.5, None)


async def test_an_idle_stop_draws_nothing(autojump_clock: MockClock) -> None:
    screen = Screen()
    await stop_slowly(screen, 0.0)
    assert {words for _, words in screen.shown} <= {None}


async def test_a_log_is_told_more_and_more_rarely(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio.lifecycle")
    screen = Screen(is_terminal=False)
    await stop_slowly(screen, 20.0)
    told = [line for line in caplog.messages if line.startswith("still stopping")]
    assert [line.split(",")[0] for line in told] == [
        f"still stopping after {seconds} s" for seconds in (1, 2, 4, 8, 16)
    ]
    assert "draining: 1 request still running, to be ended in 99.0 s" in told[0]
    assert screen.shown == []


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        (Timetable(grace=5, drain=30), "34.0"),
        (Timetable(grace=5, drain=30, total=20), "15.0"),  # 16 s of it without the reserve
        (Timetable(grace=5, drain=30, drain_policy=DrainPolicy.MIGRATE), "4.0"),
    ],
)
async def test_in_the_grace_period_nothing_is_ended(
    autojump_clock: MockClock, limits: Timetable, ends: str
) -> None:
    lifecycle = Lifecycle(limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        with lifecycle.work.admit("generate one"):
            lifecycle.request_stop("test")
            await trio.sleep(1)
            words = stop_line(lifecycle).words
    told = f"1 request still running and served on, to be ended in {ends} s; the oldest:"
    assert words.startswith(told)


async def test_what_is_closed_last_has_the_time_of_its_step(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(grace=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        await trio.testing.wait_all_tasks_blocked()
        lifecycle.request_stop("test")
        await lifecycle.wait_stopped()
        assert lifecycle.remaining() == math.inf
        with lifecycle.cleanup(30, name="engine_close"):
            await trio.sleep(1)
            line = stop_line(lifecycle)
            with lifecycle.cleanup(5, name="remove /tmp/x"):
                assert lifecycle.remaining() == 29  # the time of all of them
            lifecycle.escalate("SIGINT")
            assert lifecycle.remaining() == lifecycle.remaining_in_all() < 29
        assert line.words == "closing what is left, for 29.0 s at most (engine_close)"


def test_whoever_does_not_watch_does_not_load_rich() -> None:
    code = "import sys, dynamo_trio.program.stopping; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
