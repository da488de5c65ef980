"""Logging of the programs: readable lines, or JSON lines for machines.

Only an entry point calls :func:`configure_logging`; importing the package, or using it as a
library, configures nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from dynamo_trio.config.names import LOG_LEVELS, LogFilter
from dynamo_trio.console.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.wire.trace import TraceContext

#: The request that the current task works for; every log line of the task carries it. It has this
#: id on its way to the worker, too.
request_id: ContextVar[str | None] = ContextVar("dynamo_trio_request_id", default=None)
#: Where the current task's work stands in its trace.
trace: ContextVar[TraceContext | None] = ContextVar("dynamo_trio_trace", default=None)

#: How long :meth:`logging.Handler.flush` waits for a reader that has stopped, in seconds.
FLUSH_LIMIT = 1.0

_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"

#: What every record has; anything else came with ``extra=``.
_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


def log_often(logger: logging.Logger, level: int, text: str, *args: object) -> None:
    """As ``logger.log``, for what is told of every request: whose line it is is not looked for."""
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, "", 0, text, args, None))


def printable(text: str) -> str:
    """``text`` without control characters: what a client sends must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _indent(text: str) -> str:
    """Continuation lines are set in, so that none can pass for a log line of its own."""
    return printable(text).replace("\n", "\n    ")


def _extras(record: logging.LogRecord) -> Mapping[str, object]:
    if vars(record).keys() <= _STANDARD:
        return {}  # as nearly always
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


def _client_request_id() -> str:
    context = trace.get()
    return context.request_id if context is not None else ""


def _trace_keys() -> dict[str, str]:
    context = trace.get()
    if context is None:
        return {}
    found = {
        "trace_id": context.trace_id,
        "span_id": context.span_id,
        "parent_id": context.parent_id,
        "trace_flags": context.flags if context.parent_id else "",
        "x_request_id": context.request_id,
    }
    return {name: text for name, text in found.items() if text}


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO    frontend: message [request]``; with the date off a terminal."""

    def __init__(self, *, color: bool, date: bool) -> None:
        super().__init__()
        self._color = color
        self._form = "%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S"
        #: The second that was formatted last, and its text: many lines have the same.
        self._last = (-1, "")

    def _second(self, second: int) -> str:
        last, text = self._last
        if last != second:
            text = time.strftime(self._form, time.localtime(second))
            self._last = (second, text)
        return text

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{self._second(int(record.created))}.{int(record.msecs):03d}"
        name = record.name.removeprefix("dynamo_trio.")
        head = f"{record.levelname:<7} {name}: "
        request, extras = _client_request_id() or request_id.get(), _extras(record)
        tail = "".join([f" {k}={v}" for k, v in extras.items()]) if extras else ""
        tail += f" [{request}]" if request else ""
        body = _indent(record.getMessage() + tail)
        if record.exc_info:
            body += "\n    " + _indent(self.formatException(record.exc_info))
        if not self._color:
            return f"{stamp} {head}{body}"
        color = _COLORS.get(record.levelno, "")
        return f"{_DIM}{stamp}{_PLAIN} {color}{head}{body}{_PLAIN if color else ''}"


class JsonFormatter(logging.Formatter):
    """One object a line; the keys are those of Dynamo's ``DYN_LOGGING_JSONL``."""

    def format(self, record: logging.LogRecord) -> str:
        utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{utc}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        if (request := request_id.get()) is not None:
            entry["request_id"] = request
        entry.update(_trace_keys())
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps({**_extras(record), **entry}, default=str)


class TerminalHandler(logging.Handler):
    """Hands formatted lines to a :class:`Terminal`, so that logging never blocks."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a wrong log call must not break what it reports on
            line = f"log call at {record.pathname}:{record.lineno} failed: {error!r}"
        self.terminal.write(line)

    def flush(self) -> None:
        """Wait until all is written, but at most :data:`FLUSH_LIMIT`."""
        self.terminal.flush(FLUSH_LIMIT)

    def close(self) -> None:
        self.terminal.close(0)  # whoever wants to wait has flushed
        super().close()


def configure_logging(
    levels: LogFilter | None = None,
    *,
    jsonl: bool = False,
    stream: TextIO | None = None,
    color: bool | None = None,
) -> Terminal:
    """Log the whole process to ``stream`` (standard error) and return its writer.

    ``levels`` speaks of this package; other packages are heard from WARNING on unless it names
    them. ``color`` None means: on a terminal only. Calling it again replaces the earlier call.
    """
    levels = levels or LogFilter("info")
    # Python has no stream for a descriptor that was closed before it started.
    terminal = Terminal(stream or sys.stderr or open(os.devnull, "w"))  # noqa: SIM115 - for life
    on_terminal = terminal.is_terminal
    handler = TerminalHandler(terminal)
    handler.setFormatter(
        JsonFormatter()
        if jsonl
        else TextFormatter(color=on_terminal if color is None else color, date=not on_terminal)
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, TerminalHandler)]:
        root.removeHandler(old)
        old.flush()
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("dynamo_trio").setLevel(LOG_LEVELS[levels.level])
    for name, level in levels.loggers:
        logging.getLogger(name).setLevel(LOG_LEVELS[level])
    return terminal
