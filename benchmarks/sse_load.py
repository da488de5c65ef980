"""Streamed chat requests over kept connections, by one thread that does next to nothing.

It shares the machine's cores with what is measured, so it parses no more than it must: a head's
status, how many events a piece holds, and whether the end of an answer is whole.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import time
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Seconds after which streams that say nothing are given up.
PATIENCE: Final = 60.0

_PROMPT: Final = "Why is the sky blue, and what would you like to tell me about it today? " * 3
_EVENT: Final = b"data: {"


@attrs.frozen
class Load:
    """Requests of one kind. ``tokens``: of each answer."""

    port: int
    model: str
    tokens: int
    headers: Mapping[str, str] = attrs.field(factory=dict)

    def request(self, number: int) -> bytes:
        """One request, whole; no two prompts begin alike."""
        content = f"{number} {_PROMPT}"
        body = {
            **{"model": self.model, "messages": [{"role": "user", "content": content}]},
            **{"max_tokens": self.tokens, "ignore_eos": True},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        payload = json.dumps(body).encode()
        head = {"host": "127.0.0.1", "content-type": "application/json", **self.headers}
        lines = [f"{name}: {value}" for name, value in head.items()]
        lines = ["POST /v1/chat/completions HTTP/1.1", *lines, f"content-length: {len(payload)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


@attrs.define(eq=False)
class Result:
    """What came. Times are in seconds."""

    tokens: int = 0
    events: int = 0
    reads: int = 0
    #: What was wrong with answers.
    errors: list[str] = attrs.field(factory=list)
    first: list[float] = attrs.field(factory=list)
    #: The mean time between two tokens of each answer.
    steps: list[float] = attrs.field(factory=list)

    @property
    def step_ms(self) -> float:
        """The median over the answers."""
        return 1000 * statistics.median(self.steps) if self.steps else 0.0


@attrs.define(eq=False)
class _Connection:
    load: Load
    result: Result
    socket: socket.socket
    left: int
    sent: float = 0.0
    first: float = 0.0
    #: Kept of what came: the head until it is whole, then the end.
    kept: bytes = b""
    in_body: bool = False

    def ask(self, number: int) -> None:
        self.left -= 1
        self.kept, self.in_body, self.first = b"", False, 0.0
        self.sent = time.monotonic()
        self.socket.sendall(self.load.request(number))

    def take(self, data: bytes) -> bool:
        """Is the answer over?"""
        now = time.monotonic()
        self.result.reads += 1
        events = data.count(_EVENT)
        self.result.events += events
        if events and not self.first:
            self.first = now
        self.kept += data
        if not self.in_body and (end := self.kept.find(b"\r\n\r\n")) >= 0:
            if not self.kept.startswith(b"HTTP/1.1 200"):
                return self._fails(self.kept[:300])
            self.in_body, self.kept = True, self.kept[end:]
        if not data:
            return self._fails(self.kept)
        if self.in_body and self.kept.endswith(b"0\r\n\r\n") and b"[DONE]" in self.kept[-64:]:
            return self._ends(now)
        if self.in_body:
            self.kept = self.kept[-1024:]
        return False

    def _ends(self, now: float) -> bool:
        if b'"completion_tokens":%d' % self.load.tokens not in self.kept:
            return self._fails(self.kept)
        self.result.tokens += self.load.tokens
        self.result.first.append(self.first - self.sent)
        if self.load.tokens > 1:
            self.result.steps.append((now - self.first) / (self.load.tokens - 1))
        return True

    def _fails(self, said: bytes) -> bool:
        self.result.errors.append(repr(said[-300:]))
        self.left = 0
        return True


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def run(
    load: Load, streams: int, requests: int, *, every_read: Callable[[], object] | None = None
) -> Result:
    """So many connections at once, each with so many requests, one after the other.

    ``every_read`` is called each time that something has come.
    """
    result = Result()
    poll = select.epoll()
    numbers = iter(range(streams * requests))
    connections: dict[int, _Connection] = {}
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", load.port))
        connection = connections[sock.fileno()] = _Connection(load, result, sock, requests)
        connection.ask(next(numbers))
        sock.setblocking(False)
        poll.register(sock, select.EPOLLIN)
    while connections:
        ready = poll.poll(PATIENCE)
        if not ready:
            result.errors += [f"nothing for {PATIENCE:g} s"] * len(connections)
            break
        if every_read is not None:
            every_read()
        for descriptor, _ in ready:
            connection = connections[descriptor]
            if connection.take(_receive(connection.socket)):
                if connection.left:
                    connection.ask(next(numbers))
                else:
                    poll.unregister(descriptor)
                    connections.pop(descriptor).socket.close()
    for connection in connections.values():
        connection.socket.close()
    poll.close()
    return result
