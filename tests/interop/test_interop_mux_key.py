"""A worker that announces our own plane in its record is to NVIDIA's peers what any worker is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.interop.processes import wait_until
from tests.interop.scene import axes

if TYPE_CHECKING:
    from tests.interop.fleet import Worker
    from tests.interop.model import Model
    from tests.interop.processes import Process
    from tests.interop.scene import Scene

KEY = "dynamo_trio_mux"


def announcing(scene: Scene, model: Model, *flags: str) -> Worker:
    """A worker of ours whose record has the key."""
    worker = scene.our_worker(model, *flags)
    record = scene.store.record(model, worker.instance_id)
    assert record[KEY].endswith(f"/{worker.instance_id:x}/generate")
    assert record["transport"].keys() == ({"tcp"} if "only" not in flags else set())
    return worker


def request(model: Model) -> dict[str, Any]:
    return {
        "model": model.name,
        "token_ids": [5, 6, 7],
        "stop_conditions": {"max_tokens": 4, "ignore_eos": True},
        "sampling_options": {},
    }


def tokens(client: Process) -> int:
    """How many tokens a client has got, once its answer has ended."""
    client.wait_log('{"end":')
    said = client.said()
    return sum(len(each["item"]["token_ids"]) for each in said if "item" in each)


@axes(1)
def test_their_frontend_and_their_client(scene: Scene) -> None:
    model = scene.model()
    worker = announcing(scene, model)
    scene.their_frontend.wait_model(model, worker.process)
    assert scene.their_frontend.serves(model)
    assert tokens(scene.their_python_client(model.endpoint, request(model))) == 4
    assert worker.taken == 2


@axes(0, few=True)
def test_their_frontend_in_kv_mode(scene: Scene) -> None:
    model = scene.model()
    alone = announcing(scene, model, "--mux", "only")  # which they cannot reach, nor ask for events
    worker = announcing(scene, model)
    frontend = scene.their_own_frontend("--router-mode", "kv")
    frontend.wait_serving(model, worker)
    for _ in range(3):
        assert frontend.serves(model)
    assert alone.taken == 0
    assert worker.taken >= 3  # its KV query endpoint is asked, too


@axes(0, few=True)
def test_their_router(scene: Scene) -> None:
    model = scene.model()
    worker = announcing(scene, model)
    router = scene.their_router(model)
    client = scene.their_python_client(f"{model.namespace}.router.generate", request(model))
    assert tokens(client) == 4
    assert worker.taken >= 1  # as above
    assert router.is_running


@axes(0)
def test_a_worker_that_speaks_mux_alone_does_no_harm(scene: Scene) -> None:
    model, other = scene.model(), scene.model()
    alone = announcing(scene, model, "--mux", "only")
    worker = scene.our_worker(other)
    frontend = scene.their_frontend
    frontend.wait_model(other, worker.process)
    assert frontend.serves(other)
    assert not frontend.serves(model)  # "not ready to serve requests yet"
    # Beside one that they can reach it changes nothing either.
    reached = announcing(scene, model)
    wait_until(lambda: frontend.serves(model), "the one that can be reached", reached.process)
    assert all(frontend.serves(model) for _ in range(10))
    assert alone.taken == 0
