"""An engine of ours fails behind NVIDIA's frontend: another worker finishes what it had begun."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.interop.load import CHAT
from tests.interop.processes import wait_until
from tests.interop.scene import DIAGONALS, axes
from tests.standalone.harness import chat, finish_all, open_streams

if TYPE_CHECKING:
    from tests.interop.fleet import Worker
    from tests.interop.model import Model
    from tests.interop.scene import Scene

LIMITS = {
    "DYN_ENGINE_HEALTH_CHECK_INTERVAL": "0.2",
    "DYN_ENGINE_HEALTH_CHECK_TIMEOUT": "1",
    "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT": "1",
}


def two_workers(scene: Scene, model: Model, fault: str) -> list[Worker]:
    """Both are known to the frontend: each has taken a request."""
    flags = ("--itl-ms", "10", "--sim-fault", fault)
    workers = [scene.our_worker(model, *flags, **LIMITS) for _ in range(2)]
    frontend = scene.their_frontend
    processes = [worker.process for worker in workers]
    frontend.wait_model(model, *processes)
    for process in processes:
        process.wait_log("is ready after")

    def both_have_worked() -> bool:
        frontend.ask("POST", CHAT, chat(1, model=model.name))
        return all(worker.taken > 0 for worker in workers)

    wait_until(both_have_worked, "both workers take part", *processes)
    return workers


def strike_one(scene: Scene, fault: str) -> None:
    model = scene.model()
    workers = two_workers(scene, model, fault)
    frontend = scene.their_frontend
    body = chat(300, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)

    with open_streams(frontend.port, 6, body) as streams:
        failing = max(workers, key=lambda worker: worker.running)
        running = failing.running
        assert running > 0
        failing.process.kill(signal.SIGUSR2)
        answers = finish_all(streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 6
    assert all(answer.is_done for answer in answers)
    assert failing.process.end() == 1
    report = failing.process.said()[-1]
    assert report["cause"].startswith("fatal: Engine")
    assert report["requests"]["handed_over"] == running
    assert len(scene.store.instances(model)) == 1


@axes(0, few=True)
def test_streams_of_an_engine_that_dies_go_on_elsewhere(scene: Scene) -> None:
    strike_one(scene, "die")


@pytest.mark.soak
@pytest.mark.parametrize("scene", DIAGONALS[1], ids="-".join, indirect=True)
@pytest.mark.parametrize("fault", ["raise", "hang", "stall", "hang-close"])
def test_streams_of_an_engine_that_fails_go_on_elsewhere(scene: Scene, fault: str) -> None:
    strike_one(scene, fault)
