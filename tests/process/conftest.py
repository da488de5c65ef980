"""A small process for the tests, and how it is started and watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

if TYPE_CHECKING:
    import signal

PROGRAM = Path(__file__).with_name("program.py")


@attrs.define(eq=False)
class Child:
    """A running ``program.py``."""

    popen: subprocess.Popen[str]
    log: list[str] = attrs.field(factory=list)

    def kill(self, signum: signal.Signals) -> None:
        self.popen.send_signal(signum)

    def wait_output(self, text: str) -> None:
        assert self.popen.stdout is not None
        assert text in self.popen.stdout.readline()

    def wait_log(self, text: str) -> None:
        """Read stderr up to a line that contains ``text``."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(line)
            if text in line:
                return
        raise AssertionError(f"no {text!r} in {self.log}")

    def close_stdin(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def end(self) -> int:
        """Wait for the end without closing stdin; returns the exit code."""
        assert self.popen.stderr is not None
        self.log += self.popen.stderr.readlines()
        return self.popen.wait()

    @property
    def report(self) -> dict[str, Any]:
        """The shutdown report: exactly one line, and the last."""
        reports = [line for line in self.log if line.startswith("{")]
        assert reports == self.log[-1:], self.log
        report = json.loads(reports[0])
        assert report["event"] == "shutdown_report"
        assert isinstance(report, dict)
        return report


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Any:
    def start(scenario: str, *, ready: bool = True, **environ: str) -> Child:
        popen = subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )

        def tidy() -> None:
            with popen:  # closes the pipes and waits
                popen.kill()

        request.addfinalizer(tidy)
        child = Child(popen)
        if ready:
            child.wait_output("ready")
        return child

    return start
