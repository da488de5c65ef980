"""Workers that are busy, or full, behind NVIDIA's frontend and behind ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import chat, open_streams

if TYPE_CHECKING:
    from tests.interop.fleet import Frontend
    from tests.interop.model import Model
    from tests.interop.scene import Scene

CHAT, THRESHOLDS = "/v1/chat/completions", "/busy_threshold"
makes = pytest.mark.parametrize("ours", [True, False], ids=["ours", "theirs"])


def frontend_of(scene: Scene, *flags: str, ours: bool) -> Frontend:
    return scene.our_frontend(*flags) if ours else scene.their_own_frontend(*flags)


def status(frontend: Frontend, model: Model) -> int:
    return frontend.ask("POST", CHAT, chat(2, model=model.name, stream=False)).status


def until(frontend: Frontend, model: Model, wanted: int) -> None:
    wait_until(lambda: status(frontend, model) == wanted, str(wanted), frontend.process)


@makes
@axes(0, few=True)
def test_a_worker_of_ours_with_too_much_in_its_cache_is_busy(scene: Scene, ours: bool) -> None:
    """More than 1 of 100 parts: one long request is, none is not."""
    model = scene.model()
    worker = scene.our_worker(model, "--itl-ms", "20")
    frontend = frontend_of(scene, "--active-decode-blocks-threshold", "0.01", ours=ours)
    frontend.wait_model(model, worker.process)
    assert status(frontend, model) == 200
    with open_streams(frontend.port, 1, chat(4000, model=model.name)):
        until(frontend, model, 529)
    until(frontend, model, 200)


@makes
@axes(1, few=True)
def test_thresholds_change_at_run_time(scene: Scene, ours: bool) -> None:
    model = scene.model()
    worker = scene.our_worker(model, "--itl-ms", "20")
    frontend = frontend_of(scene, ours=ours)
    frontend.wait_model(model, worker.process)
    with open_streams(frontend.port, 1, chat(4000, model=model.name)):
        assert status(frontend, model) == 200
        changed = {"model": model.name, "active_decode_blocks_threshold": 0.01}
        assert frontend.ask("POST", THRESHOLDS, changed).status == 200
        until(frontend, model, 529)
        changed["active_decode_blocks_threshold"] = 1.0
        assert frontend.ask("POST", THRESHOLDS, changed).status == 200
        until(frontend, model, 200)


@makes
@axes(0, few=True)
def test_a_mocker_with_too_much_in_its_cache_is_busy(scene: Scene, ours: bool) -> None:
    model = scene.model()
    mocker = scene.their_mocker(
        model, "--num-gpu-blocks-override", "100", "--block-size", "16", "--speedup-ratio", "0.5"
    )
    frontend = frontend_of(scene, "--active-decode-blocks-threshold", "0.02", ours=ours)
    frontend.wait_model(model, mocker)
    with open_streams(frontend.port, 1, chat(1000, model=model.name)):
        until(frontend, model, 529)
    until(frontend, model, 200)


@makes
@axes(1, few=True)
def test_a_full_worker_of_ours_refuses_what_it_has_no_room_for(scene: Scene, ours: bool) -> None:
    """One works and none waits; the frontend has nobody else to ask."""
    model = scene.model()
    worker = scene.our_worker(
        model, "--itl-ms", "20", "--engine-request-limit", "1", DYN_DYNAMO_REQUEST_QUEUE_LIMIT="0"
    )
    frontend = frontend_of(scene, ours=ours)
    frontend.wait_model(model, worker.process)
    with open_streams(frontend.port, 1, chat(4000, model=model.name)):
        refused = frontend.ask("POST", CHAT, chat(2, model=model.name, stream=False))
        assert refused.status == 529
        assert "overloaded" in str(refused.json()).lower()
    until(frontend, model, 200)
