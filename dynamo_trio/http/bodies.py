"""How much of all clients' requests lies in memory at once.

A limit for one body says nothing of a thousand of them. Whoever reads one takes room for it, and
gives it back when the body has been made use of. The first bytes of each connection are free:
small requests find their way past any crowd of large ones, and there are no more of them than
connections. The streams of an HTTP/2 connection share its free bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import UploadsFull

if TYPE_CHECKING:
    from types import TracebackType

    from dynamo_trio.http.limits import HttpLimits


@attrs.define(eq=False)
class BodyRoom:
    """Of one server."""

    #: Bytes that are taken. Invariant: the sum over the holds that are entered.
    taken: int = 0

    def hold(self, limits: HttpLimits, free: FreeShare | None = None) -> BodyHold:
        """Room for one body, to be entered; it takes none yet. ``free``: of its connection."""
        return BodyHold(self, limits, free or FreeShare())


@attrs.define(eq=False)
class FreeShare:
    """Of one connection: what its bodies have for nothing."""

    #: Bytes. Invariant: the sum over the connection's holds that are entered.
    taken: int = 0


@attrs.define(eq=False)
class BodyHold:
    """What one body has of the room; given back at the end of the block."""

    _room: BodyRoom
    _limits: HttpLimits
    _free: FreeShare
    _taken: int = 0
    _for_nothing: int = 0

    def __enter__(self) -> BodyHold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._room.taken -= self._taken
        self._free.taken -= self._for_nothing
        self._taken = self._for_nothing = 0

    def grow(self, size: int) -> None:
        """The body has become so long.

        Raises:
            UploadsFull: there is no room for that.
        """
        more = size - self._for_nothing - self._taken
        free = max(0, min(more, self._limits.body_free - self._free.taken))
        more = max(0, more - free)
        if more and self._room.taken + more > self._limits.body_total:
            raise UploadsFull(
                "The server has no room for another large request body now"
                f" (over {self._limits.body_total} bytes are being read)."
            )
        self._for_nothing += free
        self._free.taken += free
        self._taken += more
        self._room.taken += more
