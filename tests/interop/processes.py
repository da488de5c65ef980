"""Processes of either make, with their logs in files.

Everything waits for something that is seen: a line, an answer, an end. The limits only end what
would hang.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from tests.standalone.harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def free_port() -> int:
    """A port that nobody has. In a network of our own it stays so until it is used."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


#: Lines of a log that are shown when a test fails, and characters of each.
SHOWN = (60, 400)


def wait_until(condition: Callable[[], bool], what: str, *processes: Process) -> None:
    """Ask until the condition holds, which needs all these processes to be there."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"in vain waited for: {what}"
        for process in processes:
            code = process.popen.poll()
            assert code is None, f"{process.name} has ended ({code}), no {what}:\n{process.log}"
        time.sleep(0.1)


@attrs.define(eq=False)
class Process:
    """A running program. It is the head of its own process group and ends with it."""

    name: str
    popen: subprocess.Popen[bytes]
    log_path: Path
    _shown: int = 0

    # --- its log ------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def news(self) -> str:
        """The last lines of what it has logged since this was last asked."""
        log = self.log
        news, self._shown = log[self._shown :], len(log)
        lines, characters = SHOWN
        return "\n".join(line[:characters] for line in news.splitlines()[-lines:])

    def count(self, text: str) -> int:
        """How many of its lines contain ``text``."""
        return sum(text in line for line in self.log.splitlines())

    def said(self) -> list[dict[str, Any]]:
        """The JSON objects that it has printed, one a line.

        Its log goes to the same file, and may follow an object on the same line.
        """
        lines = [line for line in self.log.splitlines() if line.startswith("{")]
        return [json.JSONDecoder().raw_decode(line)[0] for line in lines]

    def wait_log(self, text: str, *, times: int = 1) -> str:
        """Wait for the line that contains ``text`` (the ``times``-th such), and return it."""
        wait_until(lambda: self.count(text) >= times, f"{text!r} from {self.name}", self)
        return [line for line in self.log.splitlines() if text in line][times - 1]

    # --- its end ------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def kill(self, signum: signal.Signals) -> None:
        self.popen.send_signal(signum)

    def end(self, *, patience: float = PATIENCE) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        return self.popen.wait(patience)

    def stop(self) -> int:
        """SIGTERM, and wait."""
        self.kill(signal.SIGTERM)
        return self.end()

    def close(self) -> str | None:
        """End it, if it still runs. Returns a complaint if it would not end politely."""
        complaint = self._end_politely() if self.is_running else None
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)  # what it has left behind
        return complaint

    def _end_politely(self) -> str | None:
        for signum in (signal.SIGCONT, signal.SIGTERM):
            self.kill(signum)
        try:
            self.end(patience=PATIENCE / 3)
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGKILL)
            self.popen.wait()
            return f"{self.name} had to be killed"
        return None


def start_process(
    name: str, command: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Process:
    """Start a program whose output goes to a file of its own in ``folder``."""
    log_path = folder / f"{name}-{time.monotonic_ns()}.log"
    with log_path.open("wb") as log:
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=folder,
            start_new_session=True,
        )
    return Process(name, popen, log_path)
