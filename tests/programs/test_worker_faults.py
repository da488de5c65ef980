"""An engine that fails in a running process: SIGUSR2 sets the fault off, streams or none."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.programs.conftest import MODEL, Fleet, status_port, wait_instances
from tests.standalone.harness import (
    Server,
    ask,
    chat,
    close_server,
    finish_all,
    in_parallel,
    open_streams,
    start_server,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

ENDLESS = chat(1900, model=MODEL)
LIMITS: dict[str, Any] = {
    "DYN_ENGINE_HEALTH_CHECK_INTERVAL": "0.2",
    "DYN_ENGINE_HEALTH_CHECK_TIMEOUT": "1",
    "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT": "0.5",
}
#: Fault -> what it makes of the engine, what closing the engine is after it.
FATAL = {
    "die": ("EngineDead", "completed"),
    "raise": ("EngineDead", "completed"),
    "stall": ("EngineHung", "completed"),
    "hang": ("EngineHung", None),  # never closed under a call
    "hang-close": ("EngineDead", "failed"),
}
CODES = {"EngineDead": "engine_dead", "EngineHung": "engine_hung"}


@attrs.frozen
class Case:
    """A fault in a worker, and how its frontend speaks with it; None: nobody asks anything."""

    fault: str
    plane: str | None

    def __str__(self) -> str:
        return f"{self.fault} ({self.plane or 'at rest'})"


def strike(fleet: Fleet, case: Case) -> None:
    """One worker, with two streams or none, from the fault to the exit code."""
    folder = Fleet(fleet.folder / str(case), fleet.model, fleet.servers)
    flags = ("--sim-fault", case.fault, "--itl-ms", "20", "--system-port", "0")
    worker = folder.worker(*flags, ready=False, **LIMITS)
    if case.plane is None:
        worker.wait_ready()
        check_probes(status_port(worker))
        worker.kill(signal.SIGUSR2)
    else:
        strike_streams(folder, worker, case)
    assert worker.end() == 1
    assert folder.records("instances") == folder.records("mdc") == []
    check_report(worker, case)


def check_probes(port: int) -> None:
    assert [ask(port, "GET", path).status for path in ("/live", "/health")] == [200, 200]


def strike_streams(fleet: Fleet, worker: Server, case: Case) -> None:
    frontend = fleet.frontend("--mux", "off" if case.plane == "tcp" else "auto")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 2, ENDLESS) as streams:
        worker.kill(signal.SIGUSR2)
        answers = finish_all(streams)
    wanted = CODES[FATAL[case.fault][0]] if case.plane == "mux" else "engine_shutdown"
    assert [answer.error["code"] for answer in answers] == [wanted] * 2
    assert not any(answer.is_done for answer in answers)
    wait_instances(frontend, 0)
    assert frontend.stop() == 0


def check_report(worker: Server, case: Case) -> None:
    kind, closing = FATAL[case.fault]
    report = worker.report
    assert report["cause"].startswith(f"fatal: {kind}")
    assert report["exit_code"] == 1
    assert report["phase"] == "stopped"
    assert report["errors"][0].startswith(kind)
    assert len(report["errors"]) == (2 if case.fault == "hang-close" else 1)
    outcomes = report["requests"]
    assert outcomes["finished"] == outcomes["lost"] == 0
    told = outcomes["handed_over"] + outcomes["cut"] + outcomes["failed"]
    assert told == (0 if case.plane is None else 2)
    steps = {step["step"]: step["outcome"] for step in report["steps"]}
    assert steps["unregister"] == "completed"
    assert steps.get("engine_close") == closing
    assert "the fault of the simulated engine is set off" in worker.log


def strike_all(fleet: Fleet, cases: Iterable[Case]) -> None:
    in_parallel(partial(strike, fleet, case) for case in cases)


def test_engines_that_fail_in_a_worker(fleet: Fleet) -> None:
    strike_all(fleet, [Case("hang", "mux"), Case("hang-close", None), Case("raise", None)])


@pytest.mark.soak
@pytest.mark.parametrize("plane", ["mux", "tcp", None])
@pytest.mark.parametrize("faults", [("die", "raise", "stall"), ("hang", "hang-close")])
def test_every_fault_in_a_worker(fleet: Fleet, faults: tuple[str, ...], plane: str | None) -> None:
    strike_all(fleet, [Case(fault, plane) for fault in faults])


# --- one process --------------------------------------------------------------------------------


def strike_one_process(fault: str, streams: int) -> None:
    server = start_server("--engine", "sim", "--sim-fault", fault, "--itl-ms", "20", **LIMITS)
    try:
        server.wait_ready()
        kind, _ = FATAL[fault]
        if streams:
            with open_streams(server.port, streams, chat(1900)) as opened:
                server.kill(signal.SIGUSR2)
                answers = finish_all(opened)
            assert [answer.error["code"] for answer in answers] == [CODES[kind]] * streams
        else:
            server.kill(signal.SIGUSR2)
        assert server.end() == 1
        assert server.report["cause"].startswith(f"fatal: {kind}")
        assert server.report["requests"]["finished"] == 0
    finally:
        complaint = close_server(server)
    assert not complaint


def test_an_engine_that_dies_at_rest_in_one_process() -> None:
    strike_one_process("die", 0)


@pytest.mark.soak
@pytest.mark.parametrize("streams", [0, 2])
def test_every_fault_in_one_process(streams: int) -> None:
    for some in (("die", "raise", "stall"), ("hang", "hang-close")):
        in_parallel(partial(strike_one_process, fault, streams) for fault in some)


# --- what is no failure -------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def test_a_child_that_the_engine_leaves_is_no_failure_and_holds_nothing_up(fleet: Fleet) -> None:
    worker = fleet.worker("--sim-fault", "leak-child", **LIMITS)
    before = children(worker.popen.pid)
    worker.kill(signal.SIGUSR2)
    wait_until(lambda: len(children(worker.popen.pid)) > len(before), "a child")
    [leaked] = set(children(worker.popen.pid)) - set(before)
    try:
        worker.kill(signal.SIGTERM)
        assert worker.popen.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):  # it holds our pipes open
            os.kill(leaked, signal.SIGKILL)
    assert worker.end() == 0
    assert worker.report["errors"] == []


@pytest.mark.soak
def test_a_fault_that_nobody_sets_off_does_not_strike(fleet: Fleet) -> None:
    worker = fleet.worker("--sim-fault", "hang-close", **LIMITS)
    assert worker.stop() == 0
    assert worker.report["errors"] == []


@pytest.mark.soak
def test_steps_without_a_limit_are_limited_by_the_health_check(fleet: Fleet) -> None:
    settings = LIMITS | {"DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS": "0"}
    worker = fleet.worker("--sim-fault", "stall", **settings)
    worker.kill(signal.SIGUSR2)
    assert worker.end() == 1
    assert "fails the health check before" in worker.log
    assert "EngineHung" in worker.report["errors"][0]
