"""A worker that is killed, or stands still, costs no request that was not begun."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.programs.conftest import MODEL, status_port, wait_instances
from tests.standalone.harness import Answer, Http1, ask, chat, metric, open_streams, wait_until

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet

CHAT = "/v1/chat/completions"
asks = partial(chat, model=MODEL)


@pytest.mark.soak
def test_a_killed_worker_costs_one_try_and_no_request(fleet: Fleet) -> None:
    _, dies = fleet.worker(), fleet.worker()
    # Longer than any key lives, so that one try is all that it may cost.
    frontend = fleet.frontend(DYN_RUNTIME_INHIBITED_DURATION_SECS="60")
    wait_instances(frontend, 2)
    assert "discovery is in " in frontend.log
    name = dies.wait_log("serving dyn://dynamo.backend.generate as instance ").rpartition(" ")[2]
    dies.kill(signal.SIGKILL)
    dies.popen.wait()
    with Http1(frontend.port) as connection:
        statuses = [connection.ask("POST", CHAT, asks(1)).status for _ in range(20)]
    assert statuses == [200] * 20
    instance = f"instance {name} of dyn://dynamo.backend.generate"
    frontend.wait_log(f"{instance} is left out for 60 s: the worker cannot be reached")
    wait_until(lambda: frontend.log.count(": complete, ") == 20, "each has its line")
    (mended,) = [line for line in frontend.log.splitlines() if "after 1 other" in line]
    assert "INFO    frontend: chat_completions of demo by " in mended
    assert name not in mended  # who failed it has a line of its own
    assert metric(frontend.port, "dynamo_frontend_requests_total") == 20
    wait_instances(frontend, 1)
    frontend.wait_log("model demo has 1 worker at dyn://dynamo.backend.generate, after 2")


@pytest.mark.parametrize("plane", ["mux", pytest.param("tcp", marks=pytest.mark.soak)])
def test_what_a_killed_worker_had_not_begun_is_answered_by_the_other(
    fleet: Fleet, plane: str
) -> None:
    slow = ("--prefill-ms", "2000", "--system-port", "0")
    stays, dies = fleet.worker(*slow, ready=False), fleet.worker(*slow, ready=False)
    frontend = fleet.frontend("--mux", "only" if plane == "mux" else "off")
    wait_instances(frontend, 2)
    port = frontend.port
    jobs = [
        partial(ask, port, "POST", CHAT, asks(4, stream=bool(number % 2))) for number in range(4)
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job) for job in jobs]
        inflight = "dynamo_component_inflight_requests"
        wait_until(lambda: metric(status_port(dies), inflight) == 2, "it has its half of them")
        wait_until(lambda: metric(status_port(stays), inflight) == 2, "and the other too")
        dies.kill(signal.SIGKILL)
        answers = [job.result() for job in running]
    assert [answer.status for answer in answers] == [200] * 4
    wait_until(lambda: frontend.log.count(": complete, ") == 4, "each has its line")
    assert frontend.log.count(", after 1 other: complete") == 2
    assert metric(port, "dynamo_frontend_requests_total") == 4
    assert metric(port, "dynamo_frontend_active_requests") == 0


def test_a_worker_that_stands_still_for_three_seconds_costs_nothing(fleet: Fleet) -> None:
    _, freezes = (fleet.worker("--itl-ms", "5", ready=False) for _ in range(2))
    frontend = fleet.frontend()
    wait_instances(frontend, 2)
    ends = time.monotonic() + 5

    def load() -> list[Answer]:
        answers = []
        while time.monotonic() < ends:
            answers.append(ask(frontend.port, "POST", CHAT, asks(20)))
        return answers

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(load) for _ in range(8)]
        time.sleep(0.5)
        freezes.kill(signal.SIGSTOP)
        try:
            time.sleep(3)
        finally:
            freezes.kill(signal.SIGCONT)
        answers = [answer for job in running for answer in job.result()]
    failed = [answer for answer in answers if answer.status != 200 or not answer.is_done]
    assert failed == []
    frontend.wait_log(", after 1 other: complete")  # it did cost a try


def test_the_last_worker_goes(fleet: Fleet) -> None:
    worker, frontend = fleet.worker(), fleet.frontend()
    wait_instances(frontend, 1)
    frontend.wait_log("model demo is offered; it has ")
    with open_streams(frontend.port, 1, asks(2)) as (stream,):
        stream.finish()
    worker.stop()
    wait_instances(frontend, 0)
    for _ in range(10):
        assert ask(frontend.port, "POST", CHAT, asks(1)).status == 503
    frontend.wait_log("refused POST /v1/chat/completions of demo: no_worker: ")
    frontend.wait_log("model demo is gone: ")
    assert metric(frontend.port, "dynamo_frontend_requests_total") == 11
    assert frontend.log.count("WARNING frontend: refused") < 10
