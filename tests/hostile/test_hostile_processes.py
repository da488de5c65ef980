"""A worker and a frontend as processes, all ports of which are talked to in bad faith."""

from __future__ import annotations

import json
import random
import resource
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.codec import MSGPACK
from tests.hostile.garbage import NASTY, for_any_port, for_http, handshake, request, say_all
from tests.hostile.test_hostile_stores import litter
from tests.hostile.watched import MIB, Watched, healthy_streams, wait_idle
from tests.programs.conftest import MODEL, Fleet, close_fleet, models, status_port, wait_instances
from tests.standalone.harness import ask, metric, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.standalone.harness import Server

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]


#: What the worker's engine is asked, but for how much it shall say.
ENGINE_REQUEST: dict[str, object] = {
    "model": MODEL,
    "token_ids": [1, 2, 3],
    "sampling_options": {},
    "output_options": {},
    "eos_token_ids": [],
    "annotations": [],
}


@attrs.frozen
class Target:
    """The two processes and their ports."""

    worker: Server
    frontend: Server
    ports: dict[str, int]
    #: Of the worker's endpoint.
    path: str
    store: Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Target]:
    fleet = Fleet(tmp_path_factory.mktemp("hostile"), model_folder)
    home = free_port()
    worker = fleet.worker("--itl-ms", "5", "--system-port", "0", ready=False)
    frontend = fleet.frontend(DYN_TCP_RESPONSE_STREAM_PORT=str(home))
    worker.wait_ready()
    wait_instances(frontend, 1)
    requests = int(worker.wait_log("requests are taken at").rpartition(":")[2])
    ports = {
        "requests": requests,
        "home": home,
        "status": status_port(worker),
        "http": frontend.port,
    }
    (record,) = fleet.records("instances")
    _, _, path = json.loads(record.read_text())["transport"]["tcp"].partition("/")
    yield Target(worker, frontend, ports, path, fleet.store)
    close_fleet(fleet)


@contextmanager
def unharmed(target: Target, *, errors: str = "nothing", slack: int = 64 * MIB) -> Iterator[None]:
    """What is done in the block harms no healthy stream, and leaves nothing behind."""
    watched = Watched(target.worker, slack), Watched(target.frontend, slack)
    with healthy_streams(target.frontend.port):
        yield
    wait_idle(*watched)
    for process in watched:
        process.check(errors=errors)


def generate(target: Target, count: int, reply: HostPort, *, tokens: int = 2000) -> bytes:
    """Requests for the worker's engine that are in good order but for where they send answers."""
    body = ENGINE_REQUEST | {"stop_conditions": {"max_tokens": tokens, "ignore_eos": True}}
    encoded = MSGPACK.encode(body)
    return b"".join(
        request(target.path, reply, subject=f"s{n}", request_id="same", body=encoded)
        for n in range(count)
    )


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


@contextmanager
def descriptors(server: Server, count: int) -> Iterator[None]:
    """The process may have only so many."""
    pid = server.popen.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("seed", SEEDS)
