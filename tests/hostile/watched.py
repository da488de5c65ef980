"""A process under attack: what it holds, what it does, and what it says."""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import attrs

from tests.programs.conftest import MODEL
from tests.standalone.harness import ask, chat, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.standalone.harness import Server

MIB = 2**20
#: A line of the level ERROR or above; what a peer said may only look like one.
_ERROR = re.compile(r"\S+ \S+ (ERROR|CRITICAL) ")
_TICK = os.sysconf("SC_CLK_TCK")


@attrs.define(eq=False)
class Watched:
    """A process, and what it held before anybody attacked it."""

    server: Server
    #: Bytes that it may have grown by at the end.
    slack: int = 64 * MIB
    descriptors: int = 0
    memory: int = 0
    lines: int = 0

    def __attrs_post_init__(self) -> None:
        self.descriptors, self.memory = self.count_descriptors(), self.count_memory()
        self.lines = len(self.server.lines)

    @property
    def _proc(self) -> Path:
        return Path("/proc") / str(self.server.popen.pid)

    def count_descriptors(self) -> int:
        return len(list((self._proc / "fd").iterdir()))

    def count_memory(self) -> int:
        """Resident bytes."""
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def count_cpu(self) -> float:
        """Seconds."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    @property
    def new_lines(self) -> list[str]:
        """What it has logged since."""
        return self.server.lines[self.lines :]

    def check(self, *, errors: str = "nothing") -> None:
        """It lives, holds nothing, and has called nothing its own mistake.

        ``errors``: what a line of the level ERROR may be about.
        """
        assert self.server.popen.poll() is None, self.server.log
        wait_until(lambda: self.count_descriptors() <= self.descriptors + 2, "descriptors closed")
        grown = self.count_memory() - self.memory
        assert grown < self.slack, f"{grown / MIB:.0f} MiB more"
        new = self.new_lines
        wrong = [n for n in new if "Traceback" in n or (_ERROR.match(n) and errors not in n)]
        assert wrong == [], "\n".join([*wrong, "", *new])[:10_000]
        assert max(map(len, new), default=0) < 4000


def wait_idle(*processes: Watched) -> None:
    """Until none of them does anything."""
    # Ten times what an idle process needs, on a machine that has other things to do.
    wait_until(lambda: max(_busyness(processes)) < 0.1, "all are idle")


def _busyness(processes: Sequence[Watched]) -> list[float]:
    """The share of a processor that each has used over a second."""
    began, used = time.monotonic(), [process.count_cpu() for process in processes]
    time.sleep(1)
    seconds = time.monotonic() - began
    return [(p.count_cpu() - u) / seconds for p, u in zip(processes, used, strict=True)]


@contextmanager
def healthy_streams(port: int) -> Iterator[None]:
    """While the block runs: one stream after the other, each whole, each the same."""
    body = chat(60, model=MODEL)
    expected = ask(port, "POST", "/v1/chat/completions", body).text
    assert expected
    over, found = Event(), list[str]()

    def run() -> None:
        while not over.is_set():
            try:
                answer = ask(port, "POST", "/v1/chat/completions", body)
                found.append(answer.text if answer.is_done else "not whole")
            except Exception as exc:
                found.append(repr(exc))
                return

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert set(found) == {expected}, set(found) - {expected}
