"""What a worker tells of itself: whether it lives, and whether it wants requests.

``/live`` asks only whether the event loop turns: 200 from the moment at which the port opens
until the process ends. ``/health`` asks whether to send requests here: 503 while the engine
loads, while the process is drained, and from the first instant of a stop. (In Dynamo 1.5.1 both
are the same, and the port closes when a stop begins; bodies have its fields, and a stage besides.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import attrs
import msgspec

from dynamo_trio.lifecycle import DrainState, Lifecycle, Phase
from dynamo_trio.worker.card_server import CardServer

if TYPE_CHECKING:
    from dynamo_trio.lifecycle import ReversibleDrain
    from dynamo_trio.runtime import DistributedRuntime, EngineRoute

Stage = Literal["loading", "ready", "grace", "draining", "stopping", "drained"]

_STAGES: dict[Phase, Stage] = {
    Phase.SERVING: "grace",  # a stop has been requested this very moment
    Phase.GRACE: "grace",
    Phase.DRAINING: "draining",
    Phase.STOPPING: "stopping",
    Phase.STOPPED: "drained",
}
#: Of a process that does not stop, but was drained and not yet found again.
_DRAIN_STAGES: dict[DrainState, Stage] = {
    DrainState.DRAINING: "draining",
    DrainState.DRAINED: "drained",
    DrainState.RESUMING: "loading",
}


@attrs.define(eq=False)
class WorkerStatus:
    """What a process with endpoints tells about itself; its runtime is attached once it is open."""

    lifecycle: Lifecycle
    #: None until it is open: then there are no endpoints, metrics and engine routes yet.
    runtime: DistributedRuntime | None = None
    cards: CardServer = attrs.field(factory=CardServer)
    #: Where other machines reach the status server; None: it has no port.
    url: str | None = None
    #: When the process began, by time.monotonic().
    began: float = attrs.field(factory=time.monotonic)

    def attach(self, runtime: DistributedRuntime) -> None:
        """The runtime is open; called once."""
        self.runtime = runtime
        runtime.status_url = self.url
        runtime.offer_card = self.cards.offer
        runtime.metrics.began = self.began

    @property
    def stage(self) -> Stage:
        """For ``/health``."""
        if self.lifecycle.stopping:
            return _STAGES[self.lifecycle.phase]
        if self.drain is not None and self.drain.state in _DRAIN_STAGES:
            return _DRAIN_STAGES[self.drain.state]
        return "ready" if self.ready else "loading"

    @property
    def ready(self) -> bool:
        """Is an endpoint served that others could find? It may have left discovery since."""
        if self.runtime is None:
            return False
        served = self.runtime.was_found and bool(self.endpoints())
        return served or self.runtime.declared_ready is True

    @property
    def drain(self) -> ReversibleDrain | None:
        """What takes the process out of routing and back; None while it has no runtime."""
        return None if self.runtime is None else self.runtime.drain

    def endpoints(self) -> dict[str, bool]:
        """Name of each endpoint -> does it want requests?"""
        return {} if self.runtime is None else self.runtime.endpoint_states()

    def engine_route(self, name: str) -> EngineRoute | None:
        """The callback registered as ``name``."""
        return None if self.runtime is None else self.runtime.engine_routes.get(name)

    def health(self) -> tuple[int, bytes]:
        """HTTP status and JSON body of ``/health``."""
        endpoints = self.endpoints()
        declared = self.runtime is None or self.runtime.declared_ready is not False
        ready = self.stage == "ready" and declared and all(endpoints.values())
        return (200 if ready else 503), self._body("ready" if ready else "notready", endpoints)

    def live(self) -> bytes:
        """JSON body of ``/live``."""
        return self._body("live", self.endpoints())

    def _body(self, status: str, endpoints: dict[str, bool]) -> bytes:
        age = time.monotonic_ns() - round(self.began * 1e9)
        body = {
            "status": status,
            "stage": self.stage,
            "uptime": {"secs": age // 10**9, "nanos": age % 10**9},
            "endpoints": {name: _word(ready) for name, ready in endpoints.items()},
        }
        return msgspec.json.encode(body)


def _word(ready: bool) -> str:
    return "ready" if ready else "notready"
