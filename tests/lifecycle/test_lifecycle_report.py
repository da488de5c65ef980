"""The shutdown report."""

from __future__ import annotations

import json

import attrs
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.lifecycle import Ending, Outcome, Phase, ShutdownReport, Stage
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


stages = st.builds(
    Stage,
    st.text(),
    st.floats(0, 1e9),
    st.none() | st.floats(0, 1e9),
    st.none() | st.sampled_from(Ending),
    st.text() | st.text().map(lambda text: text * 100),
)
texts = st.text() | st.text(max_size=4).map(lambda text: text * 1000)
counts = st.dictionaries(st.sampled_from(Outcome), st.integers(0, 10**12))


@given(
    st.builds(
        ShutdownReport,
        cause=texts,
        phase=st.sampled_from(Phase).map(lambda phase: phase.label),
        exit_code=st.integers(0, 255),
        seconds=st.floats(0, 1e9),
        phases=st.lists(stages.map(lambda s: attrs.evolve(s, name="draining")), max_size=4).map(
            tuple
        ),
        steps=st.lists(stages, max_size=3).map(lambda some: tuple(some * 40)),
        requests=counts,
        gates=st.fixed_dictionaries({"http": counts, "work": counts}),
        leftovers=st.lists(texts).map(tuple),
        errors=st.lists(texts).map(tuple),
    )
)
def test_a_report_always_fits_into_what_is_kept_of_it(report: ShutdownReport) -> None:
    line = report.to_json()
    assert len(line.encode()) < 4095  # and the end of the line
    said = json.loads(line)
    assert (said["exit_code"], said["phase"]) == (report.exit_code, report.phase)
    assert len(said["phases"]) == len(report.phases)


def test_of_many_steps_the_first_are_told_and_the_worst_of_the_rest() -> None:
    steps = [Stage(f"remove /tmp/folder-{i}", i, 0.5, Ending.COMPLETED) for i in range(60)]
    steps[50] = attrs.evolve(steps[50], ending=Ending.TIMED_OUT)
    report = ShutdownReport(cause="SIGTERM", phase="stopped", exit_code=0, steps=tuple(steps))
    *told, rest = json.loads(report.to_json())["steps"]
    assert [one["step"] for one in told] == [stage.name for stage in steps[:12]]
    assert rest == {"step": "and 48 more", "outcome": "timed_out", "seconds": 24.0}


def test_letters_that_take_six_bytes_are_counted_as_six() -> None:
    report = ShutdownReport(cause="\u65e5" * 100, phase="stopped", exit_code=0)
    assert json.loads(report.to_json())["cause"] == "\u65e5" * 39 + " ..."


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
