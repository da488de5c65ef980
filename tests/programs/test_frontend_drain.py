"""The drain of a frontend, and of one process, with real sockets: a crowd, faults, impatience."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.programs.conftest import MODEL, status_port, wait_instances
from tests.programs.crowd import Prober, Reader, connect_without_reading, post
from tests.standalone.harness import (
    PATIENCE,
    Http1,
    ask,
    chat,
    finish_all,
    metric,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Json, Server

CHAT = "/v1/chat/completions"
LIMIT = "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"
PATIENT: dict[str, Any] = {LIMIT: "120"}
asks = partial(chat, model=MODEL)
ENDLESS = asks(8000)


def start(fleet: Fleet, program: str, *flags: str, **environ: str) -> Server:
    """A frontend with a worker behind it, or both in one process."""
    if program == "one process":
        named = ("--model-name", MODEL, "--http-port", "0", "--context-tokens", "9000")
        server = fleet.start("dynamo_trio", "--engine", "sim", *named, *flags, **environ)
        return server.wait_ready()
    fleet.worker(*flags, ready=False)
    settings: dict[str, Any] = environ  # mypy takes them for flags
    frontend = fleet.frontend(**settings)
    wait_instances(frontend, 1)
    return frontend


PROGRAMS = ["frontend", "one process"]


# --- a crowd ------------------------------------------------------------------------------------


async def drain_a_crowd(frontend: Server, readers: list[Reader], probers: list[Prober]) -> None:
    """Begin all streams, stop in the middle of them, and see them all end."""
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for run in [one.run for one in readers] + [one.run for one in probers]:
                nursery.start_soon(run)
            for reader in readers:
                await reader.wait_begun()
            frontend.kill(signal.SIGTERM)


def check_probes(frontend: Server, health: Prober, live: Prober) -> None:
    assert set(live.statuses) == {200}
    assert not live.was_torn
    assert not health.was_torn
    turn = health.statuses.index(503)
    assert set(health.statuses[:turn]) == {200}
    assert set(health.statuses[turn:]) == {503}
    stages = [json.loads(body)["stage"] for body in health.bodies[turn:]]
    assert stages == sorted(stages)  # draining, then perhaps stopping
    assert frontend.report["phase"] == "stopped"


def crowd_at_a_stop(fleet: Fleet, readers: int, others: int) -> None:
    """Half of the readers can finish; of the others some take nothing, some have sent half."""
    many = str(readers + others + 10)
    room = ("--max-running", many, "--kv-blocks", "1000000")
    frontend = start(fleet, "frontend", "--itl-ms", "100", *room, **{LIMIT: "4"})
    port = frontend.port
    bodies = [json.dumps(asks(20) if n % 2 else ENDLESS).encode() for n in range(readers)]
    crowd = [Reader(port, body) for body in bodies]
    probers = [Prober(port, "/health"), Prober(port, "/live")]
    with ExitStack() as stack:
        endless = json.dumps(ENDLESS).encode()
        for _ in range(others):
            stack.enter_context(connect_without_reading(port, post(endless) + endless))
            stack.enter_context(connect_without_reading(port, post(endless) + b"{"))
            stack.enter_context(connect_without_reading(port, b"POST /v1"))
            assert stack.enter_context(Http1(port)).ask("GET", "/live").status == 200
        trio.run(drain_a_crowd, frontend, crowd, probers)
        assert frontend.end() == 0
    endings = Counter(reader.ending() for reader in crowd)
    assert set(endings) <= {"done", "cut"}
    assert endings["cut"] >= readers // 2
    report = frontend.report
    ended: Counter[str] = Counter(report["requests"])
    before = report["served_before"]  # while the others began
    assert before + ended["finished"] == endings["done"]
    # Those that take nothing may have all that was sent for them in their buffers.
    assert ended["cut"] + ended["lost"] == endings["cut"] + others
    assert before + ended.total() == readers + others
    assert report["leftovers"] == report["errors"] == []
    assert report["seconds"] < 10 * (4 + 2)
    check_probes(frontend, *probers)


def test_a_crowd_at_a_stop(fleet: Fleet) -> None:
    crowd_at_a_stop(fleet, readers=40, others=4)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_five_hundred_streams_at_a_stop(fleet: Fleet) -> None:
    crowd_at_a_stop(fleet, readers=500, others=20)


# --- faults --------------------------------------------------------------------------------------


def has_three(port: int) -> bool:
    return metric(port, "dynamo_component_inflight_requests") == 3


def untouched(number: int) -> Json:
    """A request that takes its engine 1 s to begin; every second one is streamed."""
    messages = [{"role": "user", "content": str(number) * 1000}]
    return asks(4, messages=messages, stream=bool(number % 2))


@pytest.mark.parametrize("mux", ["only", "off"])
def test_a_worker_that_dies_in_the_drain_costs_only_what_it_has_begun(
    fleet: Fleet, mux: str
) -> None:
    slow = ("--itl-ms", "20", "--prefill-token-us", "1000", "--system-port", "0")
    stays, dies = fleet.worker(*slow, ready=False), fleet.worker(*slow, ready=False)
    frontend = fleet.frontend("--mux", mux, **PATIENT)
    wait_instances(frontend, 2)
    port = frontend.port
    jobs = [partial(ask, port, "POST", CHAT, untouched(number)) for number in range(4)]
    with open_streams(port, 2, asks(100)) as begun, ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job) for job in jobs]
        for worker in (stays, dies):
            wait_until(partial(has_three, status_port(worker)), "each has its half of them")
        frontend.kill(signal.SIGTERM)
        frontend.wait_log("phase draining")
        time.sleep(0.5)
        dies.kill(signal.SIGKILL)
        answers = [job.result() for job in running]
        streams = finish_all(begun)
    assert [answer.status for answer in answers] == [200] * 4
    (broken,) = [answer for answer in streams if not answer.is_done]
    assert broken.error["code"] == "disconnected"
    assert broken.text
    assert frontend.end() == 0
    assert frontend.report["requests"]["finished"] == 5
    assert frontend.report["requests"]["cut"] == 1
    assert frontend.log.count(", after 1 other: complete") == 2
    assert stays.stop() == 0
    assert stays.report["served_before"] == 5


def test_the_store_and_the_workers_may_be_gone(fleet: Fleet) -> None:
    """A frontend that cannot reach anybody any more still stops, and at once."""
    worker = fleet.worker(ready=False)
    frontend = fleet.frontend(**PATIENT)
    wait_instances(frontend, 1)
    assert ask(frontend.port, "POST", CHAT, asks(2)).is_done
    worker.kill(signal.SIGSTOP)
    try:
        frontend.kill(signal.SIGTERM)
        assert frontend.end() == 0
    finally:
        worker.kill(signal.SIGCONT)
    assert frontend.report["seconds"] < 12


# --- impatience -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_a_second_signal_says_farewell_now(fleet: Fleet, first: signal.Signals) -> None:
    frontend = start(fleet, "frontend", "--itl-ms", "50", **PATIENT)
    with open_streams(frontend.port, 4, ENDLESS) as streams:
        frontend.kill(first)
        frontend.wait_log("phase draining")
        frontend.kill(signal.SIGTERM)  # says what is left, and changes nothing
        frontend.wait_log("SIGTERM again")
        frontend.kill(signal.SIGINT)
        answers = finish_all(streams)
    assert frontend.end() == 0
    assert [answer.error["code"] for answer in answers] == ["cut"] * 4
    assert frontend.report["cause"] == first.name
    assert frontend.report["requests"]["cut"] == 4
    assert frontend.report["seconds"] < 60  # of the 120 that it might wait


def test_a_third_sigint_leaves_now(fleet: Fleet) -> None:
    frontend = start(fleet, "frontend", "--itl-ms", "50", **PATIENT)
    with open_streams(frontend.port, 2, ENDLESS):
        frontend.kill(signal.SIGINT)
        frontend.wait_log("phase draining")
        frontend.kill(signal.SIGINT)
        frontend.wait_log("stopping now")
        frontend.kill(signal.SIGINT)
        assert frontend.end() in (0, 130)  # 0: its farewells were over before it came
    assert frontend.report["exit_code"] == frontend.popen.returncode
    assert frontend.report["seconds"] < 60  # of the 120 that it might wait


# --- what Prometheus sees -----------------------------------------------------------------------


def shutdown_series(text: str) -> dict[str, float]:
    """Value by name and labels, of what is told of a stop."""
    prefix = "dynamo_frontend_shutdown_"
    return {
        " ".join([sample.name.removeprefix(prefix), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_shutdown_metrics_are_readable_through_the_whole_stop(
    fleet: Fleet, program: str
) -> None:
    frontend = start(fleet, program, "--itl-ms", "50", **{LIMIT: "2"})
    prober = Prober(frontend.port, "/metrics")
    reader = Reader(frontend.port, json.dumps(ENDLESS).encode())
    trio.run(drain_a_crowd, frontend, [reader], [prober])
    assert frontend.end() == 0
    assert reader.ending() == "cut"
    assert not prober.was_torn
    assert set(prober.statuses) == {200}
    seen = [shutdown_series(body.decode()) for body in prober.bodies]
    remaining = [one["remaining_seconds"] for one in seen if one["remaining_seconds"] < 1e6]
    assert remaining == sorted(remaining, reverse=True)
    assert all(0 <= seconds <= 2 for seconds in remaining)
    assert next(one["inflight_requests"] for one in seen if one["remaining_seconds"] < 1e6) == 1
    assert "stage_seconds skipped router_grace" in seen[-1]


@pytest.mark.parametrize(
    ("program", "signum"), [("frontend", signal.SIGTERM), ("one process", signal.SIGINT)]
)
def test_who_is_idle_leaves_at_once(fleet: Fleet, program: str, signum: signal.Signals) -> None:
    server = start(fleet, program, **PATIENT)
    with ExitStack() as stack:
        stack.enter_context(connect_without_reading(server.port, post(b"x" * 100) + b"{"))
        stack.enter_context(connect_without_reading(server.port, b"POST /v1"))
        assert stack.enter_context(Http1(server.port)).ask("GET", "/live").status == 200
        server.kill(signum)
        assert server.end() == 0
    assert server.report["seconds"] < 12  # of the 120 that it might wait
    phases = {phase["outcome"] for phase in server.report["phases"]}
    assert phases == {"skipped", "completed"}
