"""What a person sees: Ctrl-C, colour and status line of a terminal, or lines for machines."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import attrs
import pytest

from tests.standalone.harness import (
    LISTENING,
    PATIENCE,
    Http1,
    ask,
    chat,
    clean_environ,
    finish_all,
    open_streams,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.standalone.conftest import Start

    StartOnTerminal = Callable[..., "OnTerminal"]

CTRL_C = b"\x03"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;]*[mK]")
#: Makes its standard input the terminal that Ctrl-C comes from, then becomes the program.
SHIM = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'dynamo_trio', *sys.argv[1:]])"
)


@attrs.define(eq=False)
class OnTerminal:
    """The program as the foreground process of a terminal."""

    popen: subprocess.Popen[bytes]
    master: int
    screen: str = ""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, condition: Callable[[str], bool]) -> str:
        """Read what it shows until the condition holds, or it has ended."""
        end = time.monotonic() + PATIENCE
        while not condition(self.screen):
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"in vain waited; on the screen:\n{self.screen}"
            try:
                piece = os.read(self.master, 65536)
            except OSError:  # EIO: nobody has the terminal open any more
                piece = b""
            assert piece, f"it has ended; on the screen:\n{self.screen}"
            self.screen += piece.decode(errors="replace")
        return self.screen

    def wait_for(self, text: str) -> str:
        return self.read_until(lambda screen: text in screen)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while True:
            try:
                piece = os.read(self.master, 65536)
            except OSError:
                break
            if not piece:
                break
            self.screen += piece.decode(errors="replace")
        return self.popen.wait(PATIENCE)

    @property
    def port(self) -> int:
        self.wait_for("is ready after")
        match = LISTENING.search(self.screen)
        assert match is not None
        return int(match[1])

    @property
    def lines(self) -> list[str]:
        """What stands on the screen, without what was wiped and without colour."""
        rows = self.screen.replace("\r\n", "\n").split("\n")
        return [CONTROL.sub("", row.split("\r")[-1]) for row in rows]


@pytest.fixture
def on_terminal() -> Iterator[StartOnTerminal]:
    started: list[OnTerminal] = []

    def start(*flags: str, **environ: str) -> OnTerminal:
        master, slave = pty.openpty()
        command = [sys.executable, "-c", SHIM, "--http-port", "0", "--engine", "sim", *flags]
        popen = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=clean_environ(**{"TERM": "xterm", "COLUMNS": "160", **environ}),
            start_new_session=True,
        )
        os.close(slave)
        started.append(OnTerminal(popen, master))
        return started[-1]

    yield start
    left = [one for one in started if one.popen.poll() is None]
    for one in left:
        one.popen.kill()
        one.popen.wait()
    for one in started:
        os.close(one.master)
    if left:
        pytest.fail(f"{len(left)} processes had to be killed")


def test_ctrl_c_leaves_at_once_when_idle(on_terminal: StartOnTerminal) -> None:
    program = on_terminal(DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="100")
    assert ask(program.port, "POST", "/v1/chat/completions", chat(4)).is_done
    program.type(CTRL_C)
    assert program.end() == 0
    report = json.loads(next(line for line in reversed(program.lines) if line))
    assert report["cause"] == "SIGINT"
    assert report["seconds"] < 10
    assert "running any more" not in program.screen


def test_ctrl_c_shows_what_is_running_and_the_next_one_ends_it(
    on_terminal: StartOnTerminal,
) -> None:
    program = on_terminal("--itl-ms", "50", DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="100")
    with open_streams(program.port, 2, chat(1900)) as streams:
        program.type(CTRL_C)
        program.wait_for("2 requests still running, to be ended in")
        program.type(CTRL_C)
        assert [answer.error["code"] for answer in finish_all(streams)] == ["cut", "cut"]
    assert program.end() == 0
    report = json.loads(next(line for line in reversed(program.lines) if line))
    assert report["requests"]["cut"] == 2
    assert "still running" not in "\n".join(program.lines)  # the status line is gone
    told = re.findall(r"still running([^\r\x1b]*)", program.screen)
    assert all(re.match(r", to be ended in \d+\.\d s", words) for words in told)


def test_nothing_is_drawn_into_an_answer(on_terminal: StartOnTerminal) -> None:
    patient = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "100"}
    program = on_terminal("--ask", "Why is the sky blue?", "--itl-ms", "20", **patient)
    program.read_until(lambda _: "loading" not in answered(program) and len(answered(program)) > 10)
    program.type(CTRL_C)
    assert program.end() == 0
    assert "\x1b" not in answered(program)
    assert "still running" not in program.screen
    report = json.loads(next(line for line in reversed(program.lines) if line))
    assert report["cause"] == "SIGINT"
    assert report["requests"]["finished"] == 1


def answered(program: OnTerminal) -> str:
    """What stands on the screen after the progress of the load was wiped, but for Ctrl-C's echo."""
    return program.screen.rpartition("\x1b[2K")[2].replace("^C", "")


