"""Every example runs, ends by itself and shows something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Seconds; each of them takes two or three.
PATIENCE = 120

FOLDER = Path(__file__).parents[2] / "examples"
#: What is run: with each of its arguments, where it takes some.
EXAMPLES = [
    *([path.name] for path in sorted(FOLDER.glob("*.py"))),
    ["frontend_under_another_server.py", "anycorn"],
]


@pytest.mark.parametrize("example", EXAMPLES, ids=" ".join)
def test_an_example_runs(example: list[str]) -> None:
    name, *arguments = example
    command = [sys.executable, "-W", "error", str(FOLDER / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
