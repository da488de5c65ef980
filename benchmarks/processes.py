"""The processes that are measured: started, asked for their CPU time and memory, and ended."""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Seconds after which a process that says nothing is given up.
PATIENCE = 120.0

#: Linux: the clock of a process's CPU time, made of its id (``clock_getcpuclockid(3)``).
_CPUCLOCK_SCHED = 2

#: What every process of a benchmark is told. Nothing of the caller's own settings gets in.
_QUIET = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    "DYN_LOG": "warning,dynamo_trio=info",
}


class NotRunning(Exception):
    """A process ended, or said nothing, where it should have gone on."""


@attrs.define(eq=False)
class Process:
    """One child. ``lines`` is what it says on one of its outputs, as it comes."""

    popen: subprocess.Popen[str]
    _output: IO[str]
    _lines: queue.Queue[str | None] = attrs.field(factory=queue.Queue)
    _reader: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put(None)

    def line(self) -> str:
        """The next line.

        Raises:
            NotRunning: there is none in time, or the process has ended.
        """
        try:
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            line = None
        if line is None:
            raise NotRunning(f"process {self.popen.args!r} says nothing more")
        return line

    def wait_for(self, words: str) -> str:
        """The first line with these words."""
        while words not in (line := self.line()):
            pass
        return line

    def ask(self, **command: object) -> Any:
        """Send one command as JSON; returns what comes back."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()
        return json.loads(self.line())

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far, exact to about a microsecond."""
        return time.clock_gettime((~self.popen.pid << 3) | _CPUCLOCK_SCHED)

    def memory(self) -> int:
        """Bytes of memory that it has in RAM."""
        with open(f"/proc/{self.popen.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        """Ask it to stop, and if need be make it."""
        self.popen.terminate()
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._reader.join()
        self._output.close()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


@contextmanager
def running(
    module: str,
    *flags: str,
    environ: Mapping[str, str],
    talks: bool,
    python: str = sys.executable,
) -> Iterator[Process]:
    """``python -m module``. ``talks``: it answers commands, else it tells a log."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    popen = subprocess.Popen(
        [python, "-m", module, *flags],
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
        stderr=None if talks else subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**kept, **_QUIET, **environ},
    )
    output = popen.stdout if talks else popen.stderr
    assert output is not None
    process = Process(popen, output)
    try:
        yield process
    finally:
        process.end()


def environ_of(folder: Path) -> dict[str, str]:
    """Processes that are given the same folder find each other, and nobody else."""
    return {"DYN_FILE_KV": str(folder / "store"), "DYN_TRIO_CACHE_DIR": str(folder / "cache")}


def allow_many_files() -> None:
    """A thousand streams are a thousand connections, here and in the children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
