"""Two of our workers behind NVIDIA's frontend: what the loss of one costs, which is nothing."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from tests.interop.load import CHAT, Load, two_workers, wait_found
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import ask, chat, finish_all, open_streams

if TYPE_CHECKING:
    from tests.interop.scene import Scene

ITL = ("--itl-ms", "10")
#: The real frontend fails what it would send to an instance that it saw leave, for so long.
TOMBSTONE = 5.0
#: In which it has heard of a change in the store, in seconds.
A_MOMENT = 0.5


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


@axes(0)
def test_a_worker_that_is_told_to_migrate_hands_over_before_its_drain(scene: Scene) -> None:
    model = scene.model()
    settings = {
        "DYN_TRIO_DRAIN_POLICY": "migrate",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
    }
    workers = [scene.our_worker(model, *ITL, **settings) for _ in range(2)]
    frontend = scene.their_frontend
    frontend.wait_model(model, *(worker.process for worker in workers))
    body = chat(300, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)

    with open_streams(frontend.port, 6, body) as streams:
        leaving = max(workers, key=lambda worker: worker.running)
        leaving.process.kill(signal.SIGTERM)
        answers = finish_all(streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 6
    assert leaving.process.end() == 0
    report = leaving.process.said()[-1]
    requests = report["requests"]
    assert requests["handed_over"] == requests["unconfirmed"] > 0
    assert requests["cut"] == requests["lost"] == requests["failed"] == 0
    phases = {phase["phase"]: phase["outcome"] for phase in report["phases"]}
    assert phases["draining"] == "completed"  # not at its limit


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


@axes(1, few=True)
def test_no_request_fails_while_a_worker_is_drained_and_when_it_serves_again(scene: Scene) -> None:
    model = scene.model()
    first, _ = two_workers(scene, model)
    load = Load(scene.their_frontend, model)
    with load.running():
        began = time.monotonic()
        drained = ask(first.port, "POST", "/drain?wait=true", {})
        assert (drained.status, drained.json()["safe_to_delete"]) == (200, True)
        assert first.instance_id not in scene.store.instances(model)
        assert ask(first.port, "POST", "/resume", {}).status in (200, 202)
        wait_found(scene, model, first)
        assert time.monotonic() - began > TOMBSTONE
    load.check()


CHECKED = (
    *("--health-check-enabled", "true", "--canary-wait-time", "0.3"),
    *("--health-check-request-timeout", "3"),
)


@axes(1, few=True)
def test_no_request_fails_while_a_worker_is_ill_and_when_it_is_well_again(scene: Scene) -> None:
    model = scene.model()
    first, second = two_workers(scene, model, *CHECKED)
    first.tell("fall_ill")
    processes = (first.process, second.process)
    found = partial(scene.store.instances, model)
    wait_until(lambda: first.instance_id not in found(), "the ill one is gone", *processes)
    lost = time.monotonic()
    load = Load(scene.their_frontend, model)
    time.sleep(A_MOMENT)  # what it still sends to the ill one waits there for the recovery
    with load.running():
        wait_until(lambda: len(load.answers) > 20, "answers of the other one", *processes)
        taken = first.taken
        wait_until(lambda: len(load.answers) > 60, "more of them", *processes)
        assert first.taken == taken
        first.tell("recover")
        wait_found(scene, model, first)
        assert time.monotonic() - lost > TOMBSTONE
    load.check()
