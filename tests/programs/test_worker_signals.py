"""Signals to a worker, at any moment of its life and whatever it is doing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.programs.conftest import MODEL, Fleet, wait_instances
from tests.standalone.harness import (
    Answer,
    chat,
    finish_all,
    handles_sigterm,
    in_parallel,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.standalone.harness import Server

asks = partial(chat, model=MODEL)
#: What is still to be waited for is much longer than any test.
PATIENT: dict[str, Any] = {
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "600",
    "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "600",
}


def registered(fleet: Fleet) -> list[Path]:
    """Everything in the store, whoever has put it there."""
    return [path for path in fleet.store.glob("v1/*/[!.]*") if path.is_file()]


# --- while it starts ------------------------------------------------------------------------


def stop_early(fleet: Fleet, seconds: float) -> None:
    """SIGTERM so many seconds after the process was started: no waiting, nothing left."""
    worker = fleet.worker(ready=False, **PATIENT)
    time.sleep(seconds)
    handled = handles_sigterm(worker.popen.pid)
    worker.kill(signal.SIGTERM)
    code = worker.end()
    assert code == 0 or (code == -signal.SIGTERM and not handled), worker.log
    if code == 0:
        assert worker.report["cause"] == "SIGTERM"
        assert worker.report["seconds"] < 60  # of the hundreds that it might wait
        assert worker.report["errors"] == worker.report["leftovers"] == []
    assert "Traceback" not in worker.log


def sweep(fleet: Fleet, offsets: Sequence[float]) -> None:
    # Two at a time: the offsets must fall into the start also on a small machine.
    for pair in (offsets[i : i + 2] for i in range(0, len(offsets), 2)):
        in_parallel([partial(stop_early, fleet, seconds) for seconds in pair])
    assert registered(fleet) == []


def start_in_steps(fleet: Fleet, steps: int) -> list[float]:
    """Moments from the first instruction of a worker to a little beyond its readiness."""
    began = time.monotonic()
    worker = fleet.worker()
    took = time.monotonic() - began
    assert worker.stop() == 0
    return [took * 1.2 * (i + 1) / steps for i in range(steps)]


def test_a_signal_at_any_moment_of_a_workers_start(fleet: Fleet) -> None:
    offsets = start_in_steps(fleet, 50)
    sweep(fleet, random.Random(6).sample(offsets, 6))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_signal_at_fifty_moments_of_a_workers_start(fleet: Fleet) -> None:
    sweep(fleet, start_in_steps(fleet, 50))


# --- two signals ----------------------------------------------------------------------------


def check_told(answers: Sequence[Answer]) -> None:
    """Each is whole, or says why not."""
    for answer in answers:
        assert answer.is_done or answer.error["code"]


def stop_twice(worker: Server, second: signal.Signals, offset: float) -> None:
    worker.kill(signal.SIGTERM)
    time.sleep(offset)
    worker.kill(second)
    assert worker.end() == 0, worker.log
    report = worker.report
    # Sent at once they are not ordered: the kernel delivers SIGINT, the smaller, first.
    assert report["cause"] in ("SIGTERM", second.name)
    assert report["requests"]["lost"] == 0
    assert report["errors"] == report["leftovers"] == []
    if report["cause"] == "SIGTERM" and second is signal.SIGTERM:
        assert report["requests"]["finished"] >= 1
    assert report["seconds"] < 60


def stop_all_twice(fleet: Fleet, cases: Sequence[tuple[signal.Signals, float]]) -> None:
    """A worker for each case, two streams on each, and none of them is lost in silence."""
    environ = PATIENT | {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
    flags = ("--itl-ms", "20", "--mux", "off")
    workers = [fleet.worker(*flags, ready=False, **environ) for _ in cases]
    frontend = fleet.frontend("--mux", "off")
    wait_instances(frontend, len(workers))
    with open_streams(frontend.port, 2 * len(workers), asks(150)) as streams:
        in_parallel(
            [
                partial(stop_twice, worker, second, offset)
                for worker, (second, offset) in zip(workers, cases, strict=True)
            ]
        )
        check_told(finish_all(streams))
    assert frontend.stop() == 0
    assert registered(fleet) == []


def two_signals(offsets: int) -> list[tuple[signal.Signals, float]]:
    """Offsets from none to far into the drain, with either signal as the second."""
    return [
        (second, 2.0 * i / offsets)
        for second in (signal.SIGINT, signal.SIGTERM)
        for i in range(offsets)
    ]


def test_two_signals_to_workers(fleet: Fleet) -> None:
    stop_all_twice(fleet, random.Random(7).sample(two_signals(20), 3))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_signals_to_workers_at_twenty_offsets(fleet: Fleet) -> None:
    cases = two_signals(20)
    for some in (cases[i : i + 4] for i in range(0, len(cases), 4)):
        stop_all_twice(fleet, some)


# --- whatever it is doing -------------------------------------------------------------------

#: A worker with a call that never returns in its event loop, which SIGUSR2 makes.
STUCK = """
from dynamo_trio.process import signals; signals.install()
import ctypes, runpy, signal, sys, time
from dynamo_trio.process.user_signals import switchboard
def spin():
    while True:
        pass
def block():
    time.sleep(1000)
