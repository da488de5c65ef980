"""The phases of a process and the only moves between them, as one table.

A process lives through its phases in order and never goes back. Each row of
:data:`MOVES` says how a phase may end and where it leads. :func:`path` is the walk
along the table, :func:`diagram` its picture.
"""

from __future__ import annotations

import enum

import attrs


class Phase(enum.IntEnum):
    """Where a process stands between its start and its end."""

    SERVING = 0
    #: Withdrawn from discovery, but still served: routers need a moment to notice.
    GRACE = 1
    #: What was admitted is finished or handed over; new work is refused.
    DRAINING = 2
    #: What is left is cut, and says farewell.
    STOPPING = 3
    #: Nobody is left. Engine, connections and services are closed by their nurseries.
    STOPPED = 4

    @property
    def label(self) -> str:
        """The name as it stands in logs and reports."""
        return self.name.lower()


class Ending(enum.StrEnum):
    """How a phase, or one step of it, came to its end."""

    COMPLETED = "completed"  #: its work was done
    SKIPPED = "skipped"  #: it was passed without being begun
    TIMED_OUT = "timed_out"  #: its own limit, or the shared budget, ran out
    CANCELLED = "cancelled"  #: escalated, or a fatal error left no room for it
    FAILED = "failed"  #: it raised; logged and passed (steps only, never a phase)


@attrs.frozen
class Move:
    """One legal move. ``when`` says in words what causes each ending of ``source``."""

    source: Phase
    target: Phase
    when: dict[Ending, str]


#: Every legal move. A phase may be passed without being begun: that is the ending *skipped*.
MOVES = (
    Move(
        Phase.SERVING,
        Phase.GRACE,
        {
            Ending.COMPLETED: "stop requested, or fatal error",
            Ending.CANCELLED: "cancelled from outside",
        },
    ),
    Move(
        Phase.GRACE,
        Phase.DRAINING,
        {
            Ending.COMPLETED: "every peer has acknowledged, nothing in flight",
            Ending.TIMED_OUT: "grace period over",
            Ending.CANCELLED: "escalated, or fatal error",
            Ending.SKIPPED: "an HTTP front drains first",
        },
    ),
    Move(
        Phase.DRAINING,
        Phase.STOPPING,
        {
            Ending.COMPLETED: "nothing in flight",
            Ending.TIMED_OUT: "drain limit or budget reached",
            Ending.CANCELLED: "escalated",
            Ending.SKIPPED: "escalated before it began, or a fast exit",
        },
    ),
    Move(
        Phase.STOPPING,
        Phase.STOPPED,
        {
            Ending.COMPLETED: "every farewell said",
            Ending.TIMED_OUT: "farewell limit reached",
            Ending.CANCELLED: "cancelled from outside",
            Ending.SKIPPED: "cancelled from outside before it began, or a fast exit",
        },
    ),
)

_NEXT = {move.source: move for move in MOVES}


def path(source: Phase, target: Phase) -> tuple[Phase, ...]:
    """The phases entered on the way from ``source`` to ``target``, ``target`` last.

    Raises:
        ValueError: the table has no way there; phases only go forward.
    """
    entered: list[Phase] = []
    at = source
    while at != target:
        if at not in _NEXT:
            raise ValueError(f"no way from {source.name} to {target.name}: phases only go forward")
        at = _NEXT[at].target
        entered.append(at)
    return tuple(entered)


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.SERVING.name}"]
    for move in MOVES:
        lines += [
            f"    {move.source.name} --> {move.target.name}: {ending} ({cause})"
            for ending, cause in move.when.items()
        ]
    lines.append(f"    {Phase.STOPPED.name} --> [*]")
    return "\n".join(lines) + "\n"
