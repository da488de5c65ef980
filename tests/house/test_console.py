"""What a person sees; and that nobody ever waits for the reader of a log."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.config import LogFilter
from dynamo_trio.console import (
    Banner,
    InFlight,
    Terminal,
    bound_to,
    configure_logging,
    curl_line,
    describe_inflight,
    progress,
    request_id,
    url_of,
)
from dynamo_trio.console.logs import TerminalHandler
from dynamo_trio.console.progress import Bar
from dynamo_trio.console.terminal import PIECE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    #: Configures logging; what it returns gives all that was written.
    LogTo = Callable[..., Callable[[], str]]

logger = logging.getLogger("dynamo_trio.somewhere")


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def able_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal is in which the tests run."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Logging is process-wide: put it back as it was."""
    names = ["", "dynamo_trio", "h2"]
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, TerminalHandler)]:
        root.removeHandler(handler)
        handler.close()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def log_to(restored_logging: None) -> LogTo:
    """Configure logging to a buffer; what it returns gives all that was written."""

    def configure(stream: io.StringIO | None = None, **options: object) -> Callable[[], str]:
        stream = stream or io.StringIO()
        terminal = configure_logging(stream=stream, **options)  # type: ignore[arg-type]  # passed on

        def written() -> str:
            assert terminal.flush(10)
            return stream.getvalue()

        return written

    return configure


# --- log lines ---------------------------------------------------------------------------------


def test_a_line_of_text(log_to: LogTo) -> None:
    written = log_to()
    logger.info("hello %s", "world")
    day, clock, level, name, *words = written().split()
    assert (level, name, words) == ("INFO", "somewhere:", ["hello", "world"])
    assert (len(day), len(clock)) == (len("2026-01-31"), len("12:34:56.789"))


def test_color_and_no_date_on_a_terminal_only(log_to: LogTo) -> None:
    on_terminal = log_to(FakeTty())
    logger.error("bad")
    assert on_terminal().count("\x1b[") == 4
    assert on_terminal().startswith("\x1b[2m")
    without_color = log_to(FakeTty(), color=False)
    logger.error("bad")
    assert "\x1b" not in without_color()
    elsewhere = log_to()
    logger.error("bad")
    assert "\x1b" not in elsewhere()


def test_a_dumb_terminal_is_written_to_like_a_file(
    log_to: LogTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    tty = FakeTty()
    written = log_to(tty)
    with progress(Terminal(tty), "loading") as bar:
        bar.update(1, 2)
    logger.error("bad")
    assert "\x1b" not in written()
    assert "\r" not in written()
    assert "loading: 50 %" in written()


def test_a_json_line_carries_request_extras_and_exception(
    log_to: LogTo,
) -> None:
    written = log_to(jsonl=True)
    token = request_id.set("req-1")
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("two\nlines", extra={"tokens": 3, "path": os})
    finally:
        request_id.reset(token)
    (line,) = written().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["target"]) == ("ERROR", "dynamo_trio.somewhere")
    assert (entry["message"], entry["request_id"], entry["tokens"]) == ("two\nlines", "req-1", 3)
    assert entry["exception"].endswith("KeyError: 'lost'")
    assert entry["time"].endswith("Z")


def test_a_json_line_has_only_what_there_is(log_to: LogTo) -> None:
    written = log_to(jsonl=True)
    logger.info("plain")
    assert set(json.loads(written())) == {"time", "level", "target", "message"}


def test_text_carries_request_extras_and_exception(
    log_to: LogTo,
) -> None:
    written = log_to()
    token = request_id.set("req-1")
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("oh", extra={"tokens": 3})
    finally:
        request_id.reset(token)
    first, *rest = written().splitlines()
    assert first.endswith("oh tokens=3 [req-1]")
    assert rest[-1] == "    KeyError: 'lost'"
    assert all(line.startswith("    ") for line in rest)


def test_what_a_client_sends_cannot_forge_lines_or_steer_the_terminal(
    log_to: LogTo,
) -> None:
    written = log_to()
    logger.warning("model %s", "x\n2026-01-01 00:00:00.000 INFO a: fine\x1b[2J")
    first, second = written().splitlines()
    assert first.endswith("model x")
    assert second == "    2026-01-01 00:00:00.000 INFO a: fine\\x1b[2J"


def test_levels_are_those_of_the_filter(log_to: LogTo) -> None:
    written = log_to(levels=LogFilter("error", (("h2", "debug"),)))
    logger.warning("unheard")
    logger.error("heard")
    logging.getLogger("h2").debug("heard too")
    logging.getLogger("httpx").info("unheard")
    assert [line.split(": ")[1] for line in written().splitlines()] == ["heard", "heard too"]


