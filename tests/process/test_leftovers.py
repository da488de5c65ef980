"""Children and threads that would outlive the process, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_trio.process import last_words, leftovers

#: Stops by a lifecycle, and does not leave by this package's way out of a process.
GUEST = """
import subprocess, trio
from dynamo_trio.lifecycle import Lifecycle, Timetable
async def main():
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    print(child.pid)
    child.returncode = 0  # no complaint that nobody has waited
    lifecycle = Lifecycle(Timetable(grace=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        lifecycle.request_stop("over")
trio.run(main)
"""


def runs(pid: int) -> bool:
    """Is it there, and has not ended?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_gone(*pids: int) -> None:
    end = time.monotonic() + 30
    while any(map(runs, pids)):
        assert time.monotonic() < end, f"{[pid for pid in pids if runs(pid)]} are still there"
        time.sleep(0.01)


def left_by(child: Any) -> list[int]:
    """The processes that the program says it has left, which run."""
    word, *pids = child.popen.stdout.readline().split()
    assert word == "left"
    found = [int(pid) for pid in pids]
    assert all(map(runs, found))
    return found


def check_leftovers(child: Any, pids: list[int], *more: str) -> None:
    wait_gone(*pids)
    named = [name for name in child.report["leftovers"] if name.startswith("child ")]
    assert [name.split(":")[0] for name in named] == [f"child {pid}" for pid in pids]
    assert "sleep 1000" in named[1]
    assert [name for name in child.report["leftovers"] if name not in named] == list(more)


def test_children_go_with_the_process(start: Any) -> None:
    child = start("leaks_children", ready=False)
    pids = left_by(child)
    child.wait_output("ready")
    child.kill(signal.SIGTERM)
    assert child.end() == 0
    check_leftovers(child, pids)


def test_children_go_when_the_watchdog_acts(start: Any) -> None:
    child = start("leaks_children_and_hangs", ready=False)
    pids = left_by(child)
    child.wait_output("ready")
    child.kill(signal.SIGTERM)
    assert child.end() == 70
    check_leftovers(child, pids, "thread 1")


def test_children_go_with_the_last_sigint(start: Any) -> None:
    child = start("leaks_children_and_is_stubborn", ready=False)
    pids = left_by(child)
    child.wait_output("ready")
    for phase in ("draining", "stopping", None):
        child.kill(signal.SIGINT)
        if phase:
            child.wait_log(f"phase {phase}")
    assert child.end() == 130
    check_leftovers(child, pids, "stubborn 1")


def test_children_go_when_the_start_fails(start: Any) -> None:
    child = start("leaks_children_and_crashes", ready=False)
    pids = left_by(child)
    assert child.end() == 1
    check_leftovers(child, pids)


def test_a_program_of_somebody_else_keeps_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", GUEST], stdout=subprocess.PIPE, check=True)
    pid = int(done.stdout)
    assert runs(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "no parenthesis", "1 (x) S"])
def test_what_cannot_be_read_is_passed_over(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(leftovers, "_read", lambda path: text)
    assert leftovers.descendants() == []


def test_the_ids_of_another_namespace_are_nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # /proc is still that of this process
    assert leftovers.descendants() == []


def test_a_thread_that_an_exit_would_wait_for_is_named() -> None:
    over = threading.Event()
    stray = threading.Thread(target=over.wait, name="stray")
    daemon = threading.Thread(target=over.wait, name="daemon", daemon=True)
    stray.start()
    daemon.start()
    named = leftovers.stray_threads()
    over.set()
    assert "thread stray" in named
    assert "thread daemon" not in named
    assert "thread MainThread" not in named


def test_a_sweep_that_fails_costs_no_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def sweep() -> tuple[str, ...]:
        raise ZeroDivisionError

    last_words.LastWords(sweep=sweep).say(0)
    assert '"leftovers":["cannot end what is left: ZeroDivisionError' in capfd.readouterr().err
