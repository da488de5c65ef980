"""Whose turn it is to send on an HTTP/2 connection: each stream's that has something, in order.

hypercorn asks a tree of priorities (RFC 7540, 5.3). There a new stream begins at the place of
whoever had the last turn, that is before all who wait for theirs: while short answers keep coming,
a long one beside them gets no turn at all. RFC 9113 has given the priorities up, and lets a server
take no notice of them. So a client's wishes change nothing here, and make nothing be kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs
from priority.priority import DeadlockError, DuplicateStreamError, MissingStreamError

if TYPE_CHECKING:
    from typing import Self


@attrs.define(eq=False)
class Turns:
    """Stands in for ``priority.PriorityTree``, with its exceptions.

    Invariant: between two turns of a stream that has something to send all others that have
    something get one.
    """

    _streams: set[int] = attrs.field(factory=set)
    #: Who has something to send; the first one is next.
    _line: OrderedDict[int, None] = attrs.field(factory=OrderedDict)

    def insert_stream(self, stream_id: int) -> None:
        """A new stream, with something to send. Raises: ``DuplicateStreamError``."""
        if stream_id in self._streams:
            raise DuplicateStreamError(f"stream {stream_id} is known")
        self._streams.add(stream_id)
        self._line[stream_id] = None

    def remove_stream(self, stream_id: int) -> None:
        """It is over. Raises: ``MissingStreamError``."""
        self._check(stream_id)
        self._streams.remove(stream_id)
        self._line.pop(stream_id, None)

    def block(self, stream_id: int) -> None:
        """It has nothing to send, or no window. Raises: ``MissingStreamError``."""
        self._check(stream_id)
        self._line.pop(stream_id, None)

    def unblock(self, stream_id: int) -> None:
        """It has something to send; its turn comes. Raises: ``MissingStreamError``."""
        self._check(stream_id)
        self._line.setdefault(stream_id)

    def reprioritize(self, stream_id: int, **wishes: object) -> None:
        """What a client wishes."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        """Whose turn it is. Raises: ``DeadlockError``: nobody has anything to send."""
        if not self._line:
            raise DeadlockError("nobody has anything to send")
        stream_id = next(iter(self._line))
        self._line.move_to_end(stream_id)
        return stream_id

    def _check(self, stream_id: int) -> None:
        if stream_id not in self._streams:
            raise MissingStreamError(f"stream {stream_id} is not known")
