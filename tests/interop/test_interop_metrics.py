"""The metrics of NVIDIA's frontend and of ours, after the same request to the same worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from tests.interop.load import CHAT
from tests.interop.scene import axes
from tests.standalone.harness import ask, chat

if TYPE_CHECKING:
    from tests.interop.fleet import Frontend
    from tests.interop.scene import Scene

#: What ours does not tell: of Tokio, of KV routing, of media, of the parts of tokenising.
NOT_OURS = (
    *("dynamo_tokio_", "dynamo_router_"),
    *(f"dynamo_component_router_{x}" for x in ("kv_", "shared_", "non_max_", "overlap_")),
    *(f"dynamo_frontend_{x}" for x in ("audio_", "image", "videos_", "detokenize_", "event_loop_")),
    *(f"dynamo_frontend_{x}" for x in ("template_", "tokenize", "worker_active_", "router_")),
)


def told(frontend: Frontend) -> dict[str, tuple[str, frozenset[str], frozenset[float]]]:
    """Name -> type, names of labels, bounds of buckets."""
    found = {}
    text = frontend.ask("GET", "/metrics").body.decode()
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels}
        bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
        found[family.name] = (family.type, frozenset(labels), frozenset(bounds))
    return found


@axes(0, few=True)
def test_what_their_frontend_tells_ours_tells_in_the_same_form(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model)
    # The shared one of theirs has seen other things, which add labels.
    theirs, ours = scene.their_own_frontend(), scene.our_frontend()
    for frontend in (theirs, ours):
        frontend.wait_model(model, mocker)
        assert ask(frontend.port, "POST", CHAT, chat(5, model=model.name)).is_done
    here, there = told(ours), told(theirs)
    expected = {name: form for name, form in there.items() if not name.startswith(NOT_OURS)}
    assert len(expected) > 30
    assert {name: here.get(name) for name in expected} == expected
