"""What a token costs between the link to its worker and its client's socket, counted.

Times tell little on shared machines; how many Python functions run for a token, how many writes,
and whether a task wakes, is the same everywhere.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.frontend.answers import StreamAnswer
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.record import RequestRecord
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.sinks import RawSink
from dynamo_trio.plane.abc import feed_tokens
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.openai.request import parse_completion
from dynamo_trio.wire.openai.response import CompletionStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import FrameType

    from dynamo_trio.http.asgi import Message
    from dynamo_trio.plane import ClientStream

#: Python functions that may run for one token. Raise it only with a measurement of what it costs:
#: the eighth lets all streams of a step be written one behind the other, which costs 4 % less.
FUNCTIONS = 8
TOKENS = 500


@attrs.define(eq=False)
class Steps(trio.abc.Instrument):
    """Counts how often a task has run."""

    count: int = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


class Granted:
    """The client's hold on a stream, of which only the credit matters here."""

    def grant(self, items: int) -> None:
        pass


async def taken(message: Message) -> None:
    await trio.lowlevel.checkpoint()


@attrs.frozen
class Streaming:
    """An answer in the middle, and the socket of its client."""

    answer: StreamAnswer
    peer: socket.socket

    def read(self) -> bytes:
        return self.peer.recv(1 << 20)


@pytest.fixture
async def streaming() -> AsyncIterator[Streaming]:
    preprocessor = Preprocessor(ByteTokenizer(), context_length=100_000, model="m")
    request = preprocessor.completion(parse_completion(b'{"model":"m","prompt":"hi"}'))
    record = RequestRecord(FrontendMetrics(), "m", "completions", "stream")
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setblocking(False)
        for side in (ours, peer):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sink = RawSink(taken, HttpLimits(), socket=trio.socket.from_stdlib_socket(ours))
        chunks = CompletionStream("cmpl-1", 0, "m")
        answer = StreamAnswer(preprocessor.output(request), record, sink, chunks)
        handle: ClientStream = Granted()  # type: ignore[assignment]  # it has all that is used
        answer.attach(handle)
        await sink.start(200, [])
        for _ in range(3):  # the first one begins the answer
            feed_tokens(answer, [97])
        stream = Streaming(answer, peer)
        stream.read()
        yield stream


async def test_a_token_is_a_few_functions(streaming: Streaming) -> None:
    with counted_functions() as count:
        for _ in range(TOKENS):
            feed_tokens(streaming.answer, [97])
            streaming.read()
    own = count() / TOKENS - 2  # that which reads, and that which feeds one stream by itself
    assert own <= FUNCTIONS, f"{own:.1f} Python functions run for each token"


async def test_a_token_is_one_write_and_wakes_no_task(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []

    def write(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return real(descriptor, data)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    steps = Steps()
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.add_instrument(steps)
    for _ in range(TOKENS):
        feed_tokens(streaming.answer, [97])
        assert len(streaming.read()) == writes[-1]
    await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(steps)
    assert len(writes) == TOKENS
    assert steps.count <= 2  # this one
    assert streaming.answer.record.token_count == TOKENS + 3


class counted_functions:
    """Counts the Python functions that are called while the block runs."""

    def __enter__(self) -> Callable[[], int]:
        self._count = 0
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return lambda: self._count

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self._count += 1