def test_a_wrong_log_call_is_reported_and_harms_nobody() -> None:
    stream = io.StringIO()
    handler = TerminalHandler(Terminal(stream))
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("x",), "pathname": "here.py"}))
    handler.handle(logging.makeLogRecord({"msg": "after"}))
    handler.flush()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("log call at here.py:")
    assert second == "after"
    handler.close()


def test_configuring_again_replaces_the_first(log_to: LogTo) -> None:
    first = io.StringIO()
    log_to(first)
    second = log_to()
    logger.info("once")
    assert second().count("once") == 1
    assert first.getvalue() == ""


def test_what_others_tell_of_a_record_is_left_to_them(log_to: LogTo) -> None:
    """hypercorn's own lines, for one, name the process."""
    log_to()
    record = logging.LogRecord("others", logging.INFO, __file__, 1, "said", (), None)
    assert (record.process, record.thread) == (os.getpid(), threading.get_ident())


def test_importing_configures_nothing() -> None:
    code = (
        "import logging, dynamo_trio.console; r = logging.getLogger();"
        "print(r.handlers, r.level, logging.getLogger('dynamo_trio').level)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["[]", "30", "0"]


# --- nobody waits for a reader -------------------------------------------------------------------


class StuckStream(io.StringIO):
    """A stream whose reader has stopped until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        assert self.go.wait(60)
        return super().write(text)


def test_a_reader_that_has_stopped_costs_lines_but_blocks_nobody() -> None:
    stream = StuckStream()
    terminal = Terminal(stream, limit=5)
    for number in range(100):
        terminal.write(str(number))  # would never return if it waited
    assert not terminal.flush(0.01)
    dropped = terminal.dropped
    assert dropped >= 94
    stream.go.set()
    assert terminal.flush(60)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 100 - dropped + 1
    assert lines[-1] == f"({dropped} lines dropped: nobody read them)"


class CountedStream(io.StringIO):
    """Counts how often it is written to."""

    count = 0

    def write(self, text: str) -> int:
        self.count += 1
        return super().write(text)


def test_lines_that_come_together_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_trio.console.terminal.LINGER", 0.5)
    stream = CountedStream()
    terminal = Terminal(stream)
    lines = ["a" * (PIECE - 10), "b", "c" * PIECE, *"def"]
    for line in lines:
        terminal.write(line)
    assert terminal.flush(60)
    assert stream.getvalue().splitlines() == lines
    assert stream.count <= len(lines) - 3  # a with b, c, the rest together


STUCK = """
import logging, os, sys
from dynamo_trio.console import configure_logging
configure_logging()
for number in range(5000):
    logging.getLogger("dynamo_trio").info("line %d of many, and nobody reads them", number)
print("logged", flush=True)
logging.shutdown()
sys.stderr.flush()
{end}
"""


@pytest.mark.parametrize("end", ["os._exit(7)", "sys.exit(7)"])
def test_a_process_whose_log_nobody_reads_can_still_leave(end: str) -> None:
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", STUCK.format(end=end)],
            stdout=subprocess.PIPE,
            stderr=write,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (7, b"logged\n")
        assert b"line 0 of many" in os.read(read, 65536)
    finally:
        os.close(read)
        os.close(write)


def test_the_descriptor_gets_every_character_or_its_escape(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream:
        terminal = Terminal(stream)
        terminal.write("snow ☃")
        assert terminal.flush(60)
        terminal.close(60)
    assert path.read_text() == "snow \\u2603\n"


def test_a_status_needs_a_terminal() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.set_status(lambda: "never seen")
    assert terminal.flush(60)
    assert stream.getvalue() == ""


def test_the_status_moves_by_itself() -> None:
    tty = FakeTty()
    terminal = Terminal(tty)
    drawn_twice = threading.Event()
    calls: list[int] = []

    def render() -> str:
        calls.append(len(calls))
        if len(calls) == 3:
            drawn_twice.set()
        return f"status {len(calls)}"

    terminal.set_status(render)
    assert drawn_twice.wait(60)
    terminal.set_status(None)
    terminal.close(60)
    assert "status 2\r\x1b[2Kstatus 3" in tty.getvalue()


def test_what_is_written_after_the_end_is_lost() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.write("first")
    terminal.close(60)
    terminal.write("second")
    assert not terminal.flush(0.01)
    assert stream.getvalue() == "first\n"


def test_a_closed_stream_harms_nobody() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    stream.close()
    terminal.write("lost")
    assert terminal.flush(60)
    assert terminal.dropped == 1


# --- progress ------------------------------------------------------------------------------------


def test_on_a_terminal_progress_is_one_line_that_log_lines_do_not_garble(
    log_to: LogTo,
) -> None:
    tty = FakeTty()
    terminal = Terminal(tty)
    with progress(terminal, "loading", counts_bytes=True) as bar:
        bar.update(20e6, 80e6)
        assert terminal.flush(60)
        terminal.write("a line of the log")
        assert terminal.flush(60)
        shown = tty.getvalue()
    assert terminal.flush(60)
    assert "loading ━━━━━━──────────────────" in shown
    assert "20.0 of 80.0 MB (25 %)" in shown
    assert "\r\x1b[2Ka line of the log\n" in shown
    assert tty.getvalue().endswith("\r\x1b[2K")


def test_elsewhere_progress_is_a_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "dynamo_trio"):
        with progress(Terminal(stream), "fetching", counts_bytes=True) as bar:
            for done in range(0, 101):
                bar.update(done * 1e6, 100e6)
    assert [r.getMessage() for r in caplog.records[:-1]] == [
        "fetching",
        "fetching: 25.0 of 100.0 MB (25 %)",
        "fetching: 50.0 of 100.0 MB (50 %)",
        "fetching: 75.0 of 100.0 MB (75 %)",
        "fetching: 100.0 of 100.0 MB (100 %)",
    ]
    assert caplog.records[-1].getMessage().startswith("fetching: done in ")
    assert stream.getvalue() == ""


def test_progress_that_fails_says_so_and_lets_the_error_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(OSError, match="disk"):
        with progress(Terminal(io.StringIO()), "fetching"):
            raise OSError("disk")
    assert caplog.records[-1].getMessage().startswith("fetching: ended by OSError after ")


def test_progress_says_only_what_is_known() -> None:
    bar = Bar("x")
    assert bar.amount() == ""
    bar.update(1, 3)
    assert bar.amount() == "33 %"
    unknown = Bar("x", counts_bytes=True)
    unknown.update(1.5e6)
    assert unknown.amount() == "1.5 MB"
    unknown.update(5e6, 4e6)
    assert unknown.share == 1.0


# --- banner and what is still running ------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_url_reaches_the_server(host: str, url: str) -> None:
    assert url_of(host, 80) == url


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://0.0.0.0:80 (every interface; on this machine http://127.0.0.1:80)"),
        ("::", "http://[::]:80 (every interface; on this machine http://[::1]:80)"),
    ],
)
def test_what_is_bound_is_told(host: str, told: str) -> None:
    assert bound_to(host, 80) == told


def test_the_curl_line_survives_a_shell_whatever_the_model_is_called() -> None:
    line = curl_line("http://h:1", 'it\'s "mine"')
    script = f"curl() {{ printf '%s\\n' \"$@\"; }}; {line}"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    option, url, *_, body = shown.stdout.splitlines()
    assert (option, url) == ("-N", "http://h:1/v1/chat/completions")
    assert json.loads(body)["model"] == 'it\'s "mine"'


def test_the_banner_tells_what_a_person_needs() -> None:
    banner = Banner(
        version="1", host="127.0.0.1", port=8000, model="m", engine="sim", pid=77,
        timetable="HTTP drain <= 5 s", seconds=1.23,
    )  # fmt: skip
    text = str(banner)
    for part in ("ready after 1.2 s", "http://127.0.0.1:8000/v1", "HTTP drain <= 5 s", "TERM 77"):
        assert part in text
    assert "Ctrl-C again cuts short, a third time leaves at once" in text
    assert curl_line("http://127.0.0.1:8000", "m") in text.splitlines()


def test_what_is_still_running_is_listed_oldest_first_and_not_for_ever() -> None:
    assert describe_inflight([]) == "nothing is running any more"
    two = [InFlight("young", 1.0), InFlight("old", 9.0, remaining=2.5)]
    assert describe_inflight(two, left=4).splitlines() == [
        "2 requests still running, to be ended in 4.0 s",
        "old: running for 9.0 s, about 2.5 s to go",
        "young: running for 1.0 s",
    ]
    for unknown in (None, math.inf):
        first = describe_inflight(two, left=unknown).splitlines()[0]
        assert first == "2 requests still running"
    many = describe_inflight([InFlight(f"r{n}", n) for n in range(30)]).splitlines()
    assert many[0] == "30 requests still running"
    assert many[1].startswith("r29: ")
    assert many[-1] == "and 20 more"
    assert len(many) == 12
    assert describe_inflight([InFlight("one", 1)]).startswith("1 request still")
