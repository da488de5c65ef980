"""One worker of ours behind NVIDIA's frontend: when it leaves, and what its clients see."""

from __future__ import annotations

import signal
import time
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

#: Three times as long as a registration lives that nobody renews, in seconds.
THREE_LIVES = 30.0
each_store = pytest.mark.parametrize("scene", DIAGONALS[0], ids="-".join, indirect=True)


def served(scene: Scene, grace: float, drain: float) -> tuple[Model, Worker]:
    model = scene.model()
    limits = {
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(grace),
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(drain),
    }
    worker = scene.our_worker(model, "--itl-ms", "10", **limits)
    scene.their_frontend.wait_model(model, worker.process)
    return model, worker


@axes(1, few=True)
def test_without_another_worker_streams_end_at_the_limit_and_are_told(scene: Scene) -> None:
    model, worker = served(scene, 0.2, 0.2)
    frontend = scene.their_frontend
    with open_streams(frontend.port, 3, chat(4000, model=model.name)) as streams:
        assert worker.process.stop() == 0
        answers = finish_all(streams)
    for answer in answers:
        assert answer.text
        assert any("error" in chunk for chunk in answer.chunks)
    report = worker.process.said()[-1]
    assert report["requests"]["unconfirmed"] == report["requests"]["handed_over"] == 3
    assert report["leftovers"] == report["errors"] == []
    assert scene.store.instances(model) == set()


@pytest.mark.soak
@each_store
def test_streams_of_a_worker_that_sleeps_for_three_lives_go_on(scene: Scene) -> None:
    model, worker = served(scene, 1, 100)
    frontend = scene.their_frontend
    body = chat(300, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)
    with open_streams(frontend.port, 3, body) as streams:
        worker.process.kill(signal.SIGSTOP)
        time.sleep(THREE_LIVES)
        assert scene.store.instances(model) == set()
        worker.process.kill(signal.SIGCONT)
        answers = finish_all(streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 3
    assert all(answer.is_done for answer in answers)

    def serves_again() -> bool:
        return frontend.ask("POST", CHAT, chat(2, model=model.name)).status == 200

    wait_until(lambda: len(scene.store.instances(model)) == 1, "its key", worker.process)
    wait_until(serves_again, "an answer", worker.process)
    assert worker.process.stop() == 0
    assert scene.store.instances(model) == set()


@pytest.mark.soak
@each_store
def test_a_stop_in_its_sleep_is_one_when_it_wakes(scene: Scene) -> None:
    model, worker = served(scene, 1, 100)
    frontend = scene.their_frontend
    assert frontend.ask("POST", CHAT, chat(2, model=model.name)).is_done
    worker.process.kill(signal.SIGSTOP)
    time.sleep(THREE_LIVES)
    worker.process.kill(signal.SIGTERM)
    worker.process.kill(signal.SIGCONT)
    assert worker.process.end() == 0
    report = worker.process.said()[-1]
    assert report["leftovers"] == report["errors"] == []
    assert report["seconds"] < 10
    assert scene.store.instances(model) == set()
