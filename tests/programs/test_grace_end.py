"""When a worker's grace period ends: what its peers have said, and who cannot say anything."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.lifecycle import GraceMode, Lifecycle, Phase, Timetable
from dynamo_trio.plane import Acknowledgements, Planes
from dynamo_trio.program.network import wait_unreachable
from tests.runtime.fake_planes import FakePlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

FULL = 5.0
FLOOR = 0.25


@attrs.define(eq=False)
class Stop:
    """A process that is stopping; times count from the signal."""

    lifecycle: Lifecycle
    mux: FakePlane
    tcp: FakePlane
    nursery: trio.Nursery
    began: float

    def at(self, seconds: float, happens: Callable[[], object]) -> None:
        """Let something happen then."""

        async def later() -> None:
            await trio.sleep(seconds)
            happens()

        self.nursery.start_soon(later)

    def tcp_peer_comes(self) -> None:
        self.tcp.has_silent_peers = True

    def request(self, seconds: float) -> None:
        """A request that is admitted now and runs so long."""

        async def run() -> None:
            with self.lifecycle.work.admit("r"):
                await trio.sleep(seconds)

        self.nursery.start_soon(run)

    @property
    def detail(self) -> object:
        """What the report says of the grace period."""
        return json.loads(self.lifecycle.report().to_json())["phases"][0].get("detail")

    async def grace(self) -> float:
        """How long the grace period was, once it is over."""
        await self.lifecycle.wait_phase(Phase.DRAINING)
        return round(trio.current_time() - self.began, 6)


@asynccontextmanager
async def stopping(*, mode: GraceMode = GraceMode.AUTO) -> AsyncIterator[Stop]:
    mux, tcp = FakePlane("mux"), FakePlane("tcp")
    tcp.acknowledged.set()  # has nobody who could
    lifecycle = Lifecycle(Timetable(grace=FULL, grace_floor=FLOOR, grace_mode=mode))
    planes = Planes.of([mux, tcp])
    lifecycle.grace_over = partial(wait_unreachable, planes, lifecycle.explain_grace)
    lifecycle.places = lambda: planes.places
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        await wait_all_tasks_blocked()
        lifecycle.request_stop("SIGTERM")
        yield Stop(lifecycle, mux, tcp, nursery, trio.current_time())
        await lifecycle.wait_stopped()


async def test_with_every_acknowledgement_it_ends_at_the_floor(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        assert await stop.grace() == FLOOR


async def test_it_ends_with_the_last_acknowledgement(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        stop.at(2, stop.mux.acknowledged.set)
        assert await stop.grace() == 2


async def test_without_an_acknowledgement_it_is_kept_in_full(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        assert await stop.grace() == FULL


async def test_it_waits_for_what_is_in_flight(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.request(3)
        assert await stop.grace() == 3


async def test_a_tcp_peer_cannot_acknowledge(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.tcp_peer_comes()
        assert await stop.grace() == FULL


async def test_a_tcp_peer_that_comes_before_the_floor_brings_it_back(
    autojump_clock: MockClock,
) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.at(FLOOR - 0.01, stop.tcp_peer_comes)
        assert await stop.grace() == FULL


async def test_a_tcp_peer_that_comes_before_the_last_acknowledgement_brings_it_back(
    autojump_clock: MockClock,
) -> None:
    async with stopping() as stop:
        stop.at(1, stop.tcp_peer_comes)
        stop.at(2, stop.mux.acknowledged.set)
        assert await stop.grace() == FULL


async def test_a_tcp_peer_that_comes_while_something_is_in_flight_brings_it_back(
    autojump_clock: MockClock,
) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.request(2)
        stop.at(1, stop.tcp_peer_comes)
        assert await stop.grace() == FULL


async def test_a_mux_peer_that_comes_while_something_is_in_flight_must_acknowledge_too(
    autojump_clock: MockClock,
) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.request(2)

        def another_comes() -> None:
            stop.mux.acknowledged = trio.Event()

        stop.at(1, another_comes)
        stop.at(4, lambda: stop.mux.acknowledged.set())
        assert await stop.grace() == 4


async def test_the_fixed_mode_asks_nobody(autojump_clock: MockClock) -> None:
    async with stopping(mode=GraceMode.FIXED) as stop:
        stop.mux.acknowledged.set()
        assert await stop.grace() == FULL


async def test_the_places_of_all_planes_count(autojump_clock: MockClock) -> None:
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.mux.places, stop.tcp.places = 3, 4
        assert stop.lifecycle.places() == 7
        assert await stop.grace() == FLOOR


# --- what is said of it -------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "dynamo_trio.lifecycle"]
    return lines[lines.index("phase grace") + 1 : lines.index("phase draining")]


async def test_the_log_says_whom_it_waits_for(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stopping() as stop:
        stop.mux.acknowledgements = Acknowledgements(2, ("10.0.0.1:7",))

        def acknowledge() -> None:
            stop.mux.acknowledgements = Acknowledgements(2)
            stop.mux.acknowledged.set()

        stop.at(2, acknowledge)
        assert await stop.grace() == 2
        end = "peers: 2 of 2 have acknowledged, none on tcp"
        assert said(caplog) == ["waiting for 1 of 2 peers (10.0.0.1:7)", end]
        assert stop.detail == end


async def test_the_log_names_a_few_of_many(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stopping() as stop:
        stop.mux.acknowledgements = Acknowledgements(9, tuple("abcdef"))
        assert await stop.grace() == FULL
        assert said(caplog) == ["waiting for 6 of 9 peers (a, b, c, d, ...)"]
        assert stop.detail == said(caplog)[0]


async def test_the_log_says_that_a_peer_is_on_tcp(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.tcp_peer_comes()
        assert await stop.grace() == FULL
        kept = "the full grace period is kept: a peer is on tcp, and cannot acknowledge"
        assert said(caplog) == [kept]
        assert stop.detail == kept


async def test_the_log_says_what_is_in_flight(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stopping() as stop:
        stop.mux.acknowledged.set()
        stop.request(3)
        assert await stop.grace() == 3
        nobody = "peers: none is connected over mux, none on tcp"
        waits = "the grace period goes on: 1 request of 1 endpoint in flight: r"
        assert said(caplog) == [nobody, waits, nobody]


async def test_the_log_says_that_it_is_fixed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stopping(mode=GraceMode.FIXED) as stop:
        assert await stop.grace() == FULL
        assert said(caplog) == ["the full grace period is kept: DYN_TRIO_GRACE_MODE is fixed"]
        stop.lifecycle.explain_grace("too late")
        assert stop.detail == said(caplog)[0]
