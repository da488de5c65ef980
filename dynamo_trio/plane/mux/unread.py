"""How many bytes the streams of a connection were given and have not consumed.

Credit bounds each stream, but generously, since it counts items: thousands of streams with large
items that nobody reads would be far too much together. Small items are not counted; what they
take is bounded by the credit well enough.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

#: Bytes below which an item is not counted.
SMALL: Final = 4096


@attrs.define(eq=False)
class Unread:
    """All streams of a connection together."""

    limit: int
    size: int = 0

    @property
    def is_too_much(self) -> bool:
        """Is it above the limit?"""
        return self.size > self.limit


@attrs.define(eq=False)
class Share:
    """What one stream has of it. Its owner says in items and tokens what was consumed."""

    _all: Unread
    #: Items and tokens that have come. Its owner adds the tokens.
    came: int = 0
    _consumed: int = 0
    #: Large items that are not consumed: the how manieth each is, and its size.
    _large: deque[tuple[int, int]] = attrs.field(factory=deque)

    def item(self, size: int) -> bool:
        """An item has come. False: it is too much."""
        self.came += 1
        if size < SMALL:
            return True
        self._large.append((self.came, size))
        self._all.size += size
        return not self._all.is_too_much

    def consume(self, items: int) -> None:
        """So many items and tokens were consumed."""
        self._consumed += items
        while self._large and self._large[0][0] <= self._consumed:
            self._all.size -= self._large.popleft()[1]

    def clear(self) -> None:
        """The stream is over, and what it was given is gone."""
        self.consume(self.came)
