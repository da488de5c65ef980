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
            {"phase": "draining", "outcome": "unfinished", "seconds": 0.985},
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


def test_what_is_too_long_ends_between_two_words() -> None:
    long = "LoadError: " + "x" * 150 + " is truncated: it has " + " of ".join(["123456789"] * 9)
    report = ShutdownReport(cause=long, phase="stopped", exit_code=1, errors=(long,))
    said = json.loads(report.to_json())
    for text in (said["cause"], *said["errors"]):
        beginning, dots = text[:-4], text[-4:]
        assert dots == " ..."
        assert long.startswith(beginning + " ")
        assert len(text) <= 240
    unbroken = ShutdownReport(cause="x" * 1000, phase="stopped", exit_code=1).to_json()
    assert len(json.loads(unbroken)["cause"]) == 240


def test_who_is_still_inside_at_the_exit_is_lost() -> None:
    report = ShutdownReport(
        cause="SIGINT",
        phase="stopping",
        exit_code=130,
        requests={Outcome.CUT: 1, Outcome.LOST: 1},
        gates={"http": {Outcome.CUT: 1, Outcome.LOST: 1}, "work": {Outcome.CUT: 2}},
        inside={"http": 2, "work": 0},
        leftovers=("chat 1", "chat 2"),
    )
    left = report.at_exit()
    assert left.requests == {Outcome.CUT: 1, Outcome.LOST: 3}
    assert left.gates == {"http": left.requests, "work": {Outcome.CUT: 2}}
    assert left.leftovers == report.leftovers
    assert left.at_exit() == left
    nothing = ShutdownReport(cause="none", phase="starting", exit_code=0)
    assert nothing.at_exit() == nothing
