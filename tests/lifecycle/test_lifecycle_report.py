"""The shutdown report."""

from __future__ import annotations

import json

from dynamo_trio.lifecycle import Ending, Outcome, ShutdownReport, Stage
from dynamo_trio.lifecycle.report import summary


def test_the_report_is_one_line() -> None:
    report = ShutdownReport(
        cause="SIGTERM",
        phase="stopped",
        exit_code=0,
        seconds=1.23456,
        phases=(Stage("grace", 0, 0.25, Ending.COMPLETED), Stage("draining", 0.25)),
        steps=(Stage("unregister", 0, 0.0, Ending.FAILED),),
        requests={Outcome.FINISHED: 3, Outcome.HANDED_OVER: 1},
        gates={"work": {Outcome.FINISHED: 3}},
        unconfirmed=1,
        leftovers=("generate 1",),
        errors=("OSError: gone\nfor good",),
    )
    line = report.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "event": "shutdown_report",
        "cause": "SIGTERM",
        "exit_code": 0,
        "phase": "stopped",
        "seconds": 1.235,
        "phases": [
            {"phase": "grace", "outcome": "completed", "seconds": 0.25},
            {"phase": "draining", "outcome": "unfinished", "seconds": None},
        ],
        "steps": [{"step": "unregister", "outcome": "failed", "seconds": 0.0}],
        "requests": {
            "finished": 3,
            "handed_over": 1,
            "cut": 0,
            "cancelled": 0,
            "failed": 0,
            "lost": 0,
            "unconfirmed": 1,
        },
        "gates": {
            "work": {
                "finished": 3,
                "handed_over": 0,
                "cut": 0,
                "cancelled": 0,
                "failed": 0,
                "lost": 0,
            }
        },
        "served_before": 0,
        "leftovers": ["generate 1"],
        "errors": ["OSError: gone\nfor good"],
    }


def test_many_leftovers_still_fit_into_one_write() -> None:
    names = tuple(f"generate {'x' * 200} {i}" for i in range(1000))
    report = ShutdownReport(
        cause="x" * 1000,
        phase="stopping",
        exit_code=70,
        steps=tuple(Stage(f"a_long_step_name_{i}", i, 1.0, Ending.TIMED_OUT) for i in range(8)),
        leftovers=names,
        errors=names,
    )
    line = report.to_json()
    assert len(line) < 4096
    assert json.loads(line)["leftovers"][-1] == "and 992 more"


def test_an_exception_in_one_line() -> None:
    assert summary(ValueError("first\nsecond")) == "ValueError: first"
    assert summary(ValueError()) == "ValueError"
    group = ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [OSError("b")])])
    assert summary(group) == "ValueError: a; OSError: b"
