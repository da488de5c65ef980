"""Finds stop strings in text that arrives in pieces.

The match is the one that *ends* first; of two that end together, the longer. That is
what a reader of the text, character by character, would find, so the result does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopScanner:
    """Lets text through up to the first stop string, which it swallows.

    Held back is only what may be the beginning of a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        # Invariant: the longest suffix of the text so far that is a proper prefix of a
        # stop string. A match can begin nowhere before it.
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text that may be shown now. After a match: nothing."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if found := self._find(buffer):
            start, self.matched = found
            self._held = ""
            return buffer[:start]
        keep = self._tail(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        places = ((buffer.find(stop), stop) for stop in self._stops)
        ends = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        return min(ends)[1:] if ends else None

    def _tail(self, buffer: str) -> int:
        return max((_overlap(buffer, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
