"""The commands of README.md that start a worker and a frontend do what the page says."""

from __future__ import annotations

import importlib.util
import os
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


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl; enable with: apt-get install curl")
    first, *rest = command().splitlines()
    assert first == "pip install -e '.[hf]'"  # the tests have it: package tokenizers
    script = "\n".join(rest)
    for word, ours in (("8000", str(free_port())), ("/tmp/dynamo-demo", str(tmp_path / "store"))):
        assert word in script
        script = script.replace(word, ours)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "DYN_TRIO_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=clean_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert '"content":' in done.stdout
    assert done.stderr.count('{"event":"shutdown_report","cause":"SIGTERM","exit_code":0') == 2
