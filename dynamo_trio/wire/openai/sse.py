"""Server-sent events: framing, and a parser that is fed bytes.

The grammar is that of the HTML standard, "Server-sent events": lines end in LF, CR
or CRLF; a blank line ends an event; ``data`` lines are joined with LF; a line that
begins with a colon is a comment; a byte order mark at the very start is skipped.
"""

from __future__ import annotations

import re

from attrs import frozen

#: OpenAI's end of a complete stream. A stream that was cut never carries it.
DONE = b"data: [DONE]\n\n"

#: A comment: nothing to any client, but bytes on the wire.
KEEP_ALIVE = b": keep-alive\n\n"

_LINE_END = re.compile(rb"\r\n|\r|\n")


def frame(payload: bytes) -> bytes:
    """One event around ``payload``, which holds no line break (JSON never does)."""
    return b"data: %b\n\n" % payload


@frozen
class Event:
    """One event as a client sees it."""

    data: str
    event: str = "message"

    @property
    def is_done(self) -> bool:
        """True for the event that ends an OpenAI stream."""
        return self.data == "[DONE]"


class EventTooLarge(ValueError):
    """An event is longer than the parser was told to hold."""


class EventParser:
    """Turns bytes, however they were split, into events.

    ``limit`` bounds in bytes what is held of an event that has not ended.
    """

    def __init__(self, *, limit: int = 16 * 2**20) -> None:
        self._limit = limit
        self._buffer = b""  # an incomplete line; after the first line never a BOM
        self._data: list[bytes] = []
        self._held = 0  # bytes in _data
        self._event = b""
        self._started = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that ``data`` completes.

        Raises:
            EventTooLarge: the event under way is longer than the limit.
        """
        self._buffer += data
        if not self._started and not self._skip_mark():
            return []
        events = [event for line in self._lines() if (event := self._line(line)) is not None]
        if len(self._buffer) + self._held > self._limit:
            raise EventTooLarge(f"an event is longer than {self._limit} bytes")
        return events

    def _skip_mark(self) -> bool:
        mark = b"\xef\xbb\xbf"
        if len(self._buffer) < len(mark) and mark.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(mark)
        self._started = True
        return True

    def _lines(self) -> list[bytes]:
        # A CR at the very end may be half of a CRLF: wait for the next byte.
        end = len(self._buffer) - self._buffer.endswith(b"\r")
        *lines, rest = _LINE_END.split(self._buffer[:end])
        self._buffer = rest + self._buffer[end:]
        return lines

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._held += len(value) + 1
        elif field == b"event":
            self._event = value
        return None  # comments, ids, retry times and unknown fields

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._event
        self._data, self._event, self._held = [], b"", 0
        if not data:
            return None
        text = b"\n".join(data).decode("utf-8", "replace")
        return Event(text, name.decode("utf-8", "replace") or "message")
