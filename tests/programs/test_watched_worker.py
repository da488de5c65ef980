"""A worker that is watched while it stops, and taken out of routing and back over HTTP."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import h11
import pytest

from tests.programs.conftest import MODEL, Fleet, status_port, wait_instances
from tests.standalone.harness import Answer, ask, chat, finish_all, open_streams, wait_until

if TYPE_CHECKING:
    from tests.standalone.harness import Server

asks = partial(chat, model=MODEL)
WATCHED = ("--system-port", "0")
#: Between two looks, in seconds.
EVERY = 0.05


@attrs.define(eq=False)
class Watch:
    """Looks at a worker's status port until nobody answers there any more."""

    worker: Server
    port: int
    looks: list[tuple[Answer, Answer, Answer, Answer]] = attrs.field(factory=list)
    #: The log when nobody answered for the first time.
    log_at_the_end: str = ""
    answers_after: int = 0

    def run(self) -> None:
        while self.worker.popen.poll() is None:
            try:
                paths = ("/live", "/health", "/drain", "/metrics")
                live, health, drain, metrics = [ask(self.port, "GET", path) for path in paths]
            except (OSError, EOFError, AssertionError, h11.RemoteProtocolError):
                self.log_at_the_end = self.log_at_the_end or self.worker.log or "nothing"
            else:
                self.answers_after += bool(self.log_at_the_end)
                self.looks.append((live, health, drain, metrics))
            time.sleep(EVERY)


def in_order(values: list[str]) -> list[str]:
    return [value for n, value in enumerate(values) if n == 0 or values[n - 1] != value]


def test_the_status_port_answers_through_a_whole_stop(fleet: Fleet) -> None:
    grace = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
    worker = fleet.worker(*WATCHED, "--itl-ms", "20", ready=False, **grace)
    frontend = fleet.frontend("--mux", "off")  # it cannot acknowledge: the grace period is kept
    wait_instances(frontend, 1)
    watch = Watch(worker, status_port(worker))
    with open_streams(frontend.port, 2, asks(150)) as streams:
        assert ask(watch.port, "GET", "/health").status == 200
        worker.kill(signal.SIGTERM)
        looking = threading.Thread(target=watch.run)
        looking.start()
        answers = finish_all(streams)
    assert "still running" in worker.wait_log("still stopping after 1 s, ")
    assert worker.end() == 0
    looking.join()
    assert all(answer.is_done for answer in answers)
    assert len(watch.looks) > 10
    assert {live.status for live, _, _, _ in watch.looks} == {200}
    assert {health.status for _, health, _, _ in watch.looks} == {503}  # from the first one on
    assert {metrics.status for _, _, _, metrics in watch.looks} == {200}
    told = [drain.json() for _, _, drain, _ in watch.looks]
    assert {one["cause"] for one in told} == {"SIGTERM"}
    assert in_order([one["phase"] for one in told])[:2] == ["grace", "draining"]
    # No gap: whoever looked in vain did so when the sequence was over.
    assert watch.answers_after == 0
    assert "phase stopped" in watch.log_at_the_end or not watch.log_at_the_end
    for one in told:
        assert one["safe_to_delete"] is False or one["in_flight"] == 0
    first = told[0]
    assert first["in_flight"] == 2
    assert first["peers"]["cannot_acknowledge"] is True
    assert all(request["age_seconds"] >= 0 for request in first["requests"])


def test_out_of_routing_and_back(fleet: Fleet) -> None:
    worker = fleet.worker(*WATCHED, "--itl-ms", "20", ready=False)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    port = status_port(worker)
    with open_streams(frontend.port, 2, asks(50)) as streams:
        drained = ask(port, "POST", "/drain?wait=true")
        answers = finish_all(streams)
    assert [answer.is_done for answer in answers] == [True, True]
    assert drained.status == 200
    assert drained.json()["safe_to_delete"] is True
    assert (drained.json()["stage"], drained.json()["in_flight"]) == ("drained", 0)
    health = ask(port, "GET", "/health")
    assert (health.status, health.json()["stage"]) == (503, "drained")
    wait_instances(frontend, 0)
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(4)).status == 503
    back = ask(port, "POST", "/resume?wait=true")
    assert (back.status, back.json()["state"]) == (200, "serving")
    wait_instances(frontend, 1)
    answer = ask(frontend.port, "POST", "/v1/chat/completions", asks(4))
    assert answer.is_done
    assert ask(port, "GET", "/health").status == 200
    assert worker.stop() == 0
    assert worker.report["requests"]["lost"] == worker.report["requests"]["cut"] == 0


@pytest.mark.soak  # seconds of waiting; the numbers are held in virtual time
def test_a_stop_in_the_drained_state_has_no_second_grace_period(fleet: Fleet) -> None:
    grace: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "3"}
    worker = fleet.worker(*WATCHED, ready=False, **grace)
    frontend = fleet.frontend("--mux", "off")
    wait_instances(frontend, 1)
    assert ask(frontend.port, "POST", "/v1/chat/completions", asks(4)).is_done
    drained = ask(status_port(worker), "POST", "/drain?wait=true").json()
    # The peer cannot acknowledge: the drain has waited out all of it.
    assert drained["last_outcome"]["seconds"] >= 3.0
    assert worker.stop() == 0
    (kept,) = [one for one in worker.report["phases"] if one["phase"] == "grace"]
    assert kept["seconds"] < 0.3


def test_who_waits_for_a_drain_does_not_hold_a_stop_up(fleet: Fleet) -> None:
    worker = fleet.worker(*WATCHED, "--itl-ms", "20", ready=False)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    port = status_port(worker)
    answers: list[Answer] = []
    with open_streams(frontend.port, 1, asks(100)) as streams:
        waiting = threading.Thread(
            target=lambda: answers.append(ask(port, "POST", "/drain?wait=true"))
        )
        waiting.start()
        wait_until(lambda: ask(port, "GET", "/drain").json()["state"] == "draining", "a drain")
        worker.kill(signal.SIGTERM)
        worker.wait_log("SIGTERM")
        assert ask(port, "POST", "/resume").status == 409
        assert all(answer.is_done for answer in finish_all(streams))
    assert worker.end() == 0
    waiting.join()
    (answer,) = answers
    assert (answer.status, answer.json()["safe_to_delete"]) == (200, True)


def test_on_a_public_port_only_whoever_is_allowed(fleet: Fleet) -> None:
    closed = fleet.worker(*WATCHED, ready=False, DYN_SYSTEM_HOST="0.0.0.0")
    opened = fleet.worker(*WATCHED, ready=False, DYN_SYSTEM_HOST="0.0.0.0", DYN_TRIO_DRAIN_API="1")
    port = status_port(closed)
    refused = ask(port, "POST", "/drain")
    assert refused.status == 403
    assert "DYN_TRIO_DRAIN_API=1" in refused.json()["message"]
    assert ask(port, "GET", "/drain").status == 200
    tasks = ask(port, "GET", "/debug/tasks")  # a caller on this machine
    assert tasks.status == 200
    assert b"serve_http" in tasks.body
    opened.wait_ready()
    assert ask(status_port(opened), "POST", "/drain?wait=true").status == 200
