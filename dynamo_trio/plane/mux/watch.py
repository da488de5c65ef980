"""The watch over the peer of a mux connection.

Theory of operation
-------------------
It looks at the peer's pulse (:mod:`~dynamo_trio.plane.mux.heartbeat`). It judges only when the
reader has nothing in hand and the kernel nothing for it: what has come and is not read yet was
said all the same, however long reading, decrypting and handing on take.

Now and then it also has the streams looked at, unless that is late: then this process did not
run, and they get one more interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.plane.mux.kernel import is_readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.plane.mux.heartbeat import Heartbeat, Verdict

#: Turns of the scheduler between the moment in which bytes leave the kernel and that in which
#: the reader has them, and some more.
READ_TURNS: Final = 4


@attrs.define(eq=False)
class Watch:
    """:meth:`run` is its task; the reader says what it does."""

    pulse: Heartbeat
    #: Below the stream, if it has one.
    _kernel: trio.socket.SocketType | None
    #: Seconds between two looks at the streams.
    _every: float
    _next: float = attrs.field(init=False)
    #: The reader has something in hand.
    _busy: bool = False
    #: How often it has begun to wait for data.
    _reads: int = 0

    def __attrs_post_init__(self) -> None:
        self._next = trio.current_time() + self._every

    def waits(self) -> None:
        """The reader has handed on all that it had, and waits for more."""
        self._busy = False
        self._reads += 1

    def hears(self, now: float) -> None:
        """It has got something."""
        self._busy = True
        self.pulse.hear(now)

    async def run(self, judge: Callable[[Verdict], None], look: Callable[[], None]) -> None:
        """Watch until cancelled. ``look`` is called when the streams are to be looked at."""
        pulse = self.pulse
        while True:
            await trio.sleep_until(min(pulse.next_look(trio.current_time()), self._next))
            now = trio.current_time()
            pulse.wake(now)
            if now >= self._next:
                in_time = now - self._next < self._every / 2
                self._next = now + self._every
                if in_time:
                    look()
            if pulse.doubts(now) and not await self._has_heard_all():
                pulse.rearm(now)
            else:
                judge(pulse.look(now))

    async def _has_heard_all(self) -> bool:
        """Has the peer said nothing that was not heard yet?"""
        reads = self._reads
        if not self._is_idle():
            return False
        for _ in range(READ_TURNS):  # the reader may have taken something from the kernel just now
            await trio.lowlevel.checkpoint()
        return self._reads == reads and self._is_idle()

    def _is_idle(self) -> bool:
        return not self._busy and (self._kernel is None or not is_readable(self._kernel))
