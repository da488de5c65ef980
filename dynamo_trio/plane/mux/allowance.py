"""How much a peer may say that leads to nothing. Pure: the time is told."""

from __future__ import annotations

from typing import Final

import attrs

#: Trifles that may come at once, and how many more each second. A peer of ours PINGs once in a
#: second, and says next to nothing else in vain.
BURST: Final = 20_000
RATE: Final = 1_000
#: Requests of which nothing was answered, likewise. A full worker refuses all that an honest
#: frontend sends, as fast as that can send it, and must not end its other streams for it.
REQUEST_RATE: Final = 5_000


@attrs.define(eq=False)
class Allowance:
    """It is spent by what leads to nothing, and grows again with time."""

    #: When it was looked at last.
    _at: float
    _rate: float = RATE
    _left: float = BURST
    _spent: int = 0

    def spend(self, total: int, now: float) -> bool:
        """So many trifles came so far. False: that is too much."""
        if total == self._spent:
            return True
        self._left = min(BURST, self._left + (now - self._at) * self._rate) - (total - self._spent)
        self._at, self._spent = now, total
        return self._left >= 0
