"""NVIDIA's frontend and NVIDIA's mocker: what holds here is a fact about them, not about us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.interop.scene import axes
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from tests.interop.scene import Scene


@axes(0)
def test_their_frontend_serves_their_mocker(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model)
    frontend = scene.their_frontend
    frontend.wait_model(model, mocker)
    body = chat(8, model=model.name, stream_options={"include_usage": True})
    answer = frontend.ask("POST", "/v1/chat/completions", body)
    assert answer.is_done
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 8
