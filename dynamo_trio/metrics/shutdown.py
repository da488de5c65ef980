"""How a stop goes, under the names that Dynamo's main branch gives it.

A process with endpoints tells it as ``dynamo_component_shutdown_...``, a frontend as
``dynamo_frontend_shutdown_...``: the same series, on the port that each has. They are there from
the beginning of a stop on (``remaining`` and ``inflight`` always), and are read when Prometheus
asks; the port answers to the last moment.

Dynamo's stages are these parts of a stop here:

``unregister``      the step of that name
``router_grace``    the grace period behind it
``stop_admission``  the callbacks, after which new work is refused
``in_flight``       the drain: of the HTTP front, or of the endpoints
``cleanup``         the callback of that name
``teardown``        the farewells, and what is closed behind them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dynamo_trio.lifecycle import Ending, Lifecycle, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from dynamo_trio.lifecycle import ShutdownReport, Stage

#: Dynamo's word for each stage -> the stages of ours that it is made of.
STAGES = {
    "unregister": ("unregister",),
    "router_grace": ("grace",),
    "stop_admission": ("drain_callback", "pre_shutdown_callback"),
    "in_flight": ("draining", "http_drain"),
    "cleanup": ("cleanup_callback",),
    "teardown": ("http_farewells", "stopping", "engine_recall", "engine_close"),
}
#: Steps that run within a phase, and are told on their own.
WITHIN = {
    "grace": ("unregister",),
    "draining": (
        *("http_drain", "http_farewells"),
        *("unregister", "drain_callback", "pre_shutdown_callback", "cleanup_callback"),
    ),
}
#: The worst word of several parts. Dynamo has none for a step that raised: it is ours.
_WORST = ("failed", "cancelled", "timed_out", "completed", "skipped")


@attrs.frozen
class StageTime:
    """One of Dynamo's stages, as it went here."""

    stage: str
    reason: str
    seconds: float


def stage_times(report: ShutdownReport) -> Iterator[StageTime]:
    """The stages that have ended, in Dynamo's words.

    One in which this process has nothing to do is *skipped*, and is told once the stop is over.
    """
    ours = {stage.name: stage for stage in (*report.phases, *report.steps)}
    is_over = report.phase == Phase.STOPPED.label
    for name, parts in STAGES.items():
        found = [ours[part] for part in parts if part in ours]
        if any(stage.ending is None for stage in found):
            continue
        if found:
            yield StageTime(name, _reason(found), sum(_own(stage, ours) for stage in found))
        elif is_over:
            yield StageTime(name, Ending.SKIPPED.value, 0.0)


def _reason(stages: Sequence[Stage]) -> str:
    words = [one.ending.value for one in stages if one.ending]
    return min(words, key=_WORST.index)


def _own(stage: Stage, ours: dict[str, Stage]) -> float:
    """Seconds of a stage, without those that are told of what runs within it."""
    assert stage.seconds is not None
    end = stage.began + stage.seconds
    inner = [ours[name] for name in WITHIN.get(stage.name, ()) if name in ours]
    spent = [one.seconds or 0.0 for one in inner if stage.began <= one.began < end]
    return max(0.0, stage.seconds - sum(spent))


class ShutdownMetrics(Collector):
    """Read when Prometheus asks. ``prefix`` is what all names of the process begin with."""

    #: What is meant by the seconds that remain.
    LEFT = "Seconds left to the whole stop; infinite without a limit, or while none is under way"

    def __init__(self, lifecycle: Lifecycle, prefix: str = "dynamo_component") -> None:
        self._lifecycle = lifecycle
        self._prefix = f"{prefix}_shutdown"

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("remaining_seconds", self.LEFT, self._remaining())
        yield self._gauge(
            "inflight_requests", "Requests that a stop would wait for, or waits for", self._inside()
        )
        yield self._stages()

    def _remaining(self) -> float:
        return self._lifecycle.remaining_in_all()

    def _inside(self) -> int:
        return len(self._lifecycle.in_flight())

    def _stages(self) -> Metric:
        stages = GaugeMetricFamily(
            f"{self._prefix}_stage_seconds",
            "Seconds that a stage of the stop took, and why it ended",
            labels=("stage", "reason"),
        )
        if self._lifecycle.stopping:
            for one in stage_times(self._lifecycle.report()):
                stages.add_metric([one.stage, one.reason], one.seconds)
        return stages

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)


class FrontShutdownMetrics(ShutdownMetrics):
    """That of a process with an HTTP front, whose stop has a limit without a total, too.

    What is left is the time until the requests that run now are cut, and nothing behind that: what
    a stop does then has limits of its own, and a time that remains must not rise. The requests
    are those of the front, each of which may have another behind it in the same process.
    """

    LEFT = (
        "Seconds until the requests that run are cut, 0 from then on, or once there are none;"
        " infinite while no stop is under way"
    )

    def __init__(self, lifecycle: Lifecycle, prefix: str = "dynamo_frontend") -> None:
        super().__init__(lifecycle, prefix)

    def _remaining(self) -> float:
        if self._is_drained():
            return 0.0
        return min(self._lifecycle.until_cut(), self._lifecycle.remaining_in_all())

    def _is_drained(self) -> bool:
        steps = self._lifecycle.report().steps if self._lifecycle.stopping else ()
        return self._lifecycle.phase >= Phase.STOPPING or any(
            step.name == "http_drain" and step.ending is not None for step in steps
        )

    def _inside(self) -> int:
        return self._lifecycle.http.count
