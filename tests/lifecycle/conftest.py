"""A lifecycle in its nest, with requests that behave as told."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import pytest
import trio

from dynamo_trio.lifecycle import Admission, Gate, Lifecycle, Timetable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@attrs.define(eq=False)
class Request:
    """One request as a test sees it."""

    admission: Admission | None = None
    left: float | None = None


@attrs.define(eq=False)
class World:
    """A running lifecycle; times count from its beginning."""

    lifecycle: Lifecycle
    work: trio.Nursery
    began: float = attrs.field(factory=trio.current_time)

    @property
    def now(self) -> float:
        return trio.current_time() - self.began

    def request(
        self,
        seconds: float,
        *,
        gate: Gate | None = None,
        farewell: float = 0.0,
        stubborn: bool = False,
        **options: Any,
    ) -> Request:
        """A request that needs ``seconds``, and when it is cut ``farewell`` for its last word.

        A stubborn one takes its time for both, whatever happens, until it is aborted.
        """
        request = Request()
        gate = self.lifecycle.work if gate is None else gate
        self.work.start_soon(self._run, request, gate, seconds, farewell, stubborn, options)
        return request

    async def _run(
        self,
        request: Request,
        gate: Gate,
        seconds: float,
        farewell: float,
        stubborn: bool,
        options: dict[str, Any],
    ) -> None:
        with gate.admit(f"{gate.name} {seconds:g}", **options) as request.admission:
            if stubborn:
                await trio.sleep(seconds)
            else:
                with request.admission.scope:
                    await trio.sleep(seconds)
            if request.admission.reason is not None:
                await trio.sleep(farewell)
        request.left = self.now

    def outcomes(self) -> dict[str, str]:
        """How each phase and step ended, by name."""
        report = self.lifecycle.report()
        stages = (*report.phases, *report.steps)
        return {s.name: "unfinished" if s.ending is None else s.ending.value for s in stages}

    def seconds(self) -> dict[str, float]:
        """How long each phase and step took, by name."""
        report = self.lifecycle.report()
        return {s.name: s.seconds for s in (*report.phases, *report.steps) if s.seconds is not None}


class Running(Protocol):
    def __call__(
        self, timetable: Timetable = ..., **options: Any
    ) -> AbstractAsyncContextManager[World]: ...


@pytest.fixture
def running() -> Running:
    """``async with running(timetable) as world``: left in STOPPED, with nobody inside."""

    @asynccontextmanager
    async def run(timetable: Timetable = Timetable(), **options: Any) -> AsyncIterator[World]:  # noqa: B008 - frozen
        lifecycle = Lifecycle(timetable, **options)
        async with trio.open_nursery() as outer:
            outer.start_soon(lifecycle.run)
            async with trio.open_nursery() as work:
                lifecycle.on_abort(lambda: work.cancel_scope.cancel("abort"))
                yield World(lifecycle, work)
                await lifecycle.wait_stopped()
                assert lifecycle.in_flight() == ()

    return run
