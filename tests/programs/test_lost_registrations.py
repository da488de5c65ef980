"""A worker whose registration is lost while it lives: deleted by a stranger, or slept away.

Its streams go on, it registers again by itself, and it stops as if nothing had been.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.programs.conftest import MODEL, Fleet, wait_instances
from tests.programs.lossy_store import LossyStore, open_lossy_store
from tests.standalone.harness import (
    Server,
    ask,
    chat,
    close_server,
    finish_all,
    open_streams,
    wait_until,
)
from tests.standalone.steady import CHAT, SteadyStreams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

asks = partial(chat, model=MODEL)
SLOW = ("--itl-ms", "20")
#: A process that wakes up is late with everything.
GRACE = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
#: What the log says of an instance that is gone.
IS_LOST = "generate/%s no longer stands in the discovery store"
PLANES = {"mux": "only", "tcp": "off"}

SOAK = pytest.mark.soak
each_store = pytest.mark.parametrize("lossy", ["file", "etcd"], indirect=True)
#: Three times the life of a file are half a minute.
quick_store = pytest.mark.parametrize(
    "lossy", [pytest.param("file", marks=SOAK), "etcd"], indirect=True
)


@attrs.define(eq=False)
class Lossy:
    """Processes around a store that loses things."""

    fleet: Fleet
    store: LossyStore

    def worker(self, *flags: str, **environ: str) -> Server:
        told: dict[str, Any] = GRACE | dict(self.store.environ) | environ
        return self.fleet.worker(*flags, ready=False, **told)

    def frontend(self, *flags: str) -> Server:
        environ: dict[str, Any] = dict(self.store.environ)
        return self.fleet.frontend(*flags, **environ)

    def instance_of(self, worker: Server) -> str:
        return worker.wait_log("serving dyn://").rpartition(" ")[2]

    def wait_lost(self, worker: Server) -> None:
        """Let its registration be deleted, and wait until it has noticed."""
        instance_id = self.instance_of(worker)
        self.store.lose(instance_id)
        worker.wait_log(IS_LOST % instance_id)

    def check_stops(self, worker: Server) -> None:
        """It ends for no reason but the signal, and what it has registered goes with it."""
        assert worker.end() == 0
        assert worker.report["leftovers"] == worker.report["errors"] == []
        assert worker.report["cause"] == "SIGTERM"
        assert self.store.is_empty()


@pytest.fixture
def lossy(fleet: Fleet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lossy]:
    with open_lossy_store(request.param, fleet, tmp_path) as store:
        yield Lossy(fleet, store)
        for server in fleet.servers:  # they want to say goodbye to the store
            if server.popen.poll() is None:
                server.kill(signal.SIGTERM)
        assert [wrong for server in fleet.servers if (wrong := close_server(server))] == []


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        server.kill(signal.SIGCONT)


def says(frontend: Server) -> int:
    return ask(frontend.port, "POST", CHAT, asks(4)).status


# --- deleted by a stranger -----------------------------------------------------------------------


@SOAK  # with NVIDIA's frontend it is not
@each_store
def test_a_registration_that_is_deleted_comes_back_and_its_streams_go_on(lossy: Lossy) -> None:
    worker, frontend = lossy.worker(*SLOW), lossy.frontend()
    wait_instances(frontend, 1)
    before = lossy.instance_of(worker)
    with open_streams(frontend.port, 2, asks(150)) as streams:
        lossy.store.lose(before)
        wait_instances(frontend, 0)
        wait_instances(frontend, 1)
        answers = finish_all(streams)
    assert [answer.is_done for answer in answers] == [True, True]
    assert len({answer.text for answer in answers}) == 1
    assert says(frontend) == 200
    assert len(lossy.store.ids()) == 1
    assert (frontend.stop(), worker.stop()) == (0, 0)
    assert lossy.store.is_empty()


def check_stop_while_lost(lossy: Lossy, delay: float, **environ: str) -> Server:
    """A stop that begins so long after the loss was noticed leaves no registration."""
    worker = lossy.worker(**environ)
    lossy.wait_lost(worker)
    time.sleep(delay)
    worker.kill(signal.SIGTERM)
    worker.wait_log("phase grace")
    # What was on its way into the store is taken out again within the limit of that.
    wait_until(lambda: not lossy.store.ids(), "no instance")
    while worker.popen.poll() is None:
        assert lossy.store.ids() == set()
        time.sleep(0.05)
    lossy.check_stops(worker)
    return worker


@each_store
def test_a_stop_while_the_registration_is_lost_waits_for_none(lossy: Lossy) -> None:
    worker = check_stop_while_lost(lossy, 0)
    assert worker.report["seconds"] < 5  # it would be back after 6


@SOAK
@pytest.mark.timeout(300)
@each_store
def test_a_stop_at_any_time_after_a_loss_leaves_no_registration(lossy: Lossy) -> None:
    # The grace period is longer than what it would take to register again.
    grace = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "8", "DYN_TRIO_GRACE_MODE": "fixed"}
    for half_seconds in range(0, 15, 2):
        check_stop_while_lost(lossy, half_seconds / 2, **grace)


# --- three times as long asleep as a registration lives ------------------------------------------


@SOAK
@pytest.mark.timeout(200)
@pytest.mark.parametrize("plane", ["mux", "tcp"])
@each_store
def test_a_worker_that_slept_registers_again_and_nobody_waits_for_it(
    lossy: Lossy, plane: str
) -> None:
    mux = ("--mux", PLANES[plane])
    sleeps, wakes = lossy.worker(*mux), lossy.worker(*mux)
    frontend = lossy.frontend(*mux)
    wait_instances(frontend, 2)
    steady = SteadyStreams(frontend.port, MODEL, (3,))
    steady.learn()
    with frozen(sleeps), steady.running(3):
        time.sleep(3 * lossy.store.ttl)
        wait_instances(frontend, 1)
    steady.check(at_least=20)
    wait_instances(frontend, 2)
    assert wakes.stop() == 0
    wait_instances(frontend, 1)
    assert says(frontend) == 200  # by the one that slept
    assert (frontend.stop(), sleeps.stop()) == (0, 0)
    assert lossy.store.is_empty()


@pytest.mark.timeout(200)
@quick_store
def test_a_worker_that_is_stopped_in_its_sleep_does_not_register_again(lossy: Lossy) -> None:
    worker, frontend = lossy.worker(), lossy.frontend()
    wait_instances(frontend, 1)
    with frozen(worker):
        wait_instances(frontend, 0)
        worker.kill(signal.SIGTERM)
    lossy.check_stops(worker)
    assert frontend.stop() == 0
