"""``/health`` and ``/live``: readiness and liveness are two different questions.

``/live`` asks only whether the event loop turns: 200 from the moment at which the
port opens until the process ends, so that no probe turns a drain into a restart.
``/health`` asks whether to send traffic here: 503 while the model loads and from the
first instant of a stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_trio.discovery import Instance

Stage = Literal["starting", "ready", "draining", "stopping"]

_MESSAGES: dict[Stage, str] = {
    "starting": "Service is starting",
    "ready": "Service is ready",
    "draining": "Service is draining",
    "stopping": "Service is stopping",
}

LIVE = msgspec.json.encode({"status": "live", "message": "Service is live"})


def health(stage: Stage, instances: Iterable[Instance]) -> tuple[int, bytes]:
    """HTTP status and JSON body of ``/health``, with Dynamo's field names."""
    known = list(instances)
    body = {
        "status": "healthy" if stage == "ready" else "not_ready",
        "stage": stage,
        "message": _MESSAGES[stage],
        "endpoints": sorted({str(instance.endpoint) for instance in known}),
        "instances": [_instance(instance) for instance in known],
    }
    return (200 if stage == "ready" else 503), msgspec.json.encode(body)


def _instance(instance: Instance) -> dict[str, object]:
    return {
        "namespace": instance.endpoint.namespace,
        "component": instance.endpoint.component,
        "endpoint": instance.endpoint.name,
        "instance_id": instance.instance_id,
        "transport": dict(instance.transports),
    }
