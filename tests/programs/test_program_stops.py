"""SIGTERM to a worker, to a frontend, to both: what is in flight completes."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.programs.conftest import MODEL, Fleet, status_port, wait_instances
from tests.standalone.harness import (
    Answer,
    Http1,
    Server,
    ask,
    chat,
    finish_all,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

asks = partial(chat, model=MODEL)
SLOW = ("--itl-ms", "20")
#: A worker whose clients cannot say that they know of its leaving waits so long.
GRACE: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
#: Such a client, as Dynamo's own are.
UNABLE = ("--mux", "off")
PATIENT = ("--http-graceful-shutdown-timeout-secs", "120")


def start_pair(
    fleet: Fleet, *flags: str, asking: tuple[str, ...] = (), **environ: str
) -> tuple[Server, Server]:
    worker = fleet.worker(*SLOW, *flags, ready=False, **environ)
    frontend = fleet.frontend(*PATIENT, *asking)
    wait_instances(frontend, 1)
    return worker, frontend


def check_whole(answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert answer.is_done
        assert answer.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({answer.text for answer in answers}) == 1


def phases(server: Server) -> dict[str, str]:
    return {phase["phase"]: phase["outcome"] for phase in server.report["phases"]}


def test_a_worker_that_stops_completes_its_streams(fleet: Fleet) -> None:
    worker, frontend = start_pair(fleet, "--system-port", "0", asking=UNABLE, **GRACE)
    with open_streams(frontend.port, 4, asks(100)) as streams:
        worker.kill(signal.SIGTERM)
        worker.wait_log("phase grace")
        assert ask(status_port(worker), "GET", "/health").status == 503
        assert ask(status_port(worker), "GET", "/live").status == 200
        wait_instances(frontend, 0)
        late = ask(frontend.port, "POST", "/v1/chat/completions", asks(4))
        check_whole(finish_all(streams))
    assert worker.end() == 0
    assert late.status == 503
    assert late.error["code"] == "no_worker"
    assert worker.report["requests"]["finished"] == 4
    assert worker.report["leftovers"] == worker.report["errors"] == []
    # It had served a client that cannot acknowledge: the grace period is kept in full.
    assert phases(worker)["grace"] == "timed_out"
    assert fleet.records("instances") == fleet.records("mdc") == []


def test_a_frontend_that_stops_completes_its_streams(fleet: Fleet) -> None:
    worker, frontend = start_pair(fleet, **GRACE)
    with open_streams(frontend.port, 4, asks(60)) as streams, Http1(frontend.port) as other:
        assert other.ask("GET", "/live").status == 200
        frontend.kill(signal.SIGTERM)
        frontend.wait_log("phase draining")
        late = other.ask("POST", "/v1/chat/completions", asks(4))
        check_whole(finish_all(streams))
    assert frontend.end() == 0
    assert (late.status, late.error["code"]) == (503, "draining")
    assert frontend.report["requests"]["finished"] == 4
    assert worker.stop() == 0
    assert worker.report["served_before"] == 4


def test_both_stop_at_once(fleet: Fleet) -> None:
    worker, frontend = start_pair(fleet, **GRACE)
    with open_streams(frontend.port, 4, asks(100)) as streams:
        worker.kill(signal.SIGTERM)
        frontend.kill(signal.SIGTERM)
        check_whole(finish_all(streams))
    assert (worker.end(), frontend.end()) == (0, 0)
    assert worker.report["requests"]["finished"] == frontend.report["requests"]["finished"] == 4


def test_at_its_limit_a_frontend_says_farewell(fleet: Fleet) -> None:
    fleet.worker(*SLOW, ready=False, DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0")
    frontend = fleet.frontend(DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.3")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 2, asks(8000)) as streams:
        frontend.kill(signal.SIGTERM)
        answers = finish_all(streams)
    assert frontend.end() == 0
    assert [answer.error["code"] for answer in answers] == ["cut", "cut"]


def test_a_request_may_come_within_the_grace_period(fleet: Fleet) -> None:
    # Straight over the request plane, as by a router that has not heard yet: the file is
    # put back by hand, so that the frontend goes on routing there.
    grace: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "3"}
    worker, frontend = start_pair(fleet, asking=UNABLE, **grace)
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(2)).is_done
    (record,) = fleet.records("instances")
    content = record.read_bytes()
    worker.kill(signal.SIGTERM)
    wait_instances(frontend, 0)
    record.write_bytes(content)
    wait_instances(frontend, 1)
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(2)).is_done
    assert worker.end() == 0
    assert worker.report["requests"]["finished"] == 1


def test_while_one_worker_leaves_another_takes_over(fleet: Fleet) -> None:
    workers = [fleet.worker(*SLOW, ready=False, **GRACE) for _ in range(2)]
    frontend = fleet.frontend(*PATIENT)
    wait_instances(frontend, 2)
    with open_streams(frontend.port, 4, asks(60)) as streams, Http1(frontend.port) as other:
        workers[0].kill(signal.SIGTERM)
        asked = 0
        while workers[0].popen.poll() is None:
            assert other.ask("POST", "/v1/chat/completions", asks(2)).is_done
            asked += 1
        check_whole(finish_all(streams))
    assert workers[0].end() == 0
    assert workers[0].report["requests"]["finished"] >= 2
    assert workers[1].stop() == 0
    served = [w.report["served_before"] + w.report["requests"]["finished"] for w in workers]
    assert sum(served) == asked + 4
    assert asked >= 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_nobody_has_asked_leaves_at_once(
    fleet: Fleet, signum: signal.Signals
) -> None:
    worker = fleet.worker(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="100")
    worker.kill(signum)
    assert worker.end() == 0
    assert worker.report["seconds"] < 10  # of the 100 that it might wait
    assert worker.report["cause"] == signum.name
    assert phases(worker)["grace"] == "completed"
    assert fleet.records("instances") == fleet.records("mdc") == []


def test_a_stop_while_the_engine_loads_leaves_no_registration(fleet: Fleet) -> None:
    worker = fleet.worker("--load-ms", "600000", "--system-port", "0", ready=False)
    worker.wait_log("loading")
    port = status_port(worker)
    answer = ask(port, "GET", "/health")
    assert (answer.status, answer.json()["stage"]) == (503, "loading")
    assert ask(port, "GET", "/live").status == 200
    assert fleet.records("instances") == fleet.records("mdc") == []
    worker.kill(signal.SIGTERM)
    assert worker.end() == 0
    assert "serving dyn://" not in worker.log
    assert fleet.records("instances") == fleet.records("mdc") == []


def test_a_stop_while_the_store_is_away(fleet: Fleet) -> None:
    away = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": "http://127.0.0.1:1"}
    frontend = fleet.frontend(ready=False, **away)
    worker = fleet.worker(ready=False, **away)
    assert ask(frontend.port, "GET", "/health").json()["stage"] == "starting"
    worker.wait_log("shutdown timetable")
    assert (frontend.stop(), worker.stop()) == (0, 0)


def test_a_worker_whose_engine_dies_ends_with_1_and_its_streams_are_told(fleet: Fleet) -> None:
    worker, frontend = start_pair(fleet, "--sim-fault", "raise", "--sim-fault-after", "20")
    with open_streams(frontend.port, 2, asks(8000)) as streams:
        answers = finish_all(streams)
    assert worker.end() == 1
    assert all(answer.error["message"] for answer in answers)
    assert "Traceback" not in frontend.log
    assert fleet.records("instances") == []
    assert frontend.stop() == 0


def test_workers_come_and_go_around_a_frontend(fleet: Fleet) -> None:
    frontend = fleet.frontend(*PATIENT)
    port = frontend.port
    assert ask(port, "GET", "/health").status == 200
    answer = ask(port, "POST", "/v1/chat/completions", asks(2))
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    for _ in range(2):
        worker = fleet.worker(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0")
        wait_instances(frontend, 1)
        assert ask(port, "POST", "/v1/chat/completions", asks(2)).is_done
        assert worker.stop() == 0
        wait_instances(frontend, 0)
        answer = ask(port, "POST", "/v1/chat/completions", asks(2))
        assert (answer.status, answer.error["code"]) == (503, "no_worker")
    wait_until(lambda: ask(port, "GET", "/v1/models").json()["data"] == [], "no model")
