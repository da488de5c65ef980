"""Limits of a frontend and of a worker, as processes; a worker that is frozen in mid-answer."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from tests.programs.conftest import MODEL, status_port, wait_instances
from tests.standalone.harness import Http1, ask, chat, finish_all, metric, open_streams, wait_until

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

CHAT = "/v1/chat/completions"
asks = partial(chat, model=MODEL)
LONG = asks(400)


def active(frontend: Server) -> float:
    return metric(frontend.port, "dynamo_frontend_active_requests")


def refused(frontend: Server) -> str:
    """Why one more request is, and that it is as it should be."""
    answer = ask(frontend.port, "POST", CHAT, asks(1, stream=False))
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (529, "overloaded")
    assert answer.headers["x-dynamo-reason"] == "overloaded"
    return str(error["message"])


def test_a_frontend_with_a_limit_and_a_worker_with_one(fleet: Fleet) -> None:
    """The frontend takes three at once; of these the worker works on one, and one waits."""
    flags = ("--itl-ms", "50", "--system-port", "0", "--engine-request-limit", "1")
    worker = fleet.worker(*flags, ready=False, DYN_DYNAMO_REQUEST_QUEUE_LIMIT="1")
    frontend = fleet.frontend("--max-concurrent-requests", "3")
    wait_instances(frontend, 1)
    waits = partial(metric, status_port(worker), "dynamo_request_queue")
    with open_streams(frontend.port, 1, LONG), Http1(frontend.port) as second:
        second.send("POST", CHAT, LONG)
        wait_until(lambda: waits() == 1, "one waits")
        assert "the worker is full" in refused(frontend)
    wait_until(lambda: waits() == 0, "it does not wait for who has left")
    assert metric(status_port(worker), "dynamo_rejection_request_total") == 1
    wait_until(lambda: active(frontend) == 0, "an idle frontend")
    assert ask(frontend.port, "POST", CHAT, asks(1, stream=False)).status == 200


def test_a_limit_of_a_model(fleet: Fleet) -> None:
    fleet.worker("--itl-ms", "50", ready=False)
    frontend = fleet.frontend(DYN_TRIO_MAX_CONCURRENT_REQUESTS_PER_MODEL="2")
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 2, LONG):
        assert "requests at once: 2" in refused(frontend)
    wait_until(lambda: active(frontend) == 0, "an idle frontend")
    assert ask(frontend.port, "POST", CHAT, asks(1, stream=False)).status == 200


def test_a_frozen_worker_is_given_up_after_the_limit(fleet: Fleet) -> None:
    """A stream that has begun is told why it ends; what is untouched goes to the other worker."""
    workers = [fleet.worker("--itl-ms", "50", ready=False) for _ in range(2)]
    frontend = fleet.frontend("--mux", "off", DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS="6")
    wait_instances(frontend, 2)
    with open_streams(frontend.port, 2, asks(100)) as streams:
        workers[0].kill(signal.SIGSTOP)
        try:
            statuses = [
                ask(frontend.port, "POST", CHAT, asks(2, stream=False)).status for _ in range(4)
            ]
            answers = finish_all(streams)
        finally:
            workers[0].kill(signal.SIGCONT)
    assert statuses == [200] * 4
    (broken,) = [answer for answer in answers if not answer.is_done]
    assert broken.error["code"] == "response_timeout"
    assert broken.text
    wait_until(lambda: active(frontend) == 0, "an idle frontend")

    def timeouts() -> int:
        return sum("response_timeout" in line for line in frontend.log.splitlines())

    wait_until(lambda: timeouts() > 0, "the line of the broken stream")
    assert timeouts() == 1
