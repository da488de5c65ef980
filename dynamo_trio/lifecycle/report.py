"""What a stop leaves behind: a value, and the one line of JSON made of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.lifecycle.admission import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.lifecycle.journal import Stage

#: A report names so many of those who were left; the rest is a number. It keeps the line
#: below what a pipe takes in one piece (4096 bytes).
MOST_NAMES = 8
LONGEST_NAME = 120
#: The same for errors, which are fewer and have more to say.
MOST_ERRORS = 4
LONGEST_ERROR = 240
#: The cause of a stop that nobody has begun.
NO_CAUSE = "none"


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
    #: What is still there, by name: requests, and steps of the stop that have not ended.
    leftovers: tuple[str, ...] = ()
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
        """The report as one line."""
        return json.dumps(self._fields(), separators=(",", ":"))

    def _fields(self) -> dict[str, object]:
        return {
            "event": "shutdown_report",
            "cause": _clip(self.cause, LONGEST_ERROR),
            "exit_code": self.exit_code,
            "phase": self.phase,
            "seconds": round(self.seconds, 3),
            "phases": [self._stage("phase", stage) for stage in self.phases],
            "steps": [self._stage("step", stage) for stage in self.steps],
            "requests": _counts(self.requests) | {"unconfirmed": self.unconfirmed},
            "gates": {name: _counts(counts) for name, counts in self.gates.items()},
            "served_before": self.served_before,
            "leftovers": _names(self.leftovers, MOST_NAMES, LONGEST_NAME),
            "errors": _names(self.errors, MOST_ERRORS, LONGEST_ERROR),
        }

    def _stage(self, kind: str, stage: Stage) -> dict[str, object]:
        so_far = max(self.seconds - stage.began, 0.0)
        return {
            kind: stage.name,
            "outcome": "unfinished" if stage.ending is None else stage.ending.value,
            "seconds": round(so_far if stage.seconds is None else stage.seconds, 3),
        }


def summary(exc: BaseException) -> str:
    """An exception in one line; of a group, what it holds."""
    if isinstance(exc, BaseExceptionGroup):
        return "; ".join(summary(inner) for inner in exc.exceptions)
    text = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {text[0]}" if text else type(exc).__name__


def _counts(counts: Mapping[Outcome, int]) -> dict[str, int]:
    return {outcome.value: counts.get(outcome, 0) for outcome in Outcome}


def _clip(text: str, longest: int) -> str:
    """Text that is too long ends between two words: half a number would be another number."""
    if len(text) <= longest:
        return text
    beginning = text[: longest - 4]
    return f"{beginning.rpartition(' ')[0] or beginning} ..."


def _names(names: tuple[str, ...], most: int, longest: int) -> list[str]:
    shown = [_clip(name, longest) for name in names[:most]]
    hidden = len(names) - len(shown)
    return [*shown, f"and {hidden} more"] if hidden else shown
