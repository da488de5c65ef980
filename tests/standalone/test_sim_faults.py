"""An engine that fails: every client is told, the exit code says what happened, the report too."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import (
    Answer,
    Http1,
    Server,
    ask,
    chat,
    finish_all,
    in_parallel,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from tests.standalone.conftest import Start

ENDLESS = chat(1900)
#: What each report has, and of what type.
FIELDS = {
    "event": str,
    "cause": str,
    "exit_code": int,
    "phase": str,
    "seconds": float,
    "phases": list,
    "steps": list,
    "requests": dict,
    "served_before": int,
    "leftovers": list,
    "errors": list,
}
OUTCOMES = {"finished", "handed_over", "cut", "cancelled", "failed", "lost"}


def check_report(server: Server, path: Path, code: int) -> None:
    """The report is whole, and the file has the same."""
    report = server.report
    for name, kind in FIELDS.items():
        assert isinstance(report[name], kind), name
    assert report["requests"].keys() >= OUTCOMES
    assert report["exit_code"] == code
    assert json.loads(path.read_text()) == report


def said_why(answer: Answer) -> str:
    """The reason in the error event of a stream that had begun."""
    assert "choices" in answer.chunks[0]
    code = answer.error["code"]
    assert isinstance(code, str)
    return code


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("die", "engine_dead"),
        ("raise", "engine_dead"),
        ("stall", "engine_hung"),
    ],
)
def test_an_engine_that_fails_in_a_step(
    start_sim: Start, tmp_path: Path, fault: str, reason: str
) -> None:
    failing_step(start_sim, tmp_path / "report", fault, reason)


def failing_step(start_sim: Start, path: Path, fault: str, reason: str) -> None:
    server = start_sim(
        *("--sim-fault", fault, "--sim-fault-after", "15", "--itl-ms", "10"),
        DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS="0.5",
        DYN_TRIO_SHUTDOWN_REPORT=str(path),
    )
    with open_streams(server.port, 4, ENDLESS) as streams:
        answers = finish_all(streams)
    assert server.end() == 1
    assert [said_why(answer) for answer in answers] == [reason] * 4
    check_report(server, path, 1)
    report = server.report
    assert report["cause"].startswith("fatal: ")
    assert report["requests"]["finished"] == 0
    assert report["served_before"] + report["requests"]["cut"] == 4
    assert len(report["errors"]) == 1
    assert report["leftovers"] == []
    assert report["phase"] == "stopped"


def test_a_unary_request_is_told_by_its_status(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "die", "--sim-fault-after", "3")
    answer = ask(server.port, "POST", "/v1/chat/completions", ENDLESS | {"stream": False})
    assert answer.status == 503
    assert answer.error["code"] == answer.headers["x-dynamo-reason"] == "engine_dead"
    assert server.end() == 1


def test_a_fault_during_a_stop_still_counts(start_sim: Start) -> None:
    server = start_sim(
        *("--sim-fault", "die", "--sim-fault-after", "40", "--itl-ms", "20"),
        DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="120",
        DYN_TRIO_EXIT_CODE_ON_LOSS="7",
    )
    with open_streams(server.port, 2, ENDLESS) as streams:
        server.kill(signal.SIGTERM)
        assert [said_why(answer) for answer in finish_all(streams)] == ["engine_dead"] * 2
    assert server.end() == 1
    assert server.report["cause"] == "SIGTERM"
    assert server.report["requests"]["cut"] == 2
    assert len(server.report["errors"]) == 1


# --- loading ------------------------------------------------------------------------------------


def test_a_load_that_fails(start_sim: Start, tmp_path: Path) -> None:
    path = tmp_path / "report"
    fault = ("--sim-fault", "load-fail")
    server = start_sim(*fault, ready=False, DYN_TRIO_SHUTDOWN_REPORT=str(path))
    assert server.end() == 1
    assert "cannot start: the simulated engine does not load" in server.log
    assert "Traceback" not in server.log
    check_report(server, path, 1)


def overdue_load(start_sim: Start, fault: str) -> None:
    limit = {"DYN_TRIO_ENGINE_LOAD_TIMEOUT_SECS": "0.5"}
    server = start_sim("--sim-fault", fault, ready=False, **limit)
    server.wait_log("loading sim")
    assert ask(server.port, "GET", "/live").status == 200
    assert server.end() == 1
    assert len(server.report["errors"]) >= 1


def test_a_load_that_is_overdue(start_sim: Start) -> None:
    overdue_load(start_sim, "load-stall")


def signal_while_the_load_hangs(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "load-hang", ready=False)
    server.wait_log("loading sim")
    server.kill(signal.SIGTERM)
    assert server.end() == 1
    assert server.report["cause"] == "SIGTERM"
    assert "EngineHung" in server.report["errors"][0]


# --- closing ------------------------------------------------------------------------------------


def test_an_engine_that_does_not_close(start_sim: Start, tmp_path: Path) -> None:
    path = tmp_path / "report"
    server = start_sim(
        *("--sim-fault", "hang-close", "--sim-fault-after", "0"),
        DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS="1",
        DYN_TRIO_SHUTDOWN_REPORT=str(path),
    )
    assert ask(server.port, "POST", "/v1/chat/completions", chat(4)).is_done
    assert server.stop() == 1
    check_report(server, path, 1)
    steps = {step["step"]: step["outcome"] for step in server.report["steps"]}
    assert steps["engine_close"] == "failed"


def test_a_child_that_the_engine_leaves_behind_goes_with_the_process(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "leak-child", "--sim-fault-after", "1")
    assert ask(server.port, "POST", "/v1/chat/completions", chat(4)).is_done
    tasks = Path(f"/proc/{server.popen.pid}/task").iterdir()
    (leaked,) = (int(pid) for task in tasks for pid in (task / "children").read_text().split())
    assert server.stop() == 0
    (leftover,) = server.report["leftovers"]
    assert leftover.startswith(f"child {leaked}: ")
    wait_until(lambda: not Path(f"/proc/{leaked}/fd").exists(), "the child is gone")


def a_hung_engine_and_little_time(start_sim: Start, path: Path) -> None:
    """The stop's hard deadline bounds the wait for the step: no watchdog is needed."""
    server = start_sim(
        *("--sim-fault", "hang", "--sim-fault-after", "5"),
        DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS="2",
        DYN_TRIO_SHUTDOWN_REPORT=str(path),
    )
    with open_streams(server.port, 2, ENDLESS) as streams:
        server.kill(signal.SIGTERM)
        answers = finish_all(streams)
    assert server.end() == 1
    assert [said_why(answer) for answer in answers] == ["cut", "cut"]
    check_report(server, path, 1)
    assert server.report["cause"] == "SIGTERM"
    assert server.report["requests"]["cut"] == 2


