"""Real processes, real signals: order, counts and exit codes; never the wall clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# --- stopping ------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_process(start: Any, signum: signal.Signals) -> None:
    child = start("idle")
    child.kill(signum)
    assert child.end() == 0
    assert child.report["cause"] == signum.name
    assert child.report["phase"] == "stopped"
    assert [s["step"] for s in child.report["steps"]] == ["unregister"]


def test_the_signal_is_logged_first(start: Any) -> None:
    child = start("busy")
    child.kill(signal.SIGTERM)
    child.wait_log("")
    assert child.log[0].startswith("INFO SIGTERM: stopping gracefully")


def test_work_is_finished_and_a_second_sigterm_changes_nothing(start: Any) -> None:
    child = start("busy")
    child.kill(signal.SIGTERM)
    child.wait_log("phase draining")
    child.kill(signal.SIGTERM)
    child.wait_log(
        "SIGTERM again: the stop is under way already (phase draining);"
        " 1 request of 1 endpoint in flight"
    )
    child.close_stdin()
    assert child.end() == 0
    assert child.report["requests"]["finished"] == 1
    assert child.report["leftovers"] == []


def test_sigint_during_a_stop_cuts_what_is_left_and_still_ends_well(start: Any) -> None:
    child = start("busy")
    child.kill(signal.SIGTERM)
    child.wait_log("phase draining")
    child.kill(signal.SIGINT)
    assert child.end() == 0
    assert child.report["requests"]["cut"] == 1
    assert child.report["cause"] == "SIGTERM"
    assert [p["outcome"] for p in child.report["phases"]] == [
        "completed",
        "cancelled",
        "completed",
    ]


def test_two_quick_sigints_are_two(start: Any) -> None:
    child = start("busy")
    child.kill(signal.SIGINT)
    child.wait_log("SIGINT: stopping gracefully")
    child.kill(signal.SIGINT)
    child.wait_log("SIGINT: stopping now")
    assert child.end() == 0
    assert child.report["requests"]["cut"] == 1


def test_the_last_sigint_leaves_at_once(start: Any) -> None:
    child = start("never_leaves")
    child.kill(signal.SIGINT)
    child.wait_log("phase draining")
    child.kill(signal.SIGINT)
    child.wait_log("phase stopping")
    child.kill(signal.SIGINT)
    assert child.end() == 130
    assert child.report["exit_code"] == 130
    assert child.report["phase"] in ("stopping", "stopped")
    assert child.report["leftovers"] == ["stubborn 1"]
    assert child.report["requests"]["lost"] == 1
    assert child.report["gates"]["work"]["lost"] == 1


def test_the_last_sigint_needs_no_turning_loop(start: Any) -> None:
    child = start("loop_spins_unwatched")
    child.kill(signal.SIGTERM)
    child.wait_log("phase grace")
    child.kill(signal.SIGINT)
    for _ in range(100):  # equal signals that come at once are one: send until it is gone
        child.kill(signal.SIGINT)
        try:
            child.popen.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        break
    assert child.end() == 130
    assert child.report["exit_code"] == 130


# --- before there is a loop --------------------------------------------------------------


def test_a_signal_before_the_loop_is_remembered_with_its_age(start: Any) -> None:
    child = start("early")
    child.kill(signal.SIGTERM)
    child.wait_output("pending")
    time.sleep(0.2)
    child.close_stdin()
    assert child.end() == 0
    assert "s after the signal" in child.log[0]
    assert child.report["seconds"] >= 0.2
    assert child.popen.stdout is not None
    assert "loading the engine" not in child.popen.stdout.read()


def test_a_sigint_after_an_early_sigterm_escalates(start: Any) -> None:
    child = start("early")
    child.kill(signal.SIGTERM)
    child.wait_output("pending")
    child.kill(signal.SIGINT)
    child.close_stdin()
    assert child.end() == 0
    assert any("stopping now" in line for line in child.log)


def test_the_last_of_three_early_sigints_leaves_at_once(start: Any) -> None:
    child = start("never_attaches")
    for _ in range(100):
        child.kill(signal.SIGINT)
        try:
            child.popen.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        break
    assert child.end() == 130
    assert child.report["phase"] == "starting"


LEAVING = """
from dynamo_trio.process import signals; signals.install()
import os, signal
leave = signals.desk.last_words
def more():
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)
    leave()
