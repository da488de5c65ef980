"""Worker and frontend over the mux plane: which plane they take, how a stop ends, who is frozen."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.plane.tls_files import mutual_tls
from tests.programs.conftest import MODEL, Fleet, status_port, wait_instances
from tests.standalone.harness import (
    Answer,
    Http1,
    Server,
    ask,
    chat,
    finish_all,
    in_parallel,
    metric,
    open_streams,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

CHAT = "/v1/chat/completions"
KEY = "dynamo_trio_mux"
asks = partial(chat, model=MODEL)
SLOW = ("--itl-ms", "20")
LONG_GRACE: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "100"}
GRACE: dict[str, Any] = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
ONLY, OFF = ("--mux", "only"), ("--mux", "off")


def records(fleet: Fleet) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in fleet.records("instances")]


def check_whole(answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert answer.is_done
        assert answer.chunks[-1]["choices"][0]["finish_reason"] == "length"


def says(frontend: Server) -> int:
    return ask(frontend.port, "POST", CHAT, asks(4)).status


def grace(worker: Server) -> str:
    return {str(p["phase"]): str(p["outcome"]) for p in worker.report["phases"]}["grace"]


# --- which plane -------------------------------------------------------------------------------


def test_with_both_planes_mux_is_taken_and_the_grace_period_ends_early(fleet: Fleet) -> None:
    worker = fleet.worker("--system-port", "0", ready=False, **LONG_GRACE)
    frontends = [fleet.frontend() for _ in range(2)]
    for frontend in frontends:
        wait_instances(frontend, 1)
    (record,) = records(fleet)
    assert record["transport"].keys() == {"tcp"}
    assert record[KEY].endswith(f"/{record['instance_id']:x}/generate")
    with open_streams(frontends[0].port, 32, asks(30)) as streams:
        check_whole(finish_all(streams))
    assert worker.stop() == 0
    # Nobody came over tcp, and everybody said that they know: of 100 s it needs next to none.
    assert worker.report["seconds"] < 10
    assert grace(worker) == "completed"
    assert worker.report["leftovers"] == worker.report["errors"] == []
    for server in (worker, *frontends):
        assert "WARNING" not in server.log
        assert "ERROR" not in server.log


def test_streams_that_run_over_mux_end_as_they_would_have(fleet: Fleet) -> None:
    worker = fleet.worker(*SLOW, **LONG_GRACE)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 8, asks(100)) as streams:
        worker.kill(signal.SIGTERM)
        worker.wait_log("phase grace")
        late = ask(frontend.port, "POST", CHAT, asks(4))
        check_whole(finish_all(streams))
    assert worker.end() == 0
    assert (late.status, late.error["code"]) == (503, "no_worker")
    assert worker.report["requests"]["finished"] == 8
    assert grace(worker) == "completed"


def test_one_peer_on_tcp_is_enough_for_all_of_the_grace_period(fleet: Fleet) -> None:
    worker = fleet.worker(**GRACE)
    over_mux, over_tcp = fleet.frontend(), fleet.frontend(*OFF)
    for frontend in (over_mux, over_tcp):
        wait_instances(frontend, 1)
        assert says(frontend) == 200
    assert worker.stop() == 0
    assert grace(worker) == "timed_out"


def test_the_fixed_grace_period_is_kept_whatever_peers_say(fleet: Fleet) -> None:
    worker = fleet.worker(DYN_TRIO_GRACE_MODE="fixed", **GRACE)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    assert says(frontend) == 200
    assert worker.stop() == 0
    assert grace(worker) == "timed_out"


@pytest.mark.soak
def test_a_frontend_that_says_nothing_is_waited_for(fleet: Fleet) -> None:
    worker, frontend = fleet.worker(**GRACE), fleet.frontend()
    wait_instances(frontend, 1)
    assert says(frontend) == 200
    frontend.kill(signal.SIGSTOP)
    try:
        assert worker.stop() == 0
    finally:
        frontend.kill(signal.SIGCONT)
    assert grace(worker) == "timed_out"
    wait_instances(frontend, 0)


def test_mutual_tls_on_mux_alone(fleet: Fleet, tmp_path: Path) -> None:
    tls = mutual_tls(tmp_path)
    files = {
        "CERT_PATH": tls.cert, "KEY_PATH": tls.key, "CLIENT_CA_CERT_PATH": tls.client_ca,
        "CA_CERT_PATH": tls.ca, "CLIENT_CERT_PATH": tls.client_cert,
        "CLIENT_KEY_PATH": tls.client_key,
    }  # fmt: skip
    environ: dict[str, Any] = {f"DYN_TCP_TLS_{name}": str(path) for name, path in files.items()}
    worker = fleet.worker(*ONLY, **environ)
    frontend, plain = fleet.frontend(*ONLY, **environ), fleet.frontend(*ONLY)
    for each in (frontend, plain):
        wait_instances(each, 1)
    assert (says(frontend), says(plain)) == (200, 503)
    assert "ERROR" not in worker.log + frontend.log


def test_mux_alone(fleet: Fleet) -> None:
    worker = fleet.worker(*ONLY, "--itl-ms", "1", DYN_REQUEST_PLANE="tcp")
    frontend, other = fleet.frontend(*ONLY), fleet.frontend(*OFF)
    for each in (frontend, other):
        wait_instances(each, 1)
    (record,) = records(fleet)
    assert record["transport"] == {}
    answers = in_parallel([partial(ask, frontend.port, "POST", CHAT, asks(40))] * 32)
    check_whole(answers)
    assert len({answer.text for answer in answers}) == 1
    refused = ask(other.port, "POST", CHAT, asks(4))
    assert (refused.status, refused.error["code"]) == (503, "no_worker")
    assert "plane that is spoken here" in refused.error["message"]
    assert "plane.tcp" not in worker.log


def test_without_mux(fleet: Fleet) -> None:
    fleet.worker(*OFF)
    frontend, other = fleet.frontend(), fleet.frontend(*ONLY)
    for each in (frontend, other):
        wait_instances(each, 1)
    (record,) = records(fleet)
    assert KEY not in record
    assert (says(frontend), says(other)) == (200, 503)
    assert "WARNING" not in frontend.log


# --- where mux cannot be reached -----------------------------------------------------------------


def announce(fleet: Fleet, address: str) -> None:
    """A second instance, ff: the worker over tcp, which says that its mux is at ``address``."""
    (record,) = records(fleet)
    assert KEY not in record
    (path,) = fleet.records("instances")
    begin = path.name.rpartition("%2F")[0]
    made = record | {"instance_id": 255, KEY: f"{address}/ff/generate"}
    path.with_name(f"{begin}%2Fff").write_text(json.dumps(made))


def check_falls_back(fleet: Fleet, address: str, *flags: str) -> str:
    """Returns the line in which the frontend says so."""
    fleet.worker(*OFF)
    announce(fleet, address)
    frontend = fleet.frontend(*flags)
    wait_instances(frontend, 2)
    assert [says(frontend) for _ in range(2)] == [200] * 2
    began = time.monotonic()
    assert [says(frontend) for _ in range(40)] == [200] * 40
    assert time.monotonic() - began < 50  # no request has waited for what is known not to come
    (told,) = [line for line in frontend.lines if "is asked over tcp" in line]
    assert "WARNING client: instance ff of dyn://dynamo.backend.generate is asked over tcp" in told
    return told


def test_a_mux_port_that_nobody_listens_on(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "since over mux it is not reached" in check_falls_back(fleet, f"127.0.0.1:{port}")


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Somebody who says this to whoever connects; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_all, args=(server, answer), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _answer_all(server: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, suppress(ConnectionError):
            connection.sendall(answer)
            while connection.recv(65536):
                pass


@pytest.mark.soak
def test_a_mux_port_that_speaks_something_else(fleet: Fleet) -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        check_falls_back(fleet, address)


@pytest.mark.soak
def test_a_mux_port_that_says_nothing(fleet: Fleet) -> None:
    with listening(b"") as address:
        told = check_falls_back(fleet, address, "--tcp-connect-timeout", "2")
    assert "hello within 2 s" in told


# --- who is frozen -------------------------------------------------------------------------------

#: The heartbeat of the frontends below. A worker is silent after two of them.
BEAT = ("--heartbeat-secs", "0.5")


def test_a_frozen_worker_gets_nothing_new_and_its_streams_end(fleet: Fleet) -> None:
    frozen = fleet.worker(*SLOW, "--system-port", "0")
    frontend = fleet.frontend(*BEAT)
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 2, asks(8000)) as streams:
        # The other one is there before: who is frozen loses its registration after a while.
        fleet.worker("--system-port", "0")
        wait_instances(frontend, 2)
        frozen.kill(signal.SIGSTOP)
        try:
            # Whatever was sent to the frozen one before it was found out has ended by now.
            wait_until(lambda: [says(frontend) for _ in range(4)] == [200] * 4, "it is avoided")
            began = time.monotonic()
            assert [says(frontend) for _ in range(20)] == [200] * 20
            assert time.monotonic() - began < 50  # each that waited would take ten seconds
            answers = finish_all(streams)
        finally:
            frozen.kill(signal.SIGCONT)
    for answer in answers:
        assert answer.error["code"] == "disconnected"
    # Awake, it finds that nobody wants its old streams, and serves again.
    port = status_port(frozen)
    wait_until(
        lambda: metric(port, "dynamo_component_inflight_requests") == 0, "they are cancelled"
    )
    before = metric(port, "dynamo_component_requests_total")

    def serves_again() -> bool:
        assert says(frontend) == 200
        return metric(port, "dynamo_component_requests_total") > before

    wait_until(serves_again, "the worker that was frozen serves again")


def test_a_frontend_that_was_frozen_judges_no_one(fleet: Fleet) -> None:
    worker = fleet.worker(*SLOW)
    frontend = fleet.frontend(*BEAT)
    wait_instances(frontend, 1)
    with open_streams(frontend.port, 4, asks(150)) as streams:
        frontend.kill(signal.SIGSTOP)
        time.sleep(2)  # four heartbeats, in which the worker sends what it has
        frontend.kill(signal.SIGCONT)
        assert says(frontend) == 200
        check_whole(finish_all(streams))
    assert "WARNING" not in frontend.log
    assert "WARNING" not in worker.log


@pytest.mark.soak
def test_a_prefill_of_a_minute(fleet: Fleet) -> None:
    fleet.worker("--prefill-ms", "60000", DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS="100")
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    with Http1(frontend.port) as connection:
        connection.socket.settimeout(120)
        check_whole([connection.ask("POST", CHAT, asks(2))])
