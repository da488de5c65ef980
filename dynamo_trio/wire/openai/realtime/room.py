"""A bound for what all sessions hold together."""

from __future__ import annotations

import attrs

#: Bytes.
MOST = 256 * 1024 * 1024


@attrs.define(eq=False)
class Room:
    """For what all sessions of a frontend keep of one kind, in bytes."""

    most: int = MOST
    used: int = 0

    @property
    def left(self) -> int:
        return max(0, self.most - self.used)
