"""A process with API keys, and routes at other paths: at its start, in its life, in its log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.standalone.harness import PATIENCE, clean_environ, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.standalone.conftest import Start
    from tests.standalone.harness import Server

KEY, NEW = "sk-s3cr3t-of-the-first-team", "sk-s3cr3t-of-the-second-team"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n")
    return path


def ask(server: Server, key: str, path: str = "/v1/models") -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(server.url + path, headers=headers, timeout=PATIENCE, trust_env=False)


def test_keys_come_and_go_and_none_is_ever_told(start_sim: Start, file: Path) -> None:
    server = start_sim(*("--log", "debug", "--api-keys-file", str(file)), DYN_LOGGING_JSONL="true")
    assert [ask(server, key).status_code for key in (KEY, NEW, "")] == [200, 401, 401]
    assert ask(server, "", "/health").status_code == 200
    file.write_text(f"{NEW}\n")
    wait_until(lambda: ask(server, NEW).status_code == 200, "the new key")
    assert ask(server, KEY).status_code == 401
    file.unlink()
    server.wait_log("the API keys stay as they were")
    assert ask(server, NEW).status_code == 200
    metrics = ask(server, "", "/metrics").text
    server.kill(signal.SIGUSR1)  # who holds it
    server.wait_log("task")
    assert server.stop() == 0
    for line in server.lines[:-1]:
        json.loads(line) if line.startswith("{") else None
    assert "s3cr3t" not in server.log + metrics
    assert str(file) in server.log  # of a file the operator may be told


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read: No such file"), ("# nobody\n", "must have at least one key")],
)
def test_a_file_without_keys_ends_the_start(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_trio", "--engine", "sim", "--http-port", "0"],
        capture_output=True,
        text=True,
        env=clean_environ(DYN_TRIO_API_KEYS_FILE=str(path)),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 64
    assert f"DYN_TRIO_API_KEYS_FILE={str(path)!r}: {says}" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_own_question_has_a_key_and_the_right_path(start_sim: Start, file: Path) -> None:
    server = start_sim(
        *("--ask", "Why is the sky blue?", "--itl-ms", "1", "--api-keys-file", str(file)),
        ready=False,
        DYN_HTTP_SVC_CHAT_PATH="/api/chat",
    )
    assert server.popen.stdout is not None
    assert len(server.popen.stdout.read().split()) > 1
    assert server.end() == 0
    assert "s3cr3t" not in server.log


def test_the_banner_knows_the_path_and_asks_for_a_key(start_sim: Start, file: Path) -> None:
    server = start_sim("--api-keys-file", str(file), "--http-svc-chat-path", "/api/chat")
    line = server.wait_log("curl -N")
    assert f"{server.url}/api/chat" in line
    assert "authorization: Bearer KEY" in line
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(
        f"{server.url}/api/chat", json=CHAT, headers=headers, timeout=PATIENCE, trust_env=False
    )
    assert answer.status_code == 200