def test_garbage(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    with unharmed(target):
        for name, port in target.ports.items():
            pieces = for_any_port(rng)
            if name in ("status", "http"):
                pieces += for_http(rng)
            say_all(port, pieces, rng)


@pytest.mark.parametrize("name", ["requests", "home", "http"])
def test_a_crowd_that_says_nothing(target: Target, name: str) -> None:
    """It takes a share of the descriptors, and no more."""
    server = target.worker if name == "requests" else target.frontend
    # The HTTP server evicts idle clients once it finds no room, and says so.
    errors = "http: cannot accept connections" if name == "http" else "nothing"
    with unharmed(target, errors=errors), descriptors(server, 200):
        crowd = [dial(target.ports[name]) for _ in range(400)]
        half = [b"", b"\0", b"\0\x05ab", handshake("x")[:20]]
        for number, sock in enumerate(crowd):
            with suppress(OSError):  # it may be closed already
                sock.sendall(half[number % len(half)])
        time.sleep(1)
        for sock in crowd:
            sock.close()
    if name != "http":
        assert any("on which nothing of use was said" in line for line in server.lines)


def test_a_byte_a_second_on_every_port(target: Target) -> None:
    said = {
        "requests": generate(target, 1, HostPort("127.0.0.1", 9)),
        "home": handshake("nobody"),
        "status": b"GET /health HTTP/1.1\r\n",
        "http": b"POST /v1/chat/completions HTTP/1.1\r\n",
    }
    with unharmed(target):
        crowd = [(dial(target.ports[name]), data) for name, data in said.items() for _ in range(9)]
        for second in range(3):
            for sock, data in crowd:
                sock.sendall(data[second : second + 1])
            time.sleep(1)
        for sock, _ in crowd:
            sock.close()


def test_answers_sent_astray(target: Target) -> None:
    """To nobody, to somebody who takes nothing, to the worker itself, to other programs."""
    running = "dynamo_component_inflight_requests"
    with socket.create_server(("127.0.0.1", 0)) as silent, unharmed(target):
        for port in (free_port(), silent.getsockname()[1], *target.ports.values()):
            with dial(target.ports["requests"]) as sock:
                sock.sendall(generate(target, 30, HostPort("127.0.0.1", port)))
                assert sock.makefile("rb").read(30 * 4) == bytes(30 * 4)
        silent.close()
        wait_until(lambda: metric(target.ports["status"], running) <= 1, "all have ended")


def test_bodies_that_are_no_requests(target: Target) -> None:
    """Each is answered, in words or in tokens, and the engine goes on."""
    good = MSGPACK.encode(ENGINE_REQUEST | {"stop_conditions": {"max_tokens": 2}})
    bodies = [
        *(b"", b"\xc0", b"\xff" * 100, b"\x91" * 100_000, good[:-1], good + b"\0", b"{}"),
        *(
            good.replace(b"\x93\x01\x02\x03", ids)
            for ids in (b"\x90", b"\x93\xff\xfe\xfd", b"\xc0")
        ),
        b"\x88" + good[1:] + b"\xaaextra_args" + b"\x81\xa1a" * 900 + b"\x01",
        *(
            MSGPACK.encode(ENGINE_REQUEST | {"stop_conditions": {"max_tokens": 2}} | odd)
            for odd in (
                {"token_ids": [1] * 1_000_000},
                {"token_ids": [2**32 - 1]},
                {"stop_conditions": {"max_tokens": 2**32 - 1, "min_tokens": 2**32 - 1}},
                {"stop_conditions": {"max_tokens": 2, "stop_token_ids": [1] * 100_000}},
                {"sampling_options": {"temperature": float("nan"), "top_p": -1.0, "top_k": -9}},
                {"annotations": [NASTY * 100] * 100},
                {"model": NASTY},
            )
        ),
    ]
    with socket.create_server(("127.0.0.1", 0)) as home, unharmed(target):
        home.settimeout(20)
        for number, body in enumerate(bodies):
            with dial(target.ports["requests"]) as sock:
                reply = HostPort("127.0.0.1", home.getsockname()[1])
                sock.sendall(request(target.path, reply, request_id=f"{number}", body=body))
                assert sock.recv(4) == bytes(4)
                answer, _ = home.accept()
                with answer:
                    answer.settimeout(20)
                    said = b""
                    while not said.endswith(b'"sentinel"') and (piece := answer.recv(65536)):
                        said += piece
            assert b'"error"' in said  # of the prologue, null or not


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_answers_for_a_black_hole(target: Target, count: int) -> None:
    """Its address takes no connection and refuses none. It holds but a few descriptors."""
    with unharmed(target, slack=256 * MIB), descriptors(target.worker, 200), black_hole() as port:
        with dial(target.ports["requests"]) as sock:
            sock.sendall(generate(target, count, HostPort("127.0.0.1", port), tokens=200))
            assert sock.makefile("rb").read(count * 4) == bytes(count * 4)
            time.sleep(1)
            assert Watched(target.worker).descriptors < 100
        running = "dynamo_component_inflight_requests"
        wait_until(lambda: metric(target.ports["status"], running) <= 1, "all are given up")


@contextmanager
def black_hole() -> Iterator[int]:
    """A port on which connections are never made: its queue is full."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_ten_thousand_requests_and_no_acknowledgement_is_read(target: Target) -> None:
    frames = request("nobody/serves-this" * 20, HostPort("127.0.0.1", 9)) * 10_000
    with unharmed(target), dial(target.ports["requests"]) as sock:
        sock.settimeout(2)
        with suppress(TimeoutError):
            sock.sendall(frames)
        assert ask(target.ports["status"], "GET", "/health").status == 200


def test_names_that_nobody_can_look_up(target: Target) -> None:
    hosts = ["..", "a..b", "é" * 70, "nobody.invalid", "a b"]
    with unharmed(target), dial(target.ports["requests"]) as sock:
        sock.sendall(b"".join(generate(target, 20, HostPort(host, 1)) for host in hosts))
        assert sock.makefile("rb").read(4 * 20 * len(hosts)) == bytes(4 * 20 * len(hosts))


def test_wishes_without_end(target: Target) -> None:
    """A client that says stop, or kill, or something else, a hundred thousand times."""
    wishes = [two_part.encode(b'"stop"'), two_part.encode(b'"kill"'), b"\0" * 24, b"\xff" * 24]
    with socket.create_server(("127.0.0.1", 0)) as home, unharmed(target):
        home.settimeout(20)
        with dial(target.ports["requests"]) as sock:
            sock.sendall(generate(target, 4, HostPort("127.0.0.1", home.getsockname()[1])))
            for wish in wishes:
                answer, _ = home.accept()
                with answer, suppress(OSError):
                    answer.sendall(wish * 100_000)


def test_a_crowd_of_callers_for_nobody(target: Target) -> None:
    with unharmed(target):
        for number in range(500):
            with dial(target.ports["home"]) as sock:
                sock.sendall(handshake(f"guess-{number}"))


def test_records_and_cards_of_a_stranger(target: Target) -> None:
    """A store full of garbage beside the one good worker."""
    with unharmed(target, errors="cannot be offered"):
        for bucket in ("instances", "mdc"):
            litter(target.store / "v1" / bucket, bucket)
        time.sleep(3)
        assert "demo" in models(target.frontend.port)
