"""When a worker that is told to stop leaves, and what becomes of what it was doing."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.programs.conftest import MODEL, Fleet, status_port, wait_instances
from tests.standalone.harness import ask, chat, finish_all, metric, open_streams, wait_until
from tests.standalone.steady import CHAT

if TYPE_CHECKING:
    from tests.standalone.harness import Server

asks = partial(chat, model=MODEL)
PLANES = {"mux": "only", "tcp": "off"}
SOAK = pytest.mark.soak
INFLIGHT = "dynamo_component_inflight_requests"
#: Of what may still be done, so much is less than a test would wait for.
LONG = "100"


def limits(grace: float | str, drain: float | str) -> dict[str, Any]:
    return {
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(grace),
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(drain),
    }


def seconds(worker: Server) -> dict[str, float]:
    return {phase["phase"]: phase["seconds"] for phase in worker.report["phases"]}


def running(worker: Server) -> float:
    return metric(status_port(worker), INFLIGHT)


def test_what_is_shorter_than_the_grace_period_adds_nothing_to_it(fleet: Fleet) -> None:
    worker = fleet.worker("--itl-ms", "5", "--mux", "off", ready=False, **limits(2, LONG))
    frontend = fleet.frontend("--mux", "off")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 3, asks(40)) as streams:
        worker.kill(signal.SIGTERM)
        answers = finish_all(streams)
        assert worker.popen.poll() is None  # its client may not have heard of its leaving
    assert all(answer.is_done for answer in answers)
    assert worker.end() == 0
    assert worker.report["requests"]["finished"] == 3
    took = seconds(worker)
    assert took["grace"] >= 2
    assert sum(took.values()) - took["grace"] < 2


@pytest.mark.parametrize("plane", ["mux", "tcp"])
def test_what_is_longer_than_the_drain_ends_with_a_reason_and_is_counted(
    fleet: Fleet, plane: str
) -> None:
    mux = ("--mux", PLANES[plane])
    environ = limits(0.3, 0.3) | {"DYN_TRIO_EXIT_CODE_ON_LOSS": "3"}
    worker = fleet.worker("--itl-ms", "20", *mux, ready=False, **environ)
    frontend = fleet.frontend(*mux)
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 3, asks(8000)) as streams:
        worker.kill(signal.SIGTERM)
        answers = finish_all(streams)
    code = worker.end()
    assert all(answer.error["code"] and answer.text for answer in answers)
    requests = worker.report["requests"]
    assert requests["finished"] == requests["lost"] == requests["failed"] == 0
    if plane == "mux":  # a frontend that has said that it has no place for them
        assert (code, requests["cut"], requests["handed_over"]) == (3, 3, 0)
    else:  # one that cannot say
        assert (code, requests["cut"], requests["unconfirmed"]) == (0, 0, 3)
    assert worker.report["leftovers"] == worker.report["errors"] == []
    assert worker.report["seconds"] < 10


@SOAK  # what a worker had not begun that is killed is tested always
@pytest.mark.parametrize("plane", ["mux", "tcp"])
def test_what_has_no_token_yet_is_begun_anew_at_the_other_worker(fleet: Fleet, plane: str) -> None:
    mux = ("--mux", PLANES[plane])
    flags = ("--prefill-ms", "2000", "--system-port", "0", *mux)
    workers = [fleet.worker(*flags, ready=False, **limits(0.1, 0.1)) for _ in range(2)]
    frontend = fleet.frontend(*mux)
    wait_instances(frontend, 2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(ask, frontend.port, "POST", CHAT, asks(4)) for _ in range(2)]
        wait_until(lambda: [running(worker) for worker in workers] == [1, 1], "one at each")
        assert workers[0].stop() == 0
        answers = [job.result() for job in jobs]
    assert [answer.is_done for answer in answers] == [True] * 2
    assert len({answer.text for answer in answers}) == 1
    assert workers[0].report["requests"]["finished"] == 0


def test_two_workers_that_stop_at_once_complete_what_they_have(fleet: Fleet) -> None:
    workers = [fleet.worker("--itl-ms", "20", ready=False, **limits(1, LONG)) for _ in range(2)]
    frontend = fleet.frontend()
    wait_instances(frontend, 2)
    with open_streams(frontend.port, 6, asks(80)) as streams:
        for worker in workers:
            worker.kill(signal.SIGTERM)
        wait_instances(frontend, 0)
        began = time.monotonic()
        late = ask(frontend.port, "POST", CHAT, asks(4))
        assert time.monotonic() - began < 10
        answers = finish_all(streams)
    assert (late.status, late.error["code"]) == (503, "no_worker")
    assert all(answer.is_done for answer in answers)
    assert len({answer.text for answer in answers}) == 1
    assert [worker.end() for worker in workers] == [0, 0]
    assert [worker.report["requests"]["finished"] for worker in workers] == [3, 3]
    assert fleet.records("instances") == fleet.records("mdc") == []