def test_calls_that_never_return(start_sim: Start, tmp_path: Path) -> None:
    """An engine has 5 s to come back when interrupted; these wait them out together."""
    in_parallel(
        [
            lambda: failing_step(start_sim, tmp_path / "step", "hang", "engine_hung"),
            lambda: overdue_load(start_sim, "load-hang"),
            lambda: signal_while_the_load_hangs(start_sim),
            lambda: a_hung_engine_and_little_time(start_sim, tmp_path / "budget"),
        ]
    )


def test_the_report_goes_to_stderr_when_the_file_cannot_be_written(start_sim: Start) -> None:
    server = start_sim(DYN_TRIO_SHUTDOWN_REPORT="/nonexistent/report")
    assert server.stop() == 0
    assert server.report["exit_code"] == 0
    assert "/nonexistent/report" in server.log


def test_requests_are_refused_from_the_moment_at_which_the_engine_fails(start_sim: Start) -> None:
    server = start_sim(
        *("--sim-fault", "hang-close", "--sim-fault-after", "0", "--itl-ms", "10"),
        DYN_TRIO_FATAL_SHUTDOWN_TIMEOUT_SECS="2",
        DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS="2",
    )
    server.kill(signal.SIGTERM)
    with Http1(server.port) as late:
        wait_until(lambda: "phase stopped" in server.log, "the sequence is over")
        answer = late.ask("GET", "/v1/models")
        health = ask(server.port, "GET", "/health").json()
    assert (answer.status, answer.headers["x-dynamo-reason"]) == (503, "draining")
    assert health["stage"] == "stopping"
    assert server.end() == 1
