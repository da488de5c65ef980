"""Who finishes and who is handed over, judged once, when draining begins.

Pure functions over numbers; the lifecycle applies the result. *Finish* costs
nobody anything if there is time. *Handing over* costs the new worker a prefill, so
``auto`` chooses it only for work that surely cannot finish here, and only as much
of it as other workers have said they can place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.lifecycle.timetable import DrainPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence


@attrs.frozen
class Candidate:
    """What the judgement needs to know of one request in flight."""

    #: Seconds that the request still needs at most; None: nobody knows.
    estimate: float | None = None
    #: Some work cannot be continued elsewhere (guided decoding, several choices).
    movable: bool = True


def estimate(remaining_tokens: int | None, seconds_per_token: float | None) -> float | None:
    """Seconds until a generation ends at the latest; None if it has no known end or pace."""
    if remaining_tokens is None or seconds_per_token is None:
        return None
    return remaining_tokens * seconds_per_token


def choose(
    candidates: Sequence[Candidate], policy: DrainPolicy, *, left: float, places: int
) -> list[int]:
    """The indices of those to hand over now, the most hopeless first. The others run on.

    Args:
        candidates: the requests in flight.
        policy: ``auto``, ``finish`` or ``migrate``.
        left: seconds that remain for draining.
        places: how many requests the peers have said they can place elsewhere. 0, as
            within one process or towards peers that cannot say, turns ``auto`` into ``finish``.
    """
    movable = [i for i, candidate in enumerate(candidates) if candidate.movable]
    if policy is DrainPolicy.FINISH:
        return []
    if policy is DrainPolicy.MIGRATE:
        return movable
    overdue = [(_lateness(candidates[i], left), i) for i in movable]
    hopeless = sorted((late, i) for late, i in overdue if late > 0)
    return [i for _late, i in reversed(hopeless)][:places]


def _lateness(candidate: Candidate, left: float) -> float:
    """By how many seconds the request would miss the end; no estimate counts as in time."""
    return 0.0 if candidate.estimate is None else candidate.estimate - left
