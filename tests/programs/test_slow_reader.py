"""A worker process whose client takes nothing of an answer that the engine has given whole."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.codec import MSGPACK
from tests.hostile.garbage import request
from tests.programs.conftest import MODEL, status_port
from tests.standalone.harness import ask, wait_until

if TYPE_CHECKING:
    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

#: Of an answer that is more than the sockets take and less than what holds a handler back.
TOKENS = 600
BODY = {
    "model": MODEL,
    "token_ids": [1, 2, 3],
    "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True},
    "sampling_options": {},
    "output_options": {},
    "eos_token_ids": [],
    "annotations": [],
}


def send(fleet: Fleet, worker: Server, home: socket.socket) -> None:
    """Send the request over the ``tcp`` plane; its answer comes to ``home``."""
    (record,) = fleet.records("instances")
    path = json.loads(record.read_text())["transport"]["tcp"].partition("/")[2]
    port = int(worker.wait_log("requests are taken at").rpartition(":")[2])
    reply_to = HostPort("127.0.0.1", home.getsockname()[1])
    body = MSGPACK.encode(BODY)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request(path, reply_to, request_id="slow", body=body))
        assert connection.recv(4) == bytes(4)


def read_all(connection: socket.socket) -> bytes:
    said = bytearray()
    with suppress(OSError):
        while piece := connection.recv(4096):
            said += piece
    return bytes(said)


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param(True, id="who reads at last"),
        pytest.param(False, id="who never reads", marks=pytest.mark.soak),
    ],
)
def test_what_has_not_left_is_waited_for_and_if_it_never_leaves_it_is_lost(
    fleet: Fleet, reads: bool
) -> None:
    limit = "60" if reads else "0.5"
    worker = fleet.worker(
        *("--itl-ms", "0.2", "--system-port", "0"),
        ready=False,
        DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS=limit,
        DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0",
        DYN_TRIO_EXIT_CODE_ON_LOSS="9",
    )
    worker.wait_ready()
    port = status_port(worker)

    def drain() -> dict[str, object]:
        return dict(ask(port, "GET", "/drain").json())

    def is_given() -> bool:
        requests = drain()["requests"]
        assert isinstance(requests, list)
        return [one["estimate_seconds"] for one in requests] == [0.0]

    with socket.socket() as home:
        home.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        home.bind(("127.0.0.1", 0))
        home.listen()
        home.settimeout(30)
        send(fleet, worker, home)
        with home.accept()[0] as answer:
            answer.settimeout(30)
            wait_until(is_given, "the engine has given everything")
            worker.kill(signal.SIGTERM)
            worker.wait_log("draining")
            assert drain()["in_flight"] == 1
            assert drain()["safe_to_delete"] is False
            if reads:
                assert read_all(answer).endswith(b'"sentinel"')
            code = worker.end()
    told = worker.report["requests"]
    assert (code, told["finished"], told["cut"]) == ((0, 1, 0) if reads else (9, 0, 1))
