"""NVIDIA's frontend in front of our worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.interop.scene import axes
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from tests.interop.scene import Scene


@axes(0)
def test_chat_and_completions_streaming_and_unary(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model)
    frontend = scene.their_frontend
    frontend.wait_model(model, worker)
    streamed = frontend.ask("POST", "/v1/chat/completions", chat(8, model=model.name))
    print(streamed.body.decode())
    u = frontend.ask("POST", "/v1/chat/completions", chat(8, model=model.name, stream=False))
    print(u.body.decode())
    assert 0
