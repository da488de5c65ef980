"""A wrapper that checks what is promised to an engine core."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_trio.engines import (
        CachingCore,
        CheckedCore,
        CoreInfo,
        Delta,
        KvEvent,
        Request,
        Stats,
        StepCore,
    )


class WatchedCore:
    """Passes every call on to ``core`` and notes each that breaks the rules of ``StepCore``.

    The rules: calls never overlap (``interrupt`` may), ``close`` comes once and last, and
    a request is added once. :meth:`check` raises what was noted.
    """

    def __init__(self, core: StepCore) -> None:
        self.core = core
        self.closes = 0
        self.interrupts = 0
        self.steps = 0
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.violations: list[str] = []
        self.threads: set[int] = set()
        self._inside = threading.Lock()
        self._current = ""

    def check(self) -> None:
        """Raise AssertionError if a rule was broken."""
        assert not self.violations, "; ".join(self.violations)

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if self.closes and name != "close":
            self.violations.append(f"{name} after close")
        if not self._inside.acquire(blocking=False):
            self.violations.append(f"{name} during {self._current}")
            yield
            return
        self._current = name
        self.threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._inside.release()

    @property
    def info(self) -> CoreInfo:
        """See :class:`~dynamo_trio.engines.StepCore`, as for all that follows."""
        return self.core.info

    def load(self, progress: Callable[[float], None]) -> None:
        """Checked."""
        with self._call("load"):
            self.core.load(progress)

    def add(self, request: Request) -> None:
        """Checked and noted."""
        with self._call("add"):
            self.added.append(request.request_id)
            self.core.add(request)

    def abort(self, request_id: str) -> None:
        """Checked and noted."""
        with self._call("abort"):
            self.aborted.append(request_id)
            if request_id not in self.added:
                self.violations.append(f"abort of {request_id}, which was never added")
            self.core.abort(request_id)

    def step(self) -> Sequence[Delta]:
        """Checked and counted."""
        with self._call("step"):
            self.steps += 1
            return self.core.step()

    def has_work(self) -> bool:
        """Checked."""
        with self._call("has_work"):
            return self.core.has_work()

    def stats(self) -> Stats:
        """Checked."""
        with self._call("stats"):
            return self.core.stats()

    def take_kv_events(self) -> Sequence[KvEvent]:
        """Checked; asked only of a core that says it tells of its cache."""
        with self._call("take_kv_events"):
            return cast("CachingCore", self.core).take_kv_events()

    def check_health(self) -> None:
        """Checked; asked only of a core that says it can be."""
        with self._call("check_health"):
            cast("CheckedCore", self.core).check_health()

    def owed_seconds(self) -> float:
        """Passed on; the host asks it between calls."""
        return self.core.owed_seconds()

    def interrupt(self) -> None:
        """Counted; the only call that may come during another."""
        self.interrupts += 1
        self.core.interrupt()

    def close(self) -> None:
        """Checked and counted."""
        with self._call("close"):
            self.closes += 1
            if self.closes > 1:
                self.violations.append("close was called twice")
            self.core.close()
