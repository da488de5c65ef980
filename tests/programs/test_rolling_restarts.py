"""Workers behind our frontend are restarted in turn: no stream fails, on either plane."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.programs.conftest import MODEL, Fleet, status_port
from tests.standalone.harness import Server, ask, chat, metric, wait_until
from tests.standalone.steady import CHAT, WHOLE, Rolling, SteadyStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

#: 10 ms a token.
PACE = ("--itl-ms", "10", "--system-port", "0")
#: Neither plane needs as much: over mux the grace period ends early.
GRACE: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
PLANES = {"mux": "only", "tcp": "off"}


def wait_known(frontend: Server, worker: Server) -> None:
    """Wait until it takes requests that come through the frontend."""
    worker.wait_log("serving dyn://")
    port = status_port(worker)

    def takes() -> bool:
        ask(frontend.port, "POST", CHAT, chat(1, model=MODEL))
        return metric(port, "dynamo_component_requests_total") > 0

    wait_until(takes, "its share of the requests")


def stop(worker: Server) -> dict[str, Any]:
    """Stop it as Kubernetes would; its shutdown report."""
    assert worker.stop() == 0
    report = worker.report
    assert report["errors"] == report["leftovers"] == []
    return report


@attrs.frozen
class Load:
    """So many streams at any time, of these lengths, for so long."""

    streams: int
    lengths: Sequence[int]
    seconds: float = 0


def roll(
    fleet: Fleet, plane: str, workers: int, load: Load, **environ: str
) -> tuple[SteadyStreams, Rolling[Server]]:
    """Restart so many workers in turn under this load."""
    mux = ("--mux", PLANES[plane])
    frontend = fleet.frontend(*mux)
    told: dict[str, Any] = GRACE | environ
    new = partial(fleet.worker, *PACE, *mux, ready=False, **told)
    rolling = Rolling(new, partial(wait_known, frontend), stop)
    rolling.start(workers)
    steady = SteadyStreams(frontend.port, MODEL, load.lengths)
    steady.learn()
    with steady.running(load.streams):
        rolling.restart_for(load.seconds)
    print(steady, rolling, sep="\n")
    assert rolling.requests("finished") > 0
    assert rolling.requests("lost") == rolling.requests("failed") == 0
    return steady, rolling


def check_unharmed(steady: SteadyStreams, rolling: Rolling[Server]) -> None:
    """No stream has failed, and none had to be moved."""
    steady.check(at_least=4)
    for what in ("handed_over", "cut", "cancelled"):
        assert rolling.requests(what) == 0


@pytest.mark.parametrize("plane", ["mux", pytest.param("tcp", marks=pytest.mark.soak)])
def test_a_rolling_restart_costs_no_stream(fleet: Fleet, plane: str) -> None:
    check_unharmed(*roll(fleet, plane, 2, Load(4, (20, 150, 80))))


MINUTE = Load(20, (30, 100, 600, 250), 60)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plane", ["mux", "tcp"])
def test_a_minute_of_rolling_restarts_under_twenty_streams(fleet: Fleet, plane: str) -> None:
    check_unharmed(*roll(fleet, plane, 3, MINUTE))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plane", ["mux", "tcp"])
def test_without_patience_whoever_is_cut_is_told_and_counted(fleet: Fleet, plane: str) -> None:
    steady, rolling = roll(fleet, plane, 3, MINUTE, DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="1")
    broken = {ending: count for ending, count in steady.endings.items() if ending != WHOLE}
    assert all(ending.startswith('broken: {"error":') for ending in broken)
    # Of those that were begun none can be continued by our frontend; the others can be asked for
    # again.
    moved = rolling.requests("handed_over") + rolling.requests("cut")
    assert 0 < sum(broken.values()) <= moved
