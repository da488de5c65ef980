"""Streams whose peer takes nothing, though it lives and answers. Pure.

They are looked at once in a while, all of a connection together. Looks are counted, not seconds,
so that time in which this process did not run is nobody's fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Looks in a row, one interval apart, after which a stream counts as starving.
LOOKS: Final = 8
#: Streams in a row that starve before their peer has granted anything to another: then it is not
#: the reader of one answer that is slow.
MAX_STARVED: Final = 16


@attrs.define(eq=False)
class Starving:
    """The streams of one connection."""

    #: By stream: the credit that it was given in all, and in how many looks it lacked more.
    _seen: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    #: Grants of the peer so far, on any stream, and looks in a row without a new one.
    _grants: int = 0
    _quiet: int = 0
    #: Streams that starved while the peer granted nothing to any.
    starved: int = 0

    def look(self, lacking: Mapping[int, int], grants: int) -> list[int]:
        """Which have lacked credit all the time? ``lacking``: those that lack it now, and all
        that each was ever given. ``grants``: how often the peer has granted any."""
        starving = self._look(lacking)
        self._quiet = self._quiet + 1 if grants == self._grants else 0
        self._grants = grants
        if self._quiet < LOOKS:
            self.starved = 0
        else:
            self.starved += len(starving)
        return starving

    def _look(self, lacking: Mapping[int, int]) -> list[int]:
        seen = {}
        for sid, given in lacking.items():
            before, looks = self._seen.get(sid, (given, 0))
            seen[sid] = given, (looks + 1 if before == given else 1)
        self._seen = seen
        return [sid for sid, (_, looks) in seen.items() if looks > LOOKS]
