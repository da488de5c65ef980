"""HTTPS as an operator has it: files by variables, curl as the client, and the wrong ones named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.config.programs import FRONTEND, STANDALONE
from dynamo_trio.errors import ConfigError
from tests.plane.tls_files import Authority
from tests.programs.conftest import MODEL, Fleet
from tests.standalone.harness import clean_environ

if TYPE_CHECKING:
    from pathlib import Path

    from tests.standalone.harness import Server


class Curl:
    """Trusts one authority, and no other."""

    def __init__(self, authority: Path, port: int) -> None:
        self.authority, self.base = authority, f"https://localhost:{port}"

    def command(self, path: str, *flags: str) -> list[str]:
        common = ("curl", "-sS", "--max-time", "30", "--cacert", str(self.authority))
        return [*common, *flags, f"{self.base}{path}"]

    def __call__(self, path: str, *flags: str) -> str:
        done = subprocess.run(
            self.command(path, *flags), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def served(fleet: Fleet) -> tuple[Server, Curl]:
    """A frontend over TLS with a model, and a client that trusts it."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl; enable with: apt-get install curl")
    authority = Authority(fleet.folder)
    identity = authority.identity("localhost")
    fleet.worker("--itl-ms", "100")
    frontend = fleet.frontend(
        *("--tls-cert-path", str(identity.cert), "--tls-key-path", str(identity.key)),
        DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="1",
    )
    line = frontend.wait_log("listening on https://")
    curl = Curl(authority.file, int(line.rpartition(":")[2]))
    while MODEL not in curl("/v1/models"):
        pass
    return frontend, curl


def body(tokens: int) -> str:
    messages = [{"role": "user", "content": "hello"}]
    request = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": True}
    return json.dumps(request)


JSON = ("-H", "content-type: application/json", "-d")


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_a_stream_by_curl(served: tuple[Server, Curl], version: str) -> None:
    _, curl = served
    said = "\\n%{http_version} %{scheme}"
    answer = curl("/v1/chat/completions", version, "-N", "-w", said, *JSON, body(5))
    events, _, told = answer.rpartition("\n")
    assert events.rstrip().endswith("data: [DONE]")
    assert told.lower().split() == ["2" if version == "--http2" else "1.1", "https"]


def test_a_drain_over_tls_tells_its_streams(served: tuple[Server, Curl]) -> None:
    frontend, curl = served
    command = curl.command("/v1/chat/completions", "-N", *JSON, body(90))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as streaming:
        assert streaming.stdout is not None
        first = streaming.stdout.readline()
        assert first.startswith("data: ")
        frontend.kill(signal.SIGTERM)
        frontend.wait_log("stopping gracefully")
        assert json.loads(curl("/v1/models"))["error"]["code"] == "draining"
        assert "live" in curl("/live")
        rest = streaming.stdout.read()
        assert streaming.wait() == 0  # a whole answer, to curl
    assert '"error"' in rest
    assert "[DONE]" not in rest


def test_the_question_of_one_process_goes_by_tls(tmp_path: Path, model_folder: Path) -> None:
    identity = Authority(tmp_path).identity("somewhere.example")  # not the address it is asked at
    tls = {"DYN_TLS_CERT_PATH": str(identity.cert), "DYN_TLS_KEY_PATH": str(identity.key)}
    flags = ("--http-port", "0", "--engine", "sim", "--model-path", str(model_folder))
    done = run("dynamo_trio", *flags, "--itl-ms", "0", "--ask", "Hello?", **tls)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def run(module: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=clean_environ(**environ), check=False
    )


def test_files_that_do_not_belong_together_are_an_error_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.identity("one.example"), authority.identity("two.example")
    tls = {"DYN_TLS_CERT_PATH": str(one.cert), "DYN_TLS_KEY_PATH": str(other.key)}
    for module, flags in (
        ("dynamo_trio", ("--engine", "sim")),
        ("dynamo_trio.frontend", ("--discovery-backend", "mem")),
    ):
        done = run(module, "--http-port", "0", *flags, **tls)
        assert done.returncode == 64, done.stderr
        assert f"DYN_TLS_KEY_PATH={other.key}: must be the PEM key of" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "needed"),
    [("DYN_TLS_CERT_PATH", "DYN_TLS_KEY_PATH"), ("DYN_TLS_KEY_PATH", "DYN_TLS_CERT_PATH")],
)
def test_one_needs_the_other(given: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(given, "some.pem")
    for program in (FRONTEND, STANDALONE):
        with pytest.raises(ConfigError, match=f"{given}: needs {needed}"):
            program.read_config([])
