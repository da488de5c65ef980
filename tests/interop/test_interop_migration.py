"""Two of our workers behind NVIDIA's frontend: what the loss of one costs, which is nothing."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from tests.interop.load import CHAT, Load, two_workers, wait_found
from tests.interop.scene import axes
from tests.standalone.harness import chat, finish_all, open_streams

if TYPE_CHECKING:
    from tests.interop.scene import Scene

ITL = ("--itl-ms", "10")
#: The real frontend fails what it would send to an instance that it saw leave, for so long.
TOMBSTONE = 5.0


@axes(0)
def test_a_worker_is_killed_mid_stream_and_not_a_token_is_lost_or_doubled(scene: Scene) -> None:
    model = scene.model()
    first, second = two_workers(scene, model, *ITL)
    frontend = scene.their_frontend
    body = chat(120, model=model.name, stream_options={"include_usage": True})
    undisturbed = frontend.ask("POST", CHAT, body)
    assert undisturbed.is_done

    with open_streams(frontend.port, 8, body) as streams:
        assert 0 < first.running < 8
        first.process.kill(signal.SIGKILL)
        answers = finish_all(streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 8
    assert all(answer.is_done for answer in answers)
    assert {answer.chunks[-1]["usage"]["completion_tokens"] for answer in answers} == {120}
    assert second.process.is_running


@axes(1)
def test_a_worker_that_stops_hands_its_streams_over(scene: Scene) -> None:
    model = scene.model()
    drain = {"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0.5"}
    workers = [scene.our_worker(model, *ITL, **drain) for _ in range(2)]
    frontend = scene.their_frontend
    frontend.wait_model(model, *(worker.process for worker in workers))
    body = chat(200, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)

    with open_streams(frontend.port, 6, body) as streams:
        leaving = max(workers, key=lambda worker: worker.running)
        assert leaving.running > 0
        leaving.process.kill(signal.SIGTERM)
        answers = finish_all(streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 6
    assert all(answer.is_done for answer in answers)
    assert leaving.process.end() == 0


# --- registrations that come and go --------------------------------------------------------------


@axes(1)
def test_no_request_fails_while_a_registration_is_lost_and_heals(scene: Scene) -> None:
    model = scene.model()
    first, _ = two_workers(scene, model)
    load = Load(scene.their_frontend, model)
    with load.running():
        scene.store.lose(model, first.instance_id)
        lost = time.monotonic()
        assert first.instance_id not in scene.store.instances(model)
        wait_found(scene, model, first)
        assert time.monotonic() - lost > TOMBSTONE
    load.check()


@axes(0)
def test_no_request_fails_when_an_instance_is_withdrawn_and_put_back(scene: Scene) -> None:
    model = scene.model()
    first, _ = two_workers(scene, model)
    load = Load(scene.their_frontend, model)
    with load.running():
        assert first.tell("leave").status == 200
        assert first.instance_id not in scene.store.instances(model)
        first.tell("come_back")
        wait_found(scene, model, first)
    load.check()
