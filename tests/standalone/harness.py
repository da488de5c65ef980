"""``python -m dynamo_trio`` as a real process, and clients that let nothing pass unseen.

Nothing here sleeps for a fixed time to be "sure enough": a test waits for a log line, for bytes
on a socket, or for the end of the process. The limits of those waits are many times what is
needed and only end a test that would hang.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import h11

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

#: Ends a wait that would hang, in seconds.
PATIENCE = 60.0
LISTENING = re.compile(r"listening on http://[^\s:]+:(\d+)")

Json = dict[str, Any]
T = TypeVar("T")


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without settings that a developer may have made."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DYN_", "OTEL_")) or name == "DYN_TRIO_CACHE_DIR"
    }
    return kept | more


def in_parallel(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Run each job in a thread of its own; the results in order, or the first error."""
    todo = list(jobs)
    with ThreadPoolExecutor(len(todo)) as pool:
        return [future.result() for future in [pool.submit(job) for job in todo]]


@attrs.define(eq=False)
class Server:
    """A running ``python -m dynamo_trio``. Its standard error is read by a thread."""

    popen: subprocess.Popen[str]
    lines: list[str] = attrs.field(factory=list)
    _news: threading.Condition = attrs.field(factory=threading.Condition)
    _ended: bool = False
    _may_read: threading.Event = attrs.field(factory=threading.Event)
    _reader: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._may_read.set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
            self._may_read.wait()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def pause_reading(self) -> Callable[[], None]:
        """Read no more than one line of its standard error until what this returns is called."""
        self._may_read.clear()
        return self._may_read.set

    # --- its log ------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_log(self, text: str, *, times: int = 1) -> str:
        """Wait for the line that contains ``text`` (the ``times``-th such), and return it."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= times or self._ended, PATIENCE)
            assert len(found()) >= times, f"no {text!r} in:\n{self.log}"
            return found()[times - 1]

    @property
    def port(self) -> int:
        """Where it listens; waits until it does."""
        match = LISTENING.search(self.wait_log("listening on"))
        assert match is not None
        return int(match[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Server:
        self.wait_log("is ready after")
        return self

    # --- its end ------------------------------------------------------------------------

    def kill(self, signum: signal.Signals) -> None:
        """Send a signal, to this one process."""
        self.popen.send_signal(signum)

    def end(self) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def stop(self) -> int:
        """SIGTERM, and wait."""
        self.kill(signal.SIGTERM)
        return self.end()

    @property
    def report(self) -> Json:
        """The shutdown report: one line of JSON, and the last one."""
        reports = [line for line in self.lines if line.startswith('{"event":"shutdown_report"')]
        assert reports == self.lines[-1:], self.log
        report = json.loads(reports[0])
        assert isinstance(report, dict)
        return report


def start_server(*flags: str, **environ: str) -> Server:
    """Start the process; its port is any free one."""
    popen = subprocess.Popen(
        [sys.executable, "-m", "dynamo_trio", "--http-port", "0", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(**environ),
    )
    return Server(popen)


def close_server(server: Server) -> str | None:
    """End a process that its test has left running. Returns what was wrong with it, if anything."""
    wrong = None
    server._may_read.set()
    if server.popen.poll() is None:
        wrong = _end_by_signals(server.popen)
    server._reader.join(PATIENCE)
    assert server.popen.stdout is not None
    assert server.popen.stderr is not None
    server.popen.stdout.close()
    server.popen.stderr.close()
    return wrong


def _end_by_signals(popen: subprocess.Popen[str]) -> str | None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        popen.send_signal(signum)
        try:
            popen.wait(PATIENCE / 4)
        except subprocess.TimeoutExpired:
            continue
        return None if signum is signal.SIGTERM else f"process {popen.pid} needed {signum.name}"
    popen.kill()
    popen.wait()
    return f"process {popen.pid} had to be killed"


def handles_sigterm(pid: int) -> bool:
    """Has the process installed a handler for SIGTERM? As the kernel sees it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False  # it has ended


