"""Streams that keep coming while workers are restarted in turn under them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from tests.standalone.harness import ask, chat, in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.standalone.harness import Answer, Json

CHAT = "/v1/chat/completions"
WHOLE = "whole"

W = TypeVar("W")


@attrs.define(eq=False)
class SteadyStreams:
    """So many streams at any time: whenever one ends, the next begins.

    Their lengths take turns, so that at every moment some are about to end and some are not.
    """

    port: int
    model: str
    #: In tokens.
    lengths: Sequence[int]
    #: How each one ended: ``whole``, or what was wrong.
    endings: Counter[str] = attrs.field(factory=Counter)
    #: From the request to the end, in seconds.
    slowest: float = 0.0
    _texts: dict[int, str] = attrs.field(factory=dict)
    _over: threading.Event = attrs.field(factory=threading.Event)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def learn(self) -> None:
        """Find out what nobody disturbs: what an answer of each length says."""
        answers = in_parallel([partial(self._ask, length) for length in self.lengths])
        for length, answer in zip(self.lengths, answers, strict=True):
            assert (answer.status, answer.is_done) == (200, True)
            self._texts[length] = answer.text
        assert len(set(self._texts.values())) == len(self.lengths)

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Keep ``count`` streams going; at the end, wait for the last of them."""
        threads = [
            threading.Thread(target=self._go_on, args=(first,), daemon=True)
            for first in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def __str__(self) -> str:
        return f"{dict(self.endings)}, the slowest after {self.slowest:.1f} s"

    def check(self, at_least: int) -> None:
        """There were that many, and none has failed."""
        assert list(self.endings) == [WHOLE]
        assert self.endings[WHOLE] >= at_least

    def _ask(self, length: int) -> Answer:
        usage = {"include_usage": True}
        body = chat(length, model=self.model, stream_options=usage)
        return ask(self.port, "POST", CHAT, body)

    def _go_on(self, turn: int) -> None:
        while not self._over.is_set():
            length = self.lengths[turn % len(self.lengths)]
            began = time.monotonic()
            ending = self._one(length)
            took = time.monotonic() - began
            with self._lock:
                self.endings[ending] += 1
                self.slowest = max(self.slowest, took)
            turn += 1

    def _one(self, length: int) -> str:
        try:
            answer = self._ask(length)
        except Exception as exc:  # it counts, whatever it is
            return f"{type(exc).__name__}: {exc}"
        return self._judge(answer, length)

    def _judge(self, answer: Answer, length: int) -> str:
        if answer.status != 200:
            return f"status {answer.status}: {answer.body[:200].decode()}"
        if not answer.is_done or any("error" in chunk for chunk in answer.chunks):
            return f"broken: {answer.events[-1][:200]}"
        if answer.text != self._texts[length]:
            return "another text"
        if answer.chunks[-1]["usage"]["completion_tokens"] != length:
            return "another number of tokens"
        return WHOLE


# --- the restarts --------------------------------------------------------------------------------


@attrs.define(eq=False)
class Rolling(Generic[W]):
    """Workers of one model that are restarted one after the other."""

    #: Starts one.
    new: Callable[[], W]
    #: Waits until it takes requests.
    wait_known: Callable[[W], object]
    #: Stops one; returns its shutdown report.
    stop: Callable[[W], Json]
    workers: list[W] = attrs.field(factory=list)
    #: Of each that has left.
    reports: list[Json] = attrs.field(factory=list)

    def start(self, count: int) -> None:
        self.workers = [self.new() for _ in range(count)]
        for worker in self.workers:
            self.wait_known(worker)

    def restart_for(self, seconds: float) -> None:
        """Each in turn, until the time is over and each has had its turn."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self.reports) < len(self.workers):
            self.restart_next()

    def restart_next(self) -> None:
        """As Kubernetes does it: the new one is there before the old one is told to go."""
        new, old = self.new(), self.workers.pop(0)
        self.wait_known(new)
        self.workers.append(new)
        self.reports.append(self.stop(old))

    def requests(self, what: str) -> int:
        """How many requests have ended so at those that have left."""
        return sum(report["requests"][what] for report in self.reports)

    def __str__(self) -> str:
        lines = (f"{report['seconds']:.2f} s {report['requests']}" for report in self.reports)
        return "\n".join([f"{len(self.reports)} restarts", *lines])
