"""The commands of README.md that start a worker and a frontend do what the page says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standalone.harness import PATIENCE, clean_environ

ROOT = Path(__file__).resolve().parents[2]


def command() -> str:
    spec = importlib.util.spec_from_file_location("readme", ROOT / ".ci" / "readme_command.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.readme_commands((ROOT / "README.md").read_text())["processes"]
    assert isinstance(text, str)
    return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The commands, with a port and a folder of our own."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl; enable with: apt-get install curl")
    first, *rest = command().splitlines()
    assert first == "pip install -e '.[hf]'"  # the tests have it: package tokenizers
    text = "\n".join(rest)
    for word, ours in (("8000", str(free_port())), ("/tmp/dynamo-demo", str(tmp_path / "store"))):
        assert word in text
        text = text.replace(word, ours)
    return text


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "DYN_TRIO_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=clean_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_commands_of_the_readme(script: str, tmp_path: Path) -> None:
    done = run(script, tmp_path)
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert '"content":' in done.stdout
    assert done.stderr.count('{"event":"shutdown_report","cause":"SIGTERM","exit_code":0') == 2


#: Prints the address of every TCP socket that listens, in the processes whose ids it is given.
LISTENING = """
import os, sys
for pid in sys.argv[1:]:
    links = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
    sockets = {os.readlink(link) for link in links if os.path.islink(link)}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/{pid}/net/{table}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                print("listens at", fields[1].partition(":")[0])
"""


def test_the_variables_that_keep_all_on_this_machine(script: str, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (variables,) = re.findall(r"`((?:DYN_[A-Z_]+=127\.0\.0\.1 ?){3})`", text)
    (tmp_path / "listening.py").write_text(LISTENING)
    look = "python listening.py $(jobs -p)"
    assert script.count("\nexport ") == 1
    assert script.count("\nkill ") == 1
    script = script.replace("\nexport ", f"\nexport {variables} ")
    done = run(script.replace("\nkill ", f"\n{look}\nkill "), tmp_path)
    found = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("listens at")]
    assert len(found) >= 4  # HTTP and answers; tcp and mux
    assert set(found) == {"0100007F"}
