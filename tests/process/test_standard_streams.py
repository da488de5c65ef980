"""A process that is started without standard streams: nothing of its own takes their place."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

#: What stands at 0, 1 and 2, whether children get it, and where the next thing goes.
LOOK = """
from dynamo_trio.process import signals; signals.install()
import json, os, sys
from dynamo_trio.process.inquiry import Inquiry
inquiry = Inquiry()
inquiry.start()
found = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
shared = [os.get_inheritable(fd) for fd in range(3)]
with open(sys.argv[1], "w") as file:
    json.dump([found, shared, file.fileno() > 2, min(inquiry._read, inquiry._write) > 2], file)
os.kill(os.getpid(), signals.signal.SIGUSR1)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("closed", "filled"), [("0<&- 1>&- 2>&-", [0, 1, 2]), ("2>&-", [2]), ("0<&-", [0])]
)
def test_closed_standard_streams_lead_nowhere(
    closed: str, filled: list[int], tmp_path: Path
) -> None:
    path, other = tmp_path / "found", tmp_path / "other"
    other.touch()
    command = f'exec "$@" {closed}'
    with other.open("r+") as file:
        shell = ["sh", "-c", command, "sh", sys.executable, "-c", LOOK, str(path)]
        done = subprocess.run(shell, stdin=file, stdout=file, stderr=file, check=False)
    assert done.returncode == 0
    found, shared, *above = json.loads(path.read_text())
    assert found == ["/dev/null" if fd in filled else str(other) for fd in range(3)]
    assert (shared, above) == ([True] * 3, [True] * 2)
