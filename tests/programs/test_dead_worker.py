"""A worker that is killed costs one request, not every second one until its key expires."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.programs.conftest import MODEL, wait_instances
from tests.standalone.harness import Http1, ask, chat, metric, open_streams

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet

CHAT = "/v1/chat/completions"
asks = partial(chat, model=MODEL)


@pytest.mark.soak
def test_a_killed_worker_costs_one_request(fleet: Fleet) -> None:
    _, dies = fleet.worker(), fleet.worker()
    # Longer than any key lives, so that one failure is all that there may be.
    frontend = fleet.frontend(DYN_RUNTIME_INHIBITED_DURATION_SECS="60")
    wait_instances(frontend, 2)
    assert "discovery is in " in frontend.log
    name = dies.wait_log("serving dyn://dynamo.backend.generate as instance ").rpartition(" ")[2]
    dies.kill(signal.SIGKILL)
    dies.popen.wait()
    with Http1(frontend.port) as connection:
        statuses = [connection.ask("POST", CHAT, asks(1)).status for _ in range(20)]
    assert sorted(statuses) == [200] * 19 + [503]
    instance = f"instance {name} of dyn://dynamo.backend.generate"
    assert f"{instance} is left out for 60 s: the worker cannot be reached" in frontend.log
    (failed,) = [line for line in frontend.log.splitlines() if "cannot_connect" in line]
    assert "WARNING frontend: chat_completions of demo by " + name in failed
    wait_instances(frontend, 1)
    frontend.wait_log("model demo has 1 worker at dyn://dynamo.backend.generate, after 2")


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