# --- clients ------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """A whole HTTP/1.1 answer: its end was seen, by terminator or by length."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        blocks = [block for block in text.split("\n\n") if block]
        lines = [line for block in blocks for line in block.split("\n")]
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[Json]:
        """The events but for ``[DONE]``."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def is_done(self) -> bool:
        """Was it a stream that said that it is complete?"""
        return self.events[-1] == "[DONE]"

    @property
    def text(self) -> str:
        """What a stream of a chat has said."""
        pieces = [c["choices"][0]["delta"].get("content") for c in self.chunks if c.get("choices")]
        return "".join(piece or "" for piece in pieces)

    @property
    def error(self) -> Json:
        """The error event that a broken stream ends with, or the error of the body."""
        if "text/event-stream" not in self.headers["content-type"]:
            error = self.json()["error"]
        else:
            assert "[DONE]" not in self.events
            error = self.chunks[-1]["error"]
        assert isinstance(error, dict)
        return error


class Http1:
    """One HTTP/1.1 connection, strict about framing: a torn answer raises."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(PATIENCE)
        self._h11 = h11.Connection(h11.CLIENT)

    def __enter__(self) -> Http1:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, method: str, path: str, body: Json | None = None, **headers: str) -> None:
        """Send a whole request."""
        data = b"" if body is None else json.dumps(body).encode()
        fields = {"host": "localhost", "content-length": str(len(data))}
        if body is not None:
            fields["content-type"] = "application/json"  # Dynamo's own frontend insists on it
        fields |= headers
        head = h11.Request(method=method, target=path, headers=list(fields.items()))
        events = (head, h11.Data(data=data), h11.EndOfMessage())
        self.socket.sendall(b"".join(self._h11.send(event) or b"" for event in events))

    def next_event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            self._h11.receive_data(self.socket.recv(65536))

    def read_head(self) -> tuple[int, dict[str, str]]:
        head = self.next_event()
        assert isinstance(head, h11.Response), head
        return head.status_code, {k.decode().lower(): v.decode() for k, v in head.headers}

    def read_piece(self) -> bytes | None:
        """The next bytes of the body; None at its proper end."""
        event = self.next_event()
        if isinstance(event, h11.EndOfMessage):
            return None
        assert isinstance(event, h11.Data), event
        return bytes(event.data)

    def read(self) -> Answer:
        """Read a whole answer."""
        status, headers = self.read_head()
        body = b"".join(iter(self.read_piece, None))
        if self._h11.their_state is h11.DONE and self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        return Answer(status, headers, body)

    def read_rest(self, status: int, headers: Mapping[str, str], begun: bytes) -> Answer:
        """The rest of an answer of which a part was read piece by piece."""
        return Answer(status, headers, begun + b"".join(iter(self.read_piece, None)))

    def ask(self, method: str, path: str, body: Json | None = None, **headers: str) -> Answer:
        self.send(method, path, body, **headers)
        return self.read()


def ask(port: int, method: str, path: str, body: Json | None = None, **headers: str) -> Answer:
    """One request on a connection of its own."""
    with Http1(port) as connection:
        return connection.ask(method, path, body, **headers)


def chat(max_tokens: int = 32, *, model: str = "sim", stream: bool = True, **more: object) -> Json:
    """The body of a chat request that goes on until ``max_tokens``."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": max_tokens,
        "stream": stream,
        "ignore_eos": True,
        **more,
    }


@attrs.define(eq=False)
class Stream:
    """A streamed chat of which the first words have come; the rest is read in :meth:`finish`."""

    connection: Http1
    status: int
    headers: dict[str, str]
    begun: bytes

    def finish(self) -> Answer:
        return self.connection.read_rest(self.status, self.headers, self.begun)


@contextmanager
def open_streams(port: int, count: int, body: Json) -> Iterator[list[Stream]]:
    """``count`` streams, all of them begun."""
    connections = [Http1(port) for _ in range(count)]
    try:
        for connection in connections:
            connection.send("POST", "/v1/chat/completions", body)
        yield in_parallel([partial(_begin, connection) for connection in connections])
    finally:
        for connection in connections:
            connection.socket.close()


def _begin(connection: Http1) -> Stream:
    status, headers = connection.read_head()
    assert status == 200
    begun = connection.read_piece()
    assert begun is not None
    return Stream(connection, status, headers, begun)


def finish_all(streams: Iterable[Stream]) -> list[Answer]:
    return in_parallel([stream.finish for stream in streams])


def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels."""
    answer = ask(port, "GET", "/metrics")
    assert answer.status == 200
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.body.decode(), re.MULTILINE)
    return sum(map(float, values))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask until the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"in vain waited for: {what}"
        time.sleep(0.02)


def wait_stalled(port: int) -> None:
    """Wait until tokens have been generated, and no more are."""

    def generated() -> float:
        return metric(port, "dynamo_frontend_inter_token_latency_seconds_count")

    def stalled() -> bool:
        before = generated()
        time.sleep(0.2)
        return 0 < before == generated()

    wait_until(stalled, "the engine stalls")
