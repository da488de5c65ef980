"""What ``GET /drain`` tells: how far a drain or a stop is, and who is still here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import trio

if TYPE_CHECKING:
    from dynamo_trio.lifecycle import Admission, Stage
    from dynamo_trio.runtime import DistributedRuntime
    from dynamo_trio.worker.status import WorkerStatus

#: Requests that are told of one by one, the oldest first; the others are a number.
MOST_REQUESTS = 100
#: Peers that are named.
MOST_PEERS = 32


def view(status: WorkerStatus) -> dict[str, object]:
    """The answer, to be sent as JSON. Times are seconds; null where there is none."""
    lifecycle, drain = status.lifecycle, status.drain
    inside = lifecycle.in_flight()
    return {
        "stage": status.stage,
        "state": "serving" if drain is None else drain.state.value,
        "phase": lifecycle.phase.label,
        "cause": lifecycle.cause,
        "remaining_seconds": _finite(lifecycle.remaining()) if lifecycle.stopping else None,
        "total_remaining_seconds": _finite(lifecycle.remaining_in_all()),
        "in_flight": len(inside),
        "requests": [_request(admission) for admission in inside[:MOST_REQUESTS]],
        "peers": None if status.runtime is None else _peers(status.runtime),
        "last_outcome": _last_outcome(status),
        "safe_to_delete": drain is not None and drain.safe_to_delete,
        "report": msgspec.Raw(lifecycle.report().to_json().encode())
        if lifecycle.stopping
        else None,
    }


def _request(admission: Admission) -> dict[str, object]:
    now, prospects = trio.current_time(), admission.prospects
    estimate, deadline = prospects.estimated(), _finite(prospects.deadline - now)
    ends = [seconds for seconds in (estimate, deadline) if seconds is not None]
    return {
        "request": admission.label,
        "age_seconds": round(now - admission.admitted_at, 3),
        "estimate_seconds": estimate,
        "deadline_seconds": deadline,
        "expected_end_seconds": min(ends, default=None),
        "awaited": admission.graceful,
        "movable": prospects.movable,
        "cut": admission.reason,
    }


def _peers(runtime: DistributedRuntime) -> dict[str, object]:
    known = runtime.planes.acknowledgements
    return {
        "known": known.peers,
        "unacknowledged": len(known.waiting),
        "names": known.waiting[:MOST_PEERS],
        "cannot_acknowledge": runtime.planes.has_silent_peers,
        "places": runtime.planes.places,
    }


def _last_outcome(status: WorkerStatus) -> dict[str, object] | None:
    """How what ended last has ended: a stage of the stop, or the last drain or return."""
    report = status.lifecycle.report()
    ended = [stage for stage in (*report.phases, *report.steps) if stage.ending is not None]
    if status.lifecycle.stopping and ended:
        stage = max(ended, key=_end)
        seconds = round(stage.seconds or 0.0, 3)
        return {"stage": stage.name, "outcome": stage.ending, "seconds": seconds}
    if status.drain is None or status.drain.last is None:
        return None
    last = status.drain.last
    return {"stage": "drain", "outcome": last.outcome, "seconds": round(last.seconds, 3)}


def _end(stage: Stage) -> float:
    return stage.began + (stage.seconds or 0.0)


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(max(0.0, seconds), 3)
