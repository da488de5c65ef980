"""The words behind the status of an HTTP/1 answer."""

from __future__ import annotations

import shutil
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.http.phrases import PHRASES
from tests.http.harness import PATIENCE, in_memory, read_to_end, running
from tests.http.routes import LIMITS, App

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send


async def by_its_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the status that is the path."""
    status = int(scope["path"][1:])
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "OK"),
        (404, "Not Found"),
        (503, "Service Unavailable"),
        (529, "Overloaded"),
        (499, "Client Error"),
        (599, "Server Error"),
    ],
)
async def test_an_answer_says_its_status_in_words(
    autojump_clock: MockClock, status: int, words: str
) -> None:
    async with in_memory(by_its_path, LIMITS) as memory:
        stream = memory.connect()
        await stream.send_all(
            f"GET /{status} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n".encode()
        )
        answer, _ = await read_to_end(stream)
    assert answer.startswith(f"HTTP/1.1 {status} {words}\r\n".encode())


def test_every_registered_status_has_its_words_and_no_other_breaks_the_line() -> None:
    assert {s.value: s.phrase.encode() for s in HTTPStatus}.items() <= PHRASES.items()
    assert set(PHRASES) == set(range(100, 1000))
    assert not any({b"\r", b"\n"} & set(words) for words in PHRASES.values())


async def test_h2load_counts_our_answers_as_good_ones() -> None:
    """It takes an answer without words for a failed one."""
    if shutil.which("h2load") is None:
        pytest.skip("there is no h2load; enable with: apt-get install nghttp2-client")
    async with running(App(), LIMITS) as server:
        command = ["h2load", "--h1", "-n", "20", "-c", "4", f"http://127.0.0.1:{server.port}/"]
        with trio.fail_after(PATIENCE):
            done = await trio.run_process(command, capture_stdout=True)
    assert b"20 succeeded, 0 failed" in done.stdout
    assert b"status codes: 20 2xx" in done.stdout