signals.desk.last_words = more
while True:
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_more_sigints_than_three_give_one_report() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True)
    assert done.returncode == 130
    assert json.loads(done.stderr)["exit_code"] == 130


def test_leaving_waits_for_no_reader_of_stderr() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while os.write(write, b"x" * 4096):
            pass
    os.set_blocking(write, True)
    done = subprocess.run([sys.executable, "-c", LEAVING], stderr=write, timeout=10)
    os.close(read)
    os.close(write)
    assert done.returncode == 130


def test_the_handler_stands_before_the_imports() -> None:
    code = (
        "from dynamo_trio.process import signals; signals.install()\n"
        "import os, signal, sys\n"
        "print('trio' in sys.modules, 'attrs' in sys.modules, 'logging' in sys.modules)\n"
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(signals.stop_pending(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stdout.splitlines() == ["False False False", "True"]
    assert json.loads(done.stderr)["exit_code"] == 130


def test_importing_installs_nothing() -> None:
    code = (
        "import signal, faulthandler, threading\n"
        "seen = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2\n"
        "before = [signal.getsignal(s) for s in seen]\n"
        "import dynamo_trio.process.run, dynamo_trio.process.signals, dynamo_trio.lifecycle\n"
        "import dynamo_trio.process.watchdog, dynamo_trio.process.inquiry\n"
        "assert before == [signal.getsignal(s) for s in seen]\n"
        "assert threading.active_count() == 1\n"
        "assert not signal.set_wakeup_fd(-1) >= 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- exit codes -----------------------------------------------------------------------------


def test_a_crashed_service_ends_the_process_with_1(start: Any) -> None:
    child = start("service_crashes", ready=False)
    assert child.end() == 1
    assert child.report["errors"] == ["OSError: the disk is gone"]
    assert child.report["cause"] == "fatal: OSError: the disk is gone"
    assert child.report["phase"] == "stopped"


def test_a_fatal_error_during_a_stop_still_counts(start: Any) -> None:
    child = start("fails_while_stopping")
    child.kill(signal.SIGTERM)
    assert child.end() == 1
    assert child.report["cause"] == "SIGTERM"


@pytest.mark.parametrize(
    ("scenario", "code", "message"),
    [
        ("bad_config", 64, "cannot start: DYN_HTTP_PORT=abc: must be a whole number"),
        ("port_in_use", 64, "cannot start: 127.0.0.1:8000 is in use"),
        ("two_errors", 1, "the process ends by an error"),
        ("crashes", 1, "the process ends by an error"),
    ],
)
def test_what_comes_out_of_the_loop(start: Any, scenario: str, code: int, message: str) -> None:
    child = start(scenario, ready=False)
    assert child.end() == code
    assert any(message in line for line in child.log)
    assert child.report["exit_code"] == code
    assert child.report["phase"] == "starting"
    traceback = any("Traceback" in line for line in child.log)
    assert traceback == (code == 1)


def test_lost_work_has_its_own_code(start: Any) -> None:
    child = start("loses")
    child.kill(signal.SIGTERM)
    assert child.end() == 3
    assert child.report["requests"]["cut"] == 1


@pytest.mark.parametrize(("scenario", "code"), [("returns", 0), ("returns_code", 1)])
def test_main_may_simply_return(start: Any, scenario: str, code: int) -> None:
    child = start(scenario, ready=False)
    assert child.end() == code
    assert child.report["cause"] == "main returned"


def test_fast_exit_waits_for_nobody(start: Any) -> None:
    child = start("fast_exit")
    child.kill(signal.SIGTERM)
    assert child.end() == 0
    assert child.report["leftovers"] == ["stubborn 1"]
    assert [p["outcome"] for p in child.report["phases"]] == ["completed", "skipped", "skipped"]


def test_sigint_is_no_fast_exit(start: Any) -> None:
    child = start("fast_exit")
    child.kill(signal.SIGINT)
    child.wait_log("phase grace")
    child.kill(signal.SIGTERM)
    child.wait_log("SIGTERM again: the stop is under way already (phase grace)")
    for _ in range(2):
        child.kill(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.popen.wait(0.2)
    assert child.end() == 130


def test_a_leaked_thread_does_not_hold_the_process(start: Any) -> None:
    child = start("leaks_thread")
    child.kill(signal.SIGTERM)
    assert child.end() == 0
    assert child.report["leftovers"] == ["thread stray"]


# --- the watchdog ------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["thread_hangs", "loop_spins"])
def test_the_watchdog_ends_what_hangs(start: Any, scenario: str) -> None:
    # Unmeasured: to save a measurement while the loop spins outlasts the second line.
    child = start(scenario, COVERAGE_PROCESS_START="", COVERAGE_PROCESS_CONFIG="")
    child.kill(signal.SIGTERM)
    assert child.end() == 70
    assert child.report["exit_code"] == 70
    assert child.report["cause"] == "SIGTERM"
    assert child.report["phases"][-1]["outcome"] == "unfinished"
    assert child.report["seconds"] >= child.report["phases"][-1]["seconds"] > 0.1


def test_a_signal_arms_the_watchdog_though_the_loop_is_busy_already(start: Any) -> None:
    child = start("loop_spins_before", COVERAGE_PROCESS_START="", COVERAGE_PROCESS_CONFIG="")
    child.kill(signal.SIGTERM)
    assert child.popen.wait(10) == 70
    child.end()
    report = child.report
    assert (report["cause"], report["phase"], report["phases"]) == ("SIGTERM", "serving", [])
    assert report["seconds"] >= 0.5
    assert report["errors"] == ["the event loop did not turn: it has not heard of SIGTERM"]


def test_the_watchdog_knows_a_limit_before_there_is_a_timetable(start: Any) -> None:
    child = start("never_attaches", EARLY_LIMIT="0.3")
    child.kill(signal.SIGTERM)
    assert child.end() == 70
    assert child.report["phase"] == "starting"
    assert child.report["seconds"] >= 0.3
    assert child.report["errors"] == []


def test_faulthandler_ends_what_holds_the_gil(start: Any) -> None:
    child = start("holds_gil")
    child.kill(signal.SIGTERM)
    assert child.end() == 1
    assert any("Timeout" in line for line in child.log)
    assert any("in hold" in line for line in child.log)


# --- where the report goes ------------------------------------------------------------------------


def test_the_report_also_goes_to_a_file(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("an older and much longer text, which must not shine through" * 100)
    child = start("idle", REPORT=str(path))
    child.kill(signal.SIGTERM)
    assert child.end() == 0
    assert json.loads(path.read_text()) == child.report


def test_the_watchdog_writes_the_file_too(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "report"
    child = start("thread_hangs", REPORT=str(path))
    child.kill(signal.SIGTERM)
    assert child.end() == 70
    assert json.loads(path.read_text())["exit_code"] == 70


def test_a_file_that_cannot_be_written_is_named(start: Any, tmp_path: Path) -> None:
    child = start("idle", REPORT=str(tmp_path / "missing" / "report"))
    child.kill(signal.SIGTERM)
    assert child.end() == 0
    assert any("cannot write the shutdown report" in line for line in child.log)
    assert child.report["exit_code"] == 0


def test_a_reader_of_stderr_that_is_gone_changes_nothing(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "report"
    child = start("idle", REPORT=str(path))
    assert child.popen.stderr is not None
    child.popen.stderr.close()
    child.kill(signal.SIGTERM)
    assert child.popen.wait() == 0
    assert json.loads(path.read_text())["exit_code"] == 0
