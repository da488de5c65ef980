"""The one writer of a text stream: nothing that has something to say ever waits for a reader.

Theory of operation
-------------------
Standard error can block for ever: a terminal under Ctrl-S, a pipe whose reader has stopped. A
shutdown that logs must not hang on that, nor may the event loop. So lines go into a bounded
queue, and a daemon thread of this class alone writes them. When the queue is full, lines are
dropped and counted; :meth:`Terminal.flush` waits for the thread, but only so long. Each time that
the thread wakes it takes the interpreter from the event loop, so it lets some lines come together.

The thread writes to the file descriptor and leaves Python's stream object alone: a thread that
waits inside one holds its lock, and whoever flushes the stream then waits too, the interpreter at
its exit among them.

The same thread owns the *status line*, the last line of a terminal that shows progress: it wipes
it before it writes a line of the log and draws it again afterwards, so the two never garble each
other. The status line is drawn only on terminals, and not on one that cannot wipe a line
(``TERM=dumb``): that is written to like a file.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from typing import TYPE_CHECKING, TextIO, TypeAlias

from attrs import define, field

from dynamo_trio.config.names import terminal_is_dumb

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often the status line is drawn, in seconds.
TICK = 0.1

#: Seconds in which lines come together.
LINGER = 0.01
#: Characters that are written at once, if that many wait: in ASCII as many bytes as a pipe keeps in
#: one piece (``PIPE_BUF``), whoever else writes to it.
PIECE = 4096

_WIPE = "\r\x1b[2K"


#: A text, a wish to be told when all before it is written, or the end.
_Item: TypeAlias = "str | threading.Event | None"


@define(eq=False)
class Terminal:
    """Writes lines to ``stream`` from a thread of its own."""

    stream: TextIO
    #: Lines that may wait; what comes beyond is dropped.
    limit: int = 10_000
    is_terminal: bool = field()
    #: Lines that were thrown away because nobody read the stream. Only ever grows; callers in
    #: several threads may lose a count to each other.
    dropped: int = field(default=0, init=False)
    _queue: queue.SimpleQueue[_Item] = field(factory=queue.SimpleQueue, init=False, repr=False)
    _fd: int | None = field(init=False, repr=False)
    _status: Callable[[], str] | None = field(default=None, init=False, repr=False)
    # Invariant: only the writer thread reads or changes these four.
    #: What did not fit behind what is being written.
    _held: list[_Item] = field(factory=list, init=False, repr=False)
    #: How many lines are being written.
    _lines: int = field(default=0, init=False, repr=False)
    _status_is_drawn: bool = field(default=False, init=False, repr=False)
    _dropped_and_told: int = field(default=0, init=False, repr=False)

    @is_terminal.default
    def _is_terminal_default(self) -> bool:
        return self.stream.isatty() and not terminal_is_dumb()

    @_fd.default
    def _fd_default(self) -> int | None:
        try:
            return self.stream.fileno()
        except (OSError, ValueError):  # an io.StringIO has none
            return None

    def __attrs_post_init__(self) -> None:
        threading.Thread(target=self._work, name="dynamo_trio.terminal", daemon=True).start()

    def write(self, line: str) -> None:
        """Queue one line, without its end. Never blocks and never raises."""
        if self._queue.qsize() >= self.limit:
            self.dropped += 1
        else:
            self._queue.put(line + "\n")

    def set_status(self, render: Callable[[], str] | None) -> None:
        """Show what ``render`` returns, drawn anew every 0.1 s, until set to None.

        ``render`` is called in the writer thread. Without a terminal nothing is shown.
        """
        self._status = render if self.is_terminal else None
        self._queue.put("")  # wakes the thread, which draws or wipes

    def flush(self, within: float) -> bool:
        """Wait up to ``within`` seconds until all that was queued is written; say whether it is."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(within)

    def close(self, within: float) -> None:
        """Flush, and end the thread. What is written afterwards is lost."""
        self.flush(within)
        self._queue.put(None)

    # --- in the thread ----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            item = self._next()
            if item is None:
                return
            try:
                self._draw(item if isinstance(item, str) else self._loss())
            except (OSError, ValueError):  # the stream is gone: whoever read it knows
                self.dropped += self._lines
            if isinstance(item, threading.Event):
                item.set()

    def _next(self) -> _Item:
        """What comes next: lines as far as they are there, or another item."""
        self._lines = 0
        if self._held:
            item = self._held.pop()
        else:
            try:
                item = self._queue.get(timeout=TICK if self._status else None)
            except queue.Empty:
                return ""
            if item:
                time.sleep(LINGER)
        return self._gather(item) if isinstance(item, str) else item

    def _gather(self, text: str) -> str:
        """With the lines that wait behind it."""
        self._lines += bool(text)
        while not self._queue.empty():
            item = self._queue.get()
            if not isinstance(item, str) or len(text) + len(item) > PIECE:
                self._held.append(item)
                break
            self._lines += bool(item)
            text += item
        return text

    def _loss(self) -> str:
        """A line that tells what was dropped since the last one."""
        lost = self.dropped - self._dropped_and_told
        self._dropped_and_told += lost
        return f"({lost} lines dropped: nobody read them)\n" if lost else ""

    def _draw(self, line: str) -> None:
        if self._status_is_drawn:
            line = _WIPE + line
            self._status_is_drawn = False
        if self._queue.empty():
            line += self._loss()
        status = self._status
        if status is not None:
            columns = shutil.get_terminal_size().columns
            line += _clip(status(), columns - 1)
            self._status_is_drawn = True
        if line:
            self._put(line)

    def _put(self, text: str) -> None:
        if self._fd is None:
            self.stream.write(text)
            self.stream.flush()
            return
        data = text.encode(self.stream.encoding or "utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._fd, data) :]


def _clip(text: str, width: int) -> str:
    """What fits into a line. Text with escape sequences has been made to fit."""
    return text if "\x1b" in text else text[:width]
