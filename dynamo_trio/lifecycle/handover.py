"""Who finishes and who is handed over, judged when draining begins.

Theory of operation
-------------------
*Finish* costs nobody anything if there is time. *Handing over* costs the new worker a prefill.
So ``auto`` chooses it only for work that surely cannot finish here, and only as much of it as
its peer has said it can place elsewhere. It goes one request at a time for each peer, with an
interval, for these prefills fall on the workers that are left; and early, for what is generated
here until then is generated in the time of who waits behind it.

A peer that cannot say how much it takes (Dynamo's tcp plane) gets nothing early: nobody knows
whether it would migrate a request or fail it. At the limit it gets what makes it migrate
(:meth:`~dynamo_trio.lifecycle.admission.Admission.move`).

``migrate`` asks for neither: everything that can be continued goes at once, to the peers that
cannot say too. One that can say gets no more than it takes, though; the rest of its requests
stay until it takes more, or the limit is there: what it has no place for would only fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.admission import CutReason
from dynamo_trio.lifecycle.timetable import DrainPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dynamo_trio.lifecycle.admission import Admission
    from dynamo_trio.lifecycle.prospects import Peer

#: Seconds between two requests that one peer is to place elsewhere, at most.
INTERVAL = 0.25
#: The part of the time that is left in which everything hopeless is handed over.
SHARE = 0.25


def estimate(remaining_tokens: int | None, seconds_per_token: float | None) -> float | None:
    """Seconds until a generation ends at the latest; None if it has no known end or pace."""
    if remaining_tokens is None or seconds_per_token is None:
        return None
    return remaining_tokens * seconds_per_token


def lateness(admission: Admission, left: float) -> float:
    """By how many seconds a request would miss the end; no estimate counts as in time."""
    needs = admission.prospects.needs()
    return 0.0 if needs is None else needs - left


def hopeless(admissions: Iterable[Admission], left: float) -> list[Admission]:
    """Those that can be continued elsewhere and surely not finished here, the worst first.

    Args:
        admissions: the requests in flight.
        left: seconds that remain for draining.
    """
    late = [(lateness(one, left), one) for one in admissions if one.prospects.movable]
    return [one for by, one in sorted(late, key=lambda pair: -pair[0]) if by > 0]


@attrs.define(eq=False)
class HandOver:
    """The policy at work, from the moment of the interrupt on."""

    _policy: DrainPolicy
    #: Seconds that remain for draining.
    _left: Callable[[], float]

    def begin(self, admissions: Iterable[Admission], nursery: trio.Nursery) -> None:
        """Act at once for ``migrate``; for ``auto`` begin tasks that hand over one by one."""
        if self._policy is DrainPolicy.MIGRATE:
            self._migrate(admissions, nursery)
        elif self._policy is DrainPolicy.AUTO:
            self._begin_pacing(admissions, nursery)

    def _migrate(self, admissions: Iterable[Admission], nursery: trio.Nursery) -> None:
        queues: dict[Peer, list[Admission]] = {}
        for admission in admissions:
            if admission.prospects.movable:
                if admission.peer.may_take:
                    admission.cut(CutReason.HANDOVER)
                else:
                    queues.setdefault(admission.peer, []).append(admission)
        for peer, queue in queues.items():
            nursery.start_soon(_as_places_come, peer, queue, name="hand-over")

    def _begin_pacing(self, admissions: Iterable[Admission], nursery: trio.Nursery) -> None:
        queues: dict[Peer, list[Admission]] = {}
        for admission in hopeless(admissions, self._left()):
            if admission.peer.places is not None:
                queues.setdefault(admission.peer, []).append(admission)
        for peer, queue in queues.items():
            interval = min(INTERVAL, self._left() * SHARE / len(queue))
            nursery.start_soon(self._pace, peer, queue, interval, name="hand-over")

    async def _pace(self, peer: Peer, queue: list[Admission], interval: float) -> None:
        """One request after the other. A peer that says later that it has places gets more."""
        for admission in queue:
            await peer.wait_place()
            if lateness(admission, self._left()) > 0 and admission.cut(CutReason.HANDOVER):
                await trio.sleep(interval)


async def _as_places_come(peer: Peer, queue: list[Admission]) -> None:
    for admission in queue:
        await peer.wait_place()
        admission.cut(CutReason.HANDOVER)
