"""A worker that answers no more is found no more, until it answers again; it lives all the time."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.programs.conftest import MODEL, instances, status_port, wait_instances
from tests.standalone.harness import ask, chat, wait_until

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

CHECKS = {
    "DYN_HEALTH_CHECK_ENABLED": "true",
    "DYN_CANARY_WAIT_TIME": "0.3",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "3",
    "DYN_SYSTEM_PORT": "0",
    "DYN_ENDPOINT": "dyn://dynamo.backend.generate",
}
CHAT = "/v1/chat/completions"


def restless_worker(fleet: Fleet, **environ: str) -> Server:
    named = ("--engine", "sim", "--model-path", str(fleet.model), "--model-name", MODEL)
    module = "tests.interop.peers.restless_worker"
    return fleet.start(module, *named, **(CHECKS | environ)).wait_ready()


def probe(port: int, path: str) -> tuple[int, str]:
    answer = ask(port, "GET", path)
    return answer.status, answer.json()["endpoints"]["generate"]


def waiting(port: int) -> int:
    """Requests that the illness holds."""
    count: int = ask(port, "POST", "/engine/patients", {}).json()["waiting"]
    return count


#: The other plane is seen behind NVIDIA's frontend as well.
PLANES = [{"DYN_TRIO_MUX": "only"}, pytest.param({"DYN_TRIO_MUX": "off"}, marks=pytest.mark.soak)]


@pytest.mark.parametrize("plane", PLANES, ids=["mux", "tcp"])
def test_nothing_is_routed_to_who_is_ill(fleet: Fleet, plane: dict[str, Any]) -> None:
    ill, well = restless_worker(fleet, **plane), restless_worker(fleet, **plane)
    frontend = fleet.frontend(**plane)
    wait_instances(frontend, 2)
    port = status_port(ill)
    assert probe(port, "/health") == (200, "ready")

    ask(port, "POST", "/engine/fall_ill", {})
    wait_instances(frontend, 1)
    assert probe(port, "/health") == (503, "notready")
    assert probe(port, "/live") == (200, "notready")
    assert waiting(port) <= 1
    for _ in range(6):
        assert ask(frontend.port, "POST", CHAT, chat(2, model=MODEL)).is_done

    ask(port, "POST", "/engine/recover", {})
    wait_instances(frontend, 2)
    for _ in range(6):
        assert ask(frontend.port, "POST", CHAT, chat(2, model=MODEL)).is_done
    assert probe(port, "/health") == (200, "ready")
    assert len(instances(frontend.port)) == 2
    for server in (ill, well):
        assert server.stop() == 0


def test_a_canary_that_hangs_does_not_hold_up_a_stop(fleet: Fleet) -> None:
    worker = restless_worker(fleet, DYN_HEALTH_CHECK_REQUEST_TIMEOUT="60")
    port = status_port(worker)
    ask(port, "POST", "/engine/fall_ill", {})
    wait_until(lambda: waiting(port) == 1, "a canary that hangs")
    assert worker.stop() == 0
    report = worker.report
    assert report["errors"] == report["leftovers"] == []
    assert not any(report["requests"].values())


@pytest.mark.soak
def test_an_engine_that_hangs_leaves_routing_before_its_process_ends(fleet: Fleet) -> None:
    """The canary is quicker than the watch of the engine, and both have their consequence."""
    limits: dict[str, Any] = CHECKS | {"DYN_ENGINE_HEALTH_CHECK_TIMEOUT": "5"}
    worker = fleet.worker("--sim-fault", "hang", **limits)
    port = status_port(worker)
    assert probe(port, "/health") == (200, "ready")
    worker.kill(signal.SIGUSR2)
    worker.wait_log("fails its health check (no answer)")
    wait_until(lambda: not fleet.records("instances"), "no registration")
    assert probe(port, "/health") == (503, "notready")
    assert probe(port, "/live") == (200, "notready")
    assert worker.end() == 1
    assert "EngineHung" in worker.report["errors"][0]
