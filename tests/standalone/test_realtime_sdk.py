"""OpenAI's SDK, unchanged, against ``/v1/realtime`` of the one-process program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.standalone.conftest import Start
    from tests.standalone.harness import Server

    Run = Callable[..., subprocess.Popen[str]]

CLIENTS = Path(__file__).with_name("realtime_clients.py")
PATIENCE = 60

ANSWER = [
    ["SessionCreatedEvent", "session.created"],
    ["SessionUpdatedEvent", "session.updated"],
    ["ConversationItemAdded", "conversation.item.added"],
    ["ConversationItemDone", "conversation.item.done"],
    ["ResponseCreatedEvent", "response.created"],
    ["ResponseOutputItemAddedEvent", "response.output_item.added"],
    ["ConversationItemAdded", "conversation.item.added"],
    ["ResponseContentPartAddedEvent", "response.content_part.added"],
    ["ResponseTextDoneEvent", "response.output_text.done"],
    ["ResponseContentPartDoneEvent", "response.content_part.done"],
    ["ConversationItemDone", "conversation.item.done"],
    ["ResponseOutputItemDoneEvent", "response.output_item.done"],
    ["ResponseDoneEvent", "response.done"],
]
DELTA = ["ResponseTextDeltaEvent", "response.output_text.delta"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a client; it does not outlive the test."""
    clients: list[subprocess.Popen[str]] = []

    def run(kind: str, server: Server, *more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, str(CLIENTS), kind, server.url, *more]
        pipe = subprocess.PIPE
        clients.append(subprocess.Popen(argv, text=True, stdout=pipe, stderr=pipe))
        return clients[-1]

    yield run
    for client in clients:
        client.kill()
        client.communicate()


def result(client: subprocess.Popen[str]) -> Any:
    out, err = client.communicate(timeout=PATIENCE)
    assert client.returncode == 0, err
    return json.loads(out)


def without_deltas(seen: list[list[str]]) -> list[list[str]]:
    return [event for event in seen if event != DELTA]


def test_its_clients(start_sim: Start, run: Run) -> None:
    server = start_sim("--itl-ms", "5")
    sync, in_asyncio = run("sync", server), run("async", server)
    told = result(sync)
    assert without_deltas(told["seen"]) == ANSWER
    assert (told["deltas"], told["tokens"]) == (told["text"], 8)
    told = result(in_asyncio)
    assert (told["errors"], told["status"]) == (["mine"], "cancelled")
    first = told["seen"].index(["ResponseDoneEvent", "response.done"])
    expected = [["RealtimeErrorEvent", "error"] if "updated" in e[1] else e for e in ANSWER]
    assert without_deltas(told["seen"][: first + 1]) == expected
    assert told["seen"][-1] == ["ResponseDoneEvent", "response.done"]


def test_it_outlives_a_notice(start_sim: Start, run: Run) -> None:
    server = start_sim("--itl-ms", "5")
    client = run("drain", server)
    assert client.stderr is not None
    assert "answered" in iter(client.stderr.readline, "").__next__()
    server.kill(signal.SIGTERM)
    told = result(client)
    assert told["code"] == 1012
    assert told["notice"]["session"]["model"] == "sim"
    assert [item["role"] for item in told["notice"]["items"]] == ["user", "assistant"]
    assert without_deltas(told["seen"])[-2][1] == "response.done"
    assert server.end() == 0


def test_at_the_limit_it_has_all_it_needs_to_go_on_elsewhere(start_sim: Start, run: Run) -> None:
    server = start_sim("--itl-ms", "20", DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.5")
    client = run("busy", server)
    assert client.stderr is not None
    assert "answered" in client.stderr.readline()
    server.kill(signal.SIGTERM)
    told = result(client)
    assert told["code"] == 1012
    assert (told["notice"]["reason"], told["notice"]["deadline"]) == ("drain_limit", 0)
    assert told["response"]["status"] == "incomplete"
    assert told["notice"]["items"][1:] == told["response"]["output"]  # what it has heard so far
    assert server.end() == 0
    next_one = start_sim("--itl-ms", "5")
    gone_on = result(run("replay", next_one, json.dumps(told["notice"])))
    assert gone_on["errors"] == []
    before, response = told["response"]["usage"], gone_on["response"]
    assert response["usage"]["output_tokens"] == 8
    assert response["usage"]["input_tokens"] > before["input_tokens"] + before["output_tokens"]
