"""The last words of a stop: who is left is cut, softly; for who does not leave others speak."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.lifecycle.admission import CutReason, Gate


#: So many are cut before whatever else there is has a turn: thousands take a second to leave.
SLICE = 256


@attrs.frozen(eq=False)
class Farewells:
    """Of everybody who is behind two gates."""

    _http: Gate
    _work: Gate
    #: Called, in order, when the time for farewells is over: the hard way.
    _abort: list[Callable[[], object]] = attrs.field(factory=list)

    def on_abort(self, abort: Callable[[], object]) -> Callable[[], None]:
        """Call this when the time is over and somebody is there; returns what takes it back."""
        self._abort.append(abort)
        return partial(self._abort.remove, abort)

    async def say(self, reason: Callable[[], CutReason], seconds: float) -> None:
        """Cut softly, and leave so much time for a last word."""
        now = trio.current_time()
        # The front first: it ends its own work, and what its client hears is the farewell of
        # the front, not the error of an endpoint that was cut in the same instant.
        await cut_all(self._http, reason)
        with trio.CancelScope(deadline=now + seconds / 2):
            await self._http.wait_empty()
        await cut_all(self._work, reason)
        with trio.CancelScope(deadline=now + seconds):
            await self.over()

    def abort(self) -> None:
        """Who is still there does not leave by itself, and has said nothing."""
        for gate in (self._http, self._work):  # before their connections go
            gate.abort_all()
        for abort in self._abort:
            abort()

    async def over(self) -> None:
        """Wait until nobody is left."""
        await self._http.wait_empty()
        await self._work.wait_empty()


async def cut_all(gate: Gate, reason: Callable[[], CutReason]) -> None:
    """Cut everybody behind the gate softly, a slice at a time."""
    inside = gate.admissions()
    for start in range(0, len(inside), SLICE):
        for admission in inside[start : start + SLICE]:
            admission.cut(reason())
        await trio.lowlevel.checkpoint()