def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)
switchboard.on_signal(signal.SIGUSR2, globals()[sys.argv.pop(1)])
runpy.run_module("dynamo_trio.worker", run_name="__main__", alter_sys=True)
"""


def stuck_worker(fleet: Fleet, how: str) -> Server:
    """The watchdog acts 3 s after a signal: two seconds before the pod would be killed."""
    environ: dict[str, Any] = {"DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS": "5"}
    # Unmeasured: to save a measurement outlasts the second line of the watchdog.
    environ |= {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
    command = (sys.executable, "-c", STUCK, how, *fleet.named, "--mux", "off")
    worker = fleet.run(*command, **environ)
    return worker.wait_ready()


def never_turns_again(fleet: Fleet, how: str) -> None:
    worker = stuck_worker(fleet, how)
    worker.kill(signal.SIGUSR2)
    worker.kill(signal.SIGUSR1)
    worker.wait_log("the event loop has not turned for 1 s")
    assert f"in {how}" in worker.log
    worker.kill(signal.SIGTERM)
    assert worker.end() == 70
    assert worker.report["cause"] == "SIGTERM"
    assert worker.report["exit_code"] == 70


def holds_the_interpreter(fleet: Fleet) -> None:
    worker = stuck_worker(fleet, "hold_the_interpreter")
    frontend = fleet.frontend("--mux", "off")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 1, asks(8000)):
        worker.kill(signal.SIGTERM)
        worker.wait_log("SIGTERM: stopping gracefully")
        worker.kill(signal.SIGUSR2)
        assert worker.end() == 1
    assert "in hold_the_interpreter" in worker.log
    assert "shutdown_report" not in worker.log


def test_a_worker_whose_loop_does_not_turn_is_ended_by_the_watchdog(fleet: Fleet) -> None:
    in_parallel(
        [
            partial(never_turns_again, fleet, "spin"),
            partial(holds_the_interpreter, fleet),
        ]
    )


@pytest.mark.soak
def test_a_worker_whose_loop_waits_in_a_call_is_ended_by_the_watchdog(fleet: Fleet) -> None:
    never_turns_again(fleet, "block")


def test_user_signals_do_not_end_a_worker(fleet: Fleet) -> None:
    worker = fleet.worker(ready=False)
    wait_until(lambda: handles_sigterm(worker.popen.pid), "the handlers stand")
    for _ in range(20):
        worker.kill(signal.SIGUSR1)
        worker.kill(signal.SIGUSR2)
        time.sleep(0.02)
    worker.wait_ready()
    asked = worker.log.count(" tasks")
    worker.kill(signal.SIGUSR1)
    worker.wait_log(" tasks", times=asked + 1)
    worker.wait_log(" in Lifecycle._run > wait")
    assert worker.stop() == 0


# --- fast exit ------------------------------------------------------------------------------


def test_a_member_of_a_failover_group_leaves_at_once(fleet: Fleet) -> None:
    fast: dict[str, Any] = PATIENT | {"DYN_GMS_FAILOVER_FAST_EXIT_ON_SIGTERM": "1"}
    worker = fleet.worker("--itl-ms", "20", ready=False, **fast)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    assert "on SIGTERM only unregister <= 5 s; else " in worker.log
    with open_streams(frontend.port, 2, asks(8000)) as streams:
        worker.kill(signal.SIGTERM)
        assert worker.end() == 0
        check_told(finish_all(streams))
    assert worker.report["seconds"] < 60
    phases = {phase["phase"]: phase["outcome"] for phase in worker.report["phases"]}
    assert phases == {"grace": "completed", "draining": "skipped", "stopping": "skipped"}
    assert worker.report["requests"]["lost"] == 2
    assert fleet.records("instances") == []


# --- process 1 ------------------------------------------------------------------------------


def first_in(popen: subprocess.Popen[str]) -> int:
    """The process that ``unshare`` has started: number 1 of its own namespace."""
    children = Path(f"/proc/{popen.pid}/task/{popen.pid}/children")
    wait_until(lambda: children.read_text() != "", "unshare has forked")
    return int(children.read_text())


@pytest.mark.root
def test_process_1_stops_gracefully_whoever_has_become_its_child(fleet: Fleet) -> None:
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = (sys.executable, "-m", "dynamo_trio.worker", *fleet.named)
    worker = fleet.run(*apart, *command, **PATIENT).wait_ready()
    pid = first_in(worker.popen)

    def strangers() -> list[str]:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        stats = [Path(f"/proc/{child}/stat").read_text() for child in text.split()]
        return sorted(stat.rpartition(")")[2].split()[0] for stat in stats)

    script = "(sleep 0.1 >&- 2>&- &); (sleep 1000 >&- 2>&- &)"
    subprocess.run(["nsenter", "-t", str(pid), "-p", "sh", "-c", script], check=True)
    wait_until(lambda: strangers() == ["S", "Z"], "one has ended, and nobody has waited for it")
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
    assert worker.end() == 0
    (leftover,) = worker.report["leftovers"]
    assert leftover.endswith(": sleep 1000")
    assert worker.report["cause"] == "SIGTERM"
    assert worker.report["phase"] == "stopped"
    assert registered(fleet) == []
