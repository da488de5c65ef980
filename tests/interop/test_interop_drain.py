"""A worker of ours is drained and resumed behind NVIDIA's frontend, and no request fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.load import Load, two_workers
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import ask

if TYPE_CHECKING:
    from tests.interop.scene import Scene


@pytest.mark.soak  # the shorter one is in test_interop_migration.py
@axes(0)
def test_a_worker_that_is_drained_and_resumed_costs_no_request(scene: Scene) -> None:
    model = scene.model()
    staying, leaving = two_workers(scene, model)
    load = Load(scene.their_frontend, model)
    with load.running():
        drained = ask(leaving.port, "POST", "/drain?wait=true")
        assert (drained.status, drained.json()["safe_to_delete"]) == (200, True)
        before, others = leaving.taken, staying.taken
        wait_until(lambda: staying.taken > others + 20, "the other one serves", staying.process)
        assert leaving.taken == before  # nothing came after it was said to be safe
        assert ask(leaving.port, "GET", "/drain").json()["safe_to_delete"] is True
        resumed = ask(leaving.port, "POST", "/resume?wait=true")
        assert (resumed.status, resumed.json()["state"]) == (200, "serving")
        wait_until(lambda: leaving.taken > before + 20, "it serves again", leaving.process)
    load.check()
    assert leaving.process.stop() == 0
