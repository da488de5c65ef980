"""Every example runs, ends by itself and shows something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Seconds; each of them takes two or three.
PATIENCE = 120

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
