"""What is known of a stop while it runs: its stages, its requests, its errors."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.admission import Admission, Gate, Outcome
from dynamo_trio.lifecycle.journal import Journal, Stage
from dynamo_trio.lifecycle.report import NO_CAUSE, ShutdownReport, summary
from dynamo_trio.lifecycle.track import PhaseTrack

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

logger = logging.getLogger("dynamo_trio.lifecycle")

#: Of those who are left so many are named.
MOST_NAMES = 8
#: Steps of the stop that do nothing but wait for requests.
WAITS_FOR_REQUESTS = frozenset({"http_drain", "http_farewells"})


def counted(things: Collection[object], noun: str) -> str:
    """How many of them there are, in words."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def listed(admissions: Sequence[Admission]) -> str:
    """These requests in words, the first few by name."""
    labels = [admission.label for admission in admissions]
    endpoints = {label.rpartition(" ")[0] for label in labels}
    shown = ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
    return f"{counted(labels, 'request')} of {counted(endpoints, 'endpoint')} in flight: {shown}"


@attrs.frozen
class _AtGate:
    """Who had left a gate, and who was inside."""

    name: str
    tally: dict[Outcome, int]
    unconfirmed: int
    #: Of whom nobody has said how they end.
    untold: int


@attrs.frozen
class _Moment:
    """What can change in a stop, as it was at one instant.

    It is taken for each request that leaves: so it costs the same however many are inside.
    """

    phase: str
    phases: tuple[Stage, ...]
    steps: tuple[Stage, ...]
    gates: tuple[_AtGate, ...]
    #: The first of those who are left, by name, and how many there are besides.
    names: tuple[str, ...]
    more: int
    errors: tuple[BaseException, ...]


@attrs.define(eq=False)
class Record:
    """Collects, and keeps ready what a report is made of, to be read at any instant.

    That is a frozen value, which is replaced after each change. So a signal handler or the
    watchdog's thread can read it while the loop hangs, and needs no lock.
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
    _latest: _Moment = attrs.field(init=False)
    # Gates of probes behind which somebody is, of which no stop knows but by this.
    _probed: dict[Gate, None] = attrs.field(init=False, factory=dict)
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

    def watch_probes(self, gate: Gate) -> None:
        """Name this gate as left while somebody is behind it, who is no work and no request."""
        gate.changed = partial(self._note_probe, gate)

    def _note_probe(self, gate: Gate) -> None:
        if gate.count:
            self._probed[gate] = None
        else:
            self._probed.pop(gate, None)
        if self.cause is not None:
            self.publish()

    def name_probes(self) -> None:
        """The phases are over: say which probes have not ended, for the process cannot before."""
        if self._probed:
            logger.warning("not before these end: %s", ", ".join(self._probes()))

    def _probes(self) -> tuple[str, ...]:
        return tuple(gate.name for gate in self._probed)

    def publish(self) -> None:
        """Renew what others read."""
        self._latest = self._moment()

    def snapshot(self) -> ShutdownReport:
        """What was published last, with the time that has passed until now."""
        if self.cause is None:  # nothing is published before a stop
            return self.report()
        return self._tell(self._latest)

    def in_flight(self) -> tuple[Admission, ...]:
        return tuple(admission for gate in self.gates for admission in gate.admissions())

    def describe_left(self) -> str:
        """Who is still here, in words."""
        # A request of the front has another one at an endpoint behind it: it is told of once.
        inside = next((gate.admissions() for gate in self.gates if gate.count), ())
        return listed(inside) if inside else "nothing is in flight"

    def exit_code(self) -> int:
        return self._exit_code(self._moment())

    def report(self) -> ShutdownReport:
        return self._tell(self._moment())

    def _moment(self) -> _Moment:
        inside, steps = sum(gate.count for gate in self.gates), self._unfinished()
        oldest = chain.from_iterable(gate.admissions(MOST_NAMES) for gate in self.gates)
        names = tuple(admission.label for admission in islice(oldest, MOST_NAMES))
        return _Moment(
            phase=self.track.phase.label,
            phases=self.track.journal.stages,
            steps=self.steps.stages,
            gates=tuple(map(_at_gate, self.gates)),
            names=steps + self._probes() + names,
            more=inside - len(names),
            errors=tuple(self.errors),
        )

    def _tell(self, at: _Moment) -> ShutdownReport:
        front, ended = at.gates[0], self._ended(at)
        return ShutdownReport(
            cause=self.cause or NO_CAUSE,
            phase=at.phase,
            exit_code=self._exit_code(at),
            seconds=self._elapsed(),
            phases=at.phases,
            steps=at.steps,
            requests=ended[front.name],
            gates=ended,
            unconfirmed=front.unconfirmed,
            served_before=self._before.get(front.name, Counter()).total(),
            inside={gate.name: gate.untold for gate in at.gates},
            leftovers=at.names,
            more_leftovers=at.more,
            errors=tuple(summary(error) for error in at.errors),
        )

    def _exit_code(self, at: _Moment) -> int:
        if at.errors:
            return 1
        ended = sum(self._ended(at).values(), Counter[Outcome]())
        untold = sum(gate.untold for gate in at.gates)
        lost = ended[Outcome.CUT] + ended[Outcome.LOST] + untold
        return self.exit_code_on_loss if self.cause is not None and lost else 0

    def _elapsed(self) -> float:
        """Seconds since the signal; 0 in a process that ends without having been told to."""
        return 0.0 if self.clock is None else self.clock.current_time() - self.began

    def _unfinished(self) -> tuple[str, ...]:
        """Steps that run, but for those that only wait for requests, which are named themselves."""
        return tuple(name for name in self.steps.running if name not in WAITS_FOR_REQUESTS)

    def _ended(self, at: _Moment) -> dict[str, Counter[Outcome]]:
        """What has become of those who left since the stop began, by gate."""
        return {
            gate.name: Counter(gate.tally) - self._before.get(gate.name, Counter())
            for gate in at.gates
        }


def _at_gate(gate: Gate) -> _AtGate:
    return _AtGate(gate.name, dict(gate.tally), gate.unconfirmed, gate.untold)