def test_a_dumb_terminal_gets_neither_colour_nor_a_status_line(
    on_terminal: StartOnTerminal,
) -> None:
    program = on_terminal("--itl-ms", "50", TERM="dumb")
    with open_streams(program.port, 1, chat(1900)) as streams:
        program.type(CTRL_C)
        program.wait_for("phase draining")
        program.type(CTRL_C)
        assert [answer.error["code"] for answer in finish_all(streams)] == ["cut"]
    assert program.end() == 0
    assert "\x1b" not in program.screen
    assert "still running" not in program.screen


def test_loading_shows_progress(on_terminal: StartOnTerminal) -> None:
    program = on_terminal("--load-ms", "1500")
    shown = program.wait_for("is ready after")
    assert len(re.findall(r"\r\x1b\[2K. loading sim", shown)) > 2
    program.type(CTRL_C)
    assert program.end() == 0


def test_the_banner_has_a_curl_line_that_works(on_terminal: StartOnTerminal) -> None:
    program = on_terminal("--itl-ms", "1")
    port = program.port
    program.wait_for('"stream": true}')
    (curl,) = [line for line in program.lines if line.startswith("curl ")]
    body = json.loads(curl.partition(" -d '")[2].removesuffix("'"))
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in curl
    assert ask(port, "POST", "/v1/chat/completions", body).is_done
    assert "  shutdown  HTTP drain <= 5 s" in program.screen
    assert "Ctrl-C again cuts short, a third time leaves at once" in program.screen
    program.type(CTRL_C)
    assert program.end() == 0


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour(on_terminal: StartOnTerminal, environ: dict[str, str], colored: bool) -> None:
    program = on_terminal(**environ)
    program.wait_for("is ready after")
    program.type(CTRL_C)
    assert program.end() == 0
    assert bool(COLOR.search(program.screen)) == colored


def test_json_lines_on_demand(start_sim: Start) -> None:
    server = start_sim("--itl-ms", "1", DYN_LOGGING_JSONL="1")
    named = ask(server.port, "POST", "/v1/chat/completions", chat(4), **{"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert server.stop() == 0
    entries = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "target", "message"} <= entry.keys() for entry in entries[:-1])
    assert entries[-1]["event"] == "shutdown_report"
    lines = [entry for entry in entries if entry.get("x_request_id") == "mine"]
    (way,) = {entry["request_id"] for entry in lines}
    assert str(way).encode() in named.body, "an answer's id is made of it"
    told = [entry["message"] for entry in entries[:-1]]
    phases = [text for text in told if text.startswith("phase ")]
    assert phases == ["phase draining", "phase stopping", "phase stopped"]


def test_a_log_that_nobody_reads_holds_nothing_up(start_sim: Start) -> None:
    # Standard error is a pipe whose reader stops for good: it must serve on, and stop.
    server = start_sim("--log", "debug", "--itl-ms", "0")
    port, read = server.port, server.pause_reading()
    body = {"model": "sim", "prompt": "x", "max_tokens": 1}
    name = "x" * 128  # it stands twice in each line, and a pipe holds 64 KiB
    with Http1(port) as client:
        for _ in range(300):
            answer = client.ask("POST", "/v1/completions", body, **{"x-request-id": name})
            assert answer.status == 200
    server.kill(signal.SIGTERM)
    assert server.popen.wait(PATIENCE) == 0
    read()
