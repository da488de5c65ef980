"""Model cards of our worker: files by path where there is no status port, else over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.load import CHAT
from tests.interop.scene import axes
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from tests.interop.scene import Scene

MODES = ("random", "power-of-two", "least-loaded", "kv")


@axes(0)
def test_both_frontends_load_a_model_by_path_and_over_the_status_port(scene: Scene) -> None:
    ours = scene.our_frontend()
    for environ in ({"DYN_SYSTEM_PORT": "-1"}, {}):
        model = scene.model()
        worker = scene.our_worker(model, **environ)
        texts = set()
        for frontend in (ours, scene.their_frontend):
            frontend.wait_model(model, worker.process)
            answer = frontend.ask("POST", CHAT, chat(12, model=model.name))
            assert answer.is_done
            texts.add(answer.text)
        assert len(texts) == 1


@pytest.mark.parametrize("mode", MODES)
@axes(1)
def test_their_other_ways_of_routing_reach_our_workers(scene: Scene, mode: str) -> None:
    model = scene.model()
    workers = [scene.our_worker(model) for _ in range(2)]
    frontend = scene.their_own_frontend("--router-mode", mode)
    frontend.wait_serving(model, *workers)
    answers = [frontend.ask("POST", CHAT, chat(4, model=model.name)) for _ in range(4)]
    assert all(answer.is_done for answer in answers)
    assert len({answer.text for answer in answers}) == 1
