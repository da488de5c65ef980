"""Impatient people and early signals: the ladder of SIGINTs, and signals before it is ready."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import (
    Server,
    ask,
    chat,
    finish_all,
    handles_sigterm,
    in_parallel,
    open_streams,
    wait_stalled,
)

if TYPE_CHECKING:
    from tests.standalone.conftest import Start

PATIENT = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "120"}
ENDLESS = chat(1900)
SLOW = ("--itl-ms", "50")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_sigint_during_a_stop_ends_it_now(start_sim: Start, first: signal.Signals) -> None:
    server = start_sim(*SLOW, **PATIENT)
    with open_streams(server.port, 4, ENDLESS) as streams:
        server.kill(first)
        server.wait_log("phase draining")
        server.kill(signal.SIGINT)
        answers = finish_all(streams)
    assert server.end() == 0
    for answer in answers:
        assert answer.error["code"] == "cut"
    assert server.report["cause"] == first.name
    assert server.report["requests"]["cut"] == 4
    phases = {phase["phase"]: phase["outcome"] for phase in server.report["phases"]}
    assert phases == {"grace": "skipped", "draining": "cancelled", "stopping": "completed"}


def test_three_sigints_leave_even_if_the_engine_hangs(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "hang", "--sim-fault-after", "9", **PATIENT)
    with open_streams(server.port, 2, ENDLESS) as streams:
        wait_stalled(server.port)
        server.kill(signal.SIGINT)
        server.wait_log("phase draining")
        server.kill(signal.SIGINT)
        # The engine hangs, but its clients are told.
        assert [answer.error["code"] for answer in finish_all(streams)] == ["cut", "cut"]
        server.wait_log("phase stopped")
        assert ask(server.port, "GET", "/live").status == 200
        server.kill(signal.SIGINT)
    assert server.end() == 130
    assert server.report["exit_code"] == 130
    assert server.report["cause"] == "SIGINT"
    assert server.report["requests"]["cut"] == 2


# --- before it is ready ------------------------------------------------------------------------


def stop_early(start_sim: Start, seconds: float) -> tuple[Server, bool]:
    """SIGTERM so many seconds after the process was started; was its handler there by then?"""
    server = start_sim(ready=False)
    time.sleep(seconds)
    handled = handles_sigterm(server.popen.pid)
    server.kill(signal.SIGTERM)
    server.end()
    return server, handled


def check_early_stop(server: Server, handled: bool) -> None:
    code = server.popen.returncode
    assert code == 0 or (code == -signal.SIGTERM and not handled), server.log
    if code == 0:
        assert server.report["cause"] == "SIGTERM"
        assert server.report["exit_code"] == 0
        assert server.report["errors"] == []
        assert "Traceback" not in server.log


def sweep(start_sim: Start, offsets: list[float]) -> None:
    # Two at a time: the offsets must fall into the start also on a small machine.
    for pair in (offsets[i : i + 2] for i in range(0, len(offsets), 2)):
        ended = in_parallel([partial(stop_early, start_sim, seconds) for seconds in pair])
        for server, handled in ended:
            check_early_stop(server, handled)


def test_a_signal_at_any_moment_of_the_start_is_a_graceful_stop(start_sim: Start) -> None:
    sweep(start_sim, [i * 0.045 for i in range(14)])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_signal_at_any_moment_of_the_start_in_small_steps(start_sim: Start) -> None:
    sweep(start_sim, [i * 0.002 for i in range(400)])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads(start_sim: Start, signum: signal.Signals) -> None:
    server = start_sim("--load-ms", "100000", ready=False)
    server.wait_log("loading sim")
    health = ask(server.port, "GET", "/health")
    assert (health.status, health.json()["stage"]) == (503, "starting")
    assert ask(server.port, "GET", "/live").status == 200
    early = ask(server.port, "POST", "/v1/chat/completions", chat(4))
    assert (early.status, early.error["code"]) == (503, "no_worker")
    server.kill(signum)
    assert server.end() == 0
    assert server.report["seconds"] < 10  # of the 100 that the load would take
    assert "Traceback" not in server.log
    assert "Cancelled" not in server.log


def test_a_load_that_only_ends_when_interrupted(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "load-stall", ready=False)
    server.wait_log("loading sim")
    server.kill(signal.SIGTERM)
    assert server.end() == 0
    assert server.report["errors"] == []


def test_three_sigints_while_the_load_hangs(start_sim: Start) -> None:
    server = start_sim("--sim-fault", "load-hang", ready=False)
    server.wait_log("loading sim")
    server.kill(signal.SIGINT)
    server.wait_log("SIGINT: stopping gracefully")
    server.kill(signal.SIGINT)
    server.wait_log("SIGINT: stopping now")
    server.kill(signal.SIGINT)
    assert server.end() == 130
    assert server.report["exit_code"] == 130


def test_a_stop_without_any_time_is_no_engine_failure(start_sim: Start) -> None:
    """The running step still gets a moment to come back, so the engine does not count as hung."""
    server = start_sim("--itl-ms", "10", DYN_WORKER_SHUTDOWN_TOTAL_TIMEOUT_SECS="0")
    with open_streams(server.port, 4, ENDLESS):
        server.kill(signal.SIGTERM)
        assert server.end() == 0
    assert server.report["errors"] == []
