"""The trace of a request that crosses from NVIDIA's processes to ours, and the other way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.interop.load import CHAT
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import ask, chat

if TYPE_CHECKING:
    from tests.interop.processes import Process
    from tests.interop.scene import Scene

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
#: NVIDIA's frontend takes a request id only if it is a UUID.
NAME = "3f0e5f5e-1b7c-4c83-9a58-000000000001"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": NAME}
JSONL = {"DYN_LOGGING_JSONL": "1", "DYN_LOG": "debug"}


def traced(process: Process, target: str) -> list[dict[str, Any]]:
    """What it has logged of the trace."""
    lines = [line for line in process.log.splitlines() if TRACE in line and line.endswith("}")]
    return [entry for line in lines if target in (entry := json.loads(line))["target"]]


@axes(0, few=True)
def test_our_frontend_in_front_of_their_worker(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model, **JSONL)
    frontend = scene.stage.fleet.our_frontend(scene.store, **JSONL)
    frontend.wait_model(model, mocker)
    assert ask(frontend.port, "POST", CHAT, chat(3, model=model.name), **HEADERS).is_done
    wait_until(lambda: bool(traced(mocker, "push_handler")), "the mocker's line", mocker)
    wait_until(lambda: bool(traced(frontend.process, "frontend")), "ours", frontend.process)
    back, front = traced(mocker, "push_handler")[0], traced(frontend.process, "frontend")[0]
    assert back["x_request_id"] == front["x_request_id"] == NAME
    assert back["request_id"] == front["request_id"]
    assert (front["parent_id"], back["parent_id"]) == (SPAN, front["span_id"])


@axes(0, few=True)
def test_their_frontend_in_front_of_our_worker(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model, **JSONL)
    frontend = scene.stage.fleet.their_frontend(scene.store, **JSONL)
    frontend.wait_model(model, worker.process)
    assert ask(frontend.port, "POST", CHAT, chat(3, model=model.name), **HEADERS).is_done
    wait_until(lambda: bool(traced(worker.process, "endpoint")), "our line", worker.process)
    back = traced(worker.process, "endpoint")[0]
    assert back["x_request_id"] == NAME
    fronts = traced(frontend.process, "")
    assert back["request_id"] in {entry["request_id"] for entry in fronts if "request_id" in entry}
    assert back["parent_id"] in {entry["span_id"] for entry in fronts}
