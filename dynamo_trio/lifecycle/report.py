"""What a stop leaves behind: a value, and the one line of JSON made of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.lifecycle.admission import Outcome
from dynamo_trio.lifecycle.phases import Ending

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.lifecycle.journal import Stage

#: Bytes of a report, at most: with the end of its line still below the 4096 that a pipe takes in
#: one piece, and that Kubernetes keeps of a termination message.
LONGEST_REPORT = 4094
#: The cause of a stop that nobody has begun.
NO_CAUSE = "none"
#: The outcome of what has not ended.
UNFINISHED = "unfinished"
#: How steps end, the worst first.
_WORST = (
    *(UNFINISHED, Ending.FAILED, Ending.TIMED_OUT, Ending.CANCELLED),
    *(Ending.COMPLETED, Ending.SKIPPED),
)


@attrs.frozen
class Room:
    """What a report has room for. Lengths are bytes of JSON."""

    #: Of those who were left so many are named; the rest is a number.
    names: int = 8
    longest_name: int = 120
    #: The same for errors, which are fewer and have more to say.
    errors: int = 4
    longest_error: int = 240
    #: Temporary folders are a step each.
    steps: int = 12

    def less(self) -> Room:
        """Three quarters of it. Never nothing, so that this ends somewhere."""
        return Room(*(max(1, number * 3 // 4) for number in attrs.astuple(self)))


@attrs.frozen(kw_only=True)
class ShutdownReport:
    """How a process stopped. A value: safe to hand to another thread."""

    cause: str
    phase: str
    exit_code: int
    #: Seconds from the signal to this report.
    seconds: float = 0.0
    phases: tuple[Stage, ...] = ()
    steps: tuple[Stage, ...] = ()
    #: Requests that ended after the stop began, by what became of them, at the gate by
    #: which the process's clients come in.
    requests: Mapping[Outcome, int] = attrs.field(factory=dict)
    #: The same for each gate.
    gates: Mapping[str, Mapping[Outcome, int]] = attrs.field(factory=dict)
    #: Hand-overs that no peer has acknowledged; part of those handed over.
    unconfirmed: int = 0
    #: Requests that had ended before.
    served_before: int = 0
    #: Requests that are still inside, by gate.
    inside: Mapping[str, int] = attrs.field(factory=dict)
    #: What is still there, by name: steps of the stop that have not ended, and requests.
    leftovers: tuple[str, ...] = ()
    #: How many requests are there besides.
    more_leftovers: int = 0
    errors: tuple[str, ...] = ()

    def at_exit(self) -> ShutdownReport:
        """The report of a process that ends now: a request that is still inside is lost."""
        gates = {name: self._with_lost(name, counts) for name, counts in self.gates.items()}
        front = next(iter(gates), None)
        requests = self.requests if front is None else gates[front]
        return attrs.evolve(self, gates=gates, requests=requests, inside={})

    def _with_lost(self, gate: str, counts: Mapping[Outcome, int]) -> Mapping[Outcome, int]:
        left = self.inside.get(gate, 0)
        return {**counts, Outcome.LOST: counts.get(Outcome.LOST, 0) + left} if left else counts

    def to_json(self) -> str:
        """The report as one line of at most :data:`LONGEST_REPORT` bytes."""
        room = Room()
        while len(line := self._line(room)) > LONGEST_REPORT and room != room.less():
            room = room.less()
        return line

    def _line(self, room: Room) -> str:
        return json.dumps(self._fields(room), separators=(",", ":"))

    def _fields(self, room: Room) -> dict[str, object]:
        return {
            "event": "shutdown_report",
            "cause": _clip(self.cause, room.longest_error),
            "exit_code": self.exit_code,
            "phase": self.phase,
            "seconds": round(self.seconds, 3),
            "phases": [self._stage("phase", stage, room) for stage in self.phases],
            "steps": self._steps(room),
            "requests": _counts(self.requests) | {"unconfirmed": self.unconfirmed},
            "gates": {name: _counts(counts) for name, counts in self.gates.items()},
            "served_before": self.served_before,
            "leftovers": _names(self.leftovers, room.names, room.longest_name, self.more_leftovers),
            "errors": _names(self.errors, room.errors, room.longest_error),
        }

    def _steps(self, room: Room) -> list[dict[str, object]]:
        """The first of them one by one, the rest as one, with the worst that was among them."""
        shown = [self._stage("step", stage, room) for stage in self.steps[: room.steps]]
        if rest := self.steps[room.steps :]:
            seconds = round(sum(map(self._seconds, rest)), 3)
            outcome = min(map(_outcome, rest), key=_WORST.index)
            shown.append({"step": f"and {len(rest)} more", "outcome": outcome, "seconds": seconds})
        return shown

    def _stage(self, kind: str, stage: Stage, room: Room) -> dict[str, object]:
        fields: dict[str, object] = {
            kind: _clip(stage.name, room.longest_name),
            "outcome": _outcome(stage),
            "seconds": round(self._seconds(stage), 3),
        }
        detail = _clip(stage.detail, room.longest_error)
        return fields | ({"detail": detail} if stage.detail else {})

    def _seconds(self, stage: Stage) -> float:
        """What it took; of one that still runs, its time so far."""
        return max(self.seconds - stage.began, 0.0) if stage.seconds is None else stage.seconds


def summary(exc: BaseException) -> str:
    """An exception in one line; of a group, what it holds."""
    if isinstance(exc, BaseExceptionGroup):
        return "; ".join(summary(inner) for inner in exc.exceptions)
    text = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {text[0]}" if text else type(exc).__name__


def _counts(counts: Mapping[Outcome, int]) -> dict[str, int]:
    return {outcome.value: counts.get(outcome, 0) for outcome in Outcome}


def _outcome(stage: Stage) -> str:
    return UNFINISHED if stage.ending is None else stage.ending.value


def _clip(text: str, longest: int) -> str:
    """Text that is too long ends between two words: half a number would be another number."""
    if len(text) <= longest and _size(text) <= longest:
        return text
    beginning = text[: max(longest - 4, 0)]
    while _size(beginning) > max(longest - 4, 0):
        beginning = beginning[:-1]
    return f"{beginning.rpartition(' ')[0] or beginning} ..."


def _size(text: str) -> int:
    """Bytes of JSON, which writes most letters of most languages as six."""
    return len(json.dumps(text)) - 2


def _names(names: tuple[str, ...], most: int, longest: int, more: int = 0) -> list[str]:
    shown = [_clip(name, longest) for name in names[:most]]
    hidden = len(names) - len(shown) + more
    return [*shown, f"and {hidden} more"] if hidden else shown
