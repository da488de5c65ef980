"""Three workers of ours behind NVIDIA's frontend are restarted in turn, and nobody notices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.interop.load import CHAT
from tests.interop.processes import wait_until
from tests.interop.scene import DIAGONALS, axes
from tests.standalone.harness import chat
from tests.standalone.steady import Rolling, SteadyStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.interop.fleet import Frontend, Worker
    from tests.interop.model import Model
    from tests.interop.scene import Scene

#: 10 ms a token.
PACE = ("--itl-ms", "10")
#: Nothing is set: 5 s of grace, and all the time that requests need.
PATIENT = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "5"}
#: An operator who has no patience.
HASTY = {
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "1",
}


def wait_known(frontend: Frontend, model: Model, worker: Worker) -> None:
    """Wait until it takes requests that come through the frontend."""
    worker.process.wait_log("serving dyn://")

    def takes() -> bool:
        frontend.ask("POST", CHAT, chat(1, model=model.name))
        return worker.taken > 0

    frontend.wait_model(model, worker.process)
    wait_until(takes, "its share of the requests", worker.process)


def stop(worker: Worker) -> dict[str, Any]:
    """Stop it as Kubernetes would; its shutdown report."""
    assert worker.process.stop() == 0
    report = worker.process.said()[-1]
    assert report["errors"] == report["leftovers"] == []
    return report


@attrs.frozen
class Load:
    """So many streams at any time, of these lengths, for so long."""

    streams: int
    lengths: Sequence[int]
    seconds: float


def roll(scene: Scene, frontend: Frontend, environ: dict[str, str], load: Load) -> Rolling[Worker]:
    """Restart three workers under this load, of which no stream may fail."""
    model = scene.model()
    new = partial(scene.our_worker, model, *PACE, **environ)
    rolling = Rolling(new, partial(wait_known, frontend, model), stop)
    rolling.start(3)
    steady = SteadyStreams(frontend.port, model.name, load.lengths)
    steady.learn()
    with steady.running(load.streams):
        rolling.restart_for(load.seconds)
    print(steady, rolling, sep="\n")
    steady.check(at_least=load.streams)
    for what in ("cut", "failed", "lost"):
        assert rolling.requests(what) == 0
    # Over Dynamo's plane nobody can say that a request has arrived elsewhere.
    assert rolling.requests("unconfirmed") == rolling.requests("handed_over")
    return rolling


@axes(0, few=True)
def test_a_hasty_rolling_restart_costs_no_stream(scene: Scene) -> None:
    rolling = roll(scene, scene.their_frontend, HASTY, Load(9, (20, 330, 80), 0))
    assert rolling.requests("handed_over") > 0  # that was needed
    assert rolling.requests("finished") > 0


MINUTE = Load(20, (30, 100, 600, 250), 60)
each_store = pytest.mark.parametrize("scene", DIAGONALS[0], ids="-".join, indirect=True)


@pytest.mark.soak
@pytest.mark.timeout(300)
@each_store
@pytest.mark.parametrize("pace", ["patient", "hasty"])
def test_a_minute_of_rolling_restarts_under_twenty_streams(scene: Scene, pace: str) -> None:
    environ = HASTY if pace == "hasty" else PATIENT
    rolling = roll(scene, scene.their_frontend, environ, MINUTE)
    assert (rolling.requests("handed_over") > 0) == (pace == "hasty")


@pytest.mark.soak
@pytest.mark.timeout(300)
@each_store
def test_with_patience_nothing_needs_to_migrate(scene: Scene) -> None:
    frontend = scene.their_own_frontend("--migration-limit", "0")
    rolling = roll(scene, frontend, PATIENT, MINUTE)
    assert rolling.requests("handed_over") == 0
