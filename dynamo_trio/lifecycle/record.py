"""What is known of a stop while it runs: its stages, its requests, its errors."""

from __future__ import annotations

from collections import Counter

import attrs
import trio

from dynamo_trio.lifecycle.admission import Admission, Gate, Outcome
from dynamo_trio.lifecycle.journal import Journal
from dynamo_trio.lifecycle.report import NO_CAUSE, ShutdownReport, summary
from dynamo_trio.lifecycle.track import PhaseTrack

#: Steps of the stop that do nothing but wait for requests.
WAITS_FOR_REQUESTS = frozenset({"http_drain", "http_farewells"})


@attrs.define(eq=False)
class Record:
    """Collects, and keeps a report ready that can be read at any instant.

    The report is a frozen value that is replaced after each change. So a signal handler
    or the watchdog's thread can read it while the loop hangs, and needs no lock.
    """

    #: Every gate, that of the process's own clients first.
    gates: tuple[Gate, ...]
    budget: trio.CancelScope
    exit_code_on_loss: int
    errors: list[BaseException] = attrs.field(factory=list)
    # Invariant: written once; not None exactly when a stop has begun.
    cause: str | None = None
    began: float = 0.0
    # Any thread may read it, also when the loop is over.
    clock: trio.abc.Clock | None = None
    track: PhaseTrack = attrs.field(init=False)
    steps: Journal = attrs.field(init=False)
    latest: ShutdownReport = attrs.field(init=False)
    # What had left each gate when the stop began.
    _before: dict[str, Counter[Outcome]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.track = PhaseTrack(Journal(self._elapsed, self.budget, self.publish))
        self.steps = Journal(self._elapsed, self.budget, self.publish)
        self.publish()

    def begin(self, cause: str, began: float) -> None:
        """A stop begins: from here on every change is published."""
        self.cause, self.began, self.clock = cause, began, trio.lowlevel.current_clock()
        for gate in self.gates:
            self._before[gate.name] = gate.tally.copy()
            gate.changed = self.publish

    def publish(self) -> None:
        """Renew the report that others read."""
        self.latest = self.report()

    def snapshot(self) -> ShutdownReport:
        """What was published last, with the time that has passed until now."""
        if self.cause is None:  # nothing is published before a stop
            return self.report()
        return attrs.evolve(self.latest, seconds=self._elapsed())

    def in_flight(self) -> tuple[Admission, ...]:
        return tuple(admission for gate in self.gates for admission in gate.admissions())

    def exit_code(self) -> int:
        if self.errors:
            return 1
        ended = sum(self._ended().values(), Counter[Outcome]())
        lost = ended[Outcome.CUT] + ended[Outcome.LOST] + len(self.in_flight())
        return self.exit_code_on_loss if self.cause is not None and lost else 0

    def report(self) -> ShutdownReport:
        front, ended = self.gates[0], self._ended()
        labels = tuple(admission.label for admission in self.in_flight())
        return ShutdownReport(
            cause=self.cause or NO_CAUSE,
            phase=self.track.phase.label,
            exit_code=self.exit_code(),
            seconds=self._elapsed(),
            phases=self.track.journal.stages,
            steps=self.steps.stages,
            requests=ended[front.name],
            gates=ended,
            unconfirmed=front.unconfirmed,
            served_before=self._before.get(front.name, Counter()).total(),
            inside={gate.name: gate.count for gate in self.gates},
            leftovers=labels + self._unfinished(),
            errors=tuple(summary(error) for error in self.errors),
        )

    def _elapsed(self) -> float:
        """Seconds since the signal; 0 in a process that ends without having been told to."""
        return 0.0 if self.clock is None else self.clock.current_time() - self.began

    def _unfinished(self) -> tuple[str, ...]:
        """Steps that run, but for those that only wait for requests, which are named themselves."""
        return tuple(name for name in self.steps.running if name not in WAITS_FOR_REQUESTS)

    def _ended(self) -> dict[str, Counter[Outcome]]:
        """What has become of those who left since the stop began, by gate."""
        return {
            gate.name: gate.tally - self._before.get(gate.name, Counter()) for gate in self.gates
        }
