"""SIGUSR1: a process tells who holds it, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

#: Unmeasured: to save a measurement outlasts the watchdog of who hangs.
UNMEASURED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}


def test_a_process_tells_its_tasks_and_goes_on(start: Any) -> None:
    child = start("never_leaves")
    child.kill(signal.SIGUSR1)
    child.wait_log("__main__.stubborn: ")
    assert "in stubborn > sleep_forever [shielded]" in child.log[-1]
    child.wait_log("MainThread")
    child.kill(signal.SIGTERM)
    child.wait_log("phase draining")
    child.kill(signal.SIGUSR1)
    child.wait_log(" tasks\n")
    child.wait_log("MainThread")
    assert not any("has not turned" in line for line in child.log)


def test_a_busy_loop_tells_what_it_is_busy_with(start: Any) -> None:
    child = start("loop_spins_before", **UNMEASURED)
    child.kill(signal.SIGUSR1)
    child.wait_log("runs now: ")
    assert "in loop_spins_before" in child.log[-1]
    child.wait_log("the event loop has not turned for 1 s")
    child.kill(signal.SIGTERM)
    assert child.end() == 70


def test_a_process_that_is_stuck_in_c_can_tell_too(start: Any) -> None:
    child = start("stuck_in_c", **UNMEASURED)
    child.kill(signal.SIGUSR1)
    child.wait_log("runs now: ")
    assert "in stuck_in_c" in child.log[-1]
    child.wait_log("the event loop has not turned for 1 s")
    child.kill(signal.SIGKILL)  # a stop cannot be asked for: no handler of ours ever runs


def test_sigusr2_is_for_who_listens(start: Any) -> None:
    child = start("hears")
    for _ in range(2):
        child.kill(signal.SIGUSR2)
        child.wait_output("heard")
    child.kill(signal.SIGINT)
    child.close_stdin()
    assert child.end() == 0


@pytest.mark.parametrize("more", ["", "import dynamo_trio.process.run"])
def test_before_there_is_a_loop_neither_kills(more: str) -> None:
    code = (
        "from dynamo_trio.process import signals; signals.install()\n"
        f"{more}\n"
        "import os, signal\n"
        "def importing():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)\n"
        "importing(); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n")
    assert "in importing" in done.stderr


def test_nobody_waits_for_a_reader_of_the_answer(start: Any) -> None:
    child = start("hears")
    for _ in range(2000):  # more than the pipe of standard error takes
        child.kill(signal.SIGUSR1)
    child.kill(signal.SIGUSR2)
    child.wait_output("heard")
