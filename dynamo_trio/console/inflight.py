"""The answer to "what is it waiting for?" while a process stops."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Longest list that a person reads.
SHOWN = 10


@frozen
class InFlight:
    """One admitted request that is still running."""

    label: str
    #: Seconds since it was admitted.
    age: float
    #: Seconds that it will still take, if that can be estimated.
    remaining: float | None = None

    def __str__(self) -> str:
        rest = "" if self.remaining is None else f", about {self.remaining:.1f} s to go"
        return f"{self.label}: running for {self.age:.1f} s{rest}"


def describe_inflight(
    running: Sequence[InFlight], *, left: float | None = None, served_on: bool = False
) -> str:
    """What is still running, the oldest first.

    ``left``: seconds until it is told to end; None or inf: nobody knows. ``served_on``: until
    then as if nothing were, new ones too.
    """
    if not running:
        return "nothing is running any more"
    noun = "request" if len(running) == 1 else "requests"
    limit = "" if left is None or isinf(left) else f", to be ended in {left:.1f} s"
    oldest = sorted(running, key=lambda item: -item.age)
    how = " and served on" if served_on else ""
    lines = [f"{len(running)} {noun} still running{how}{limit}", *map(str, oldest[:SHOWN])]
    if len(oldest) > SHOWN:
        lines.append(f"and {len(oldest) - SHOWN} more")
    return "\n".join(lines)
