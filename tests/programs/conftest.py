"""Workers and frontends as processes, around one store in a folder of the test's own."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio.testing import make_model_folder
from tests.standalone.harness import Server, ask, clean_environ, close_server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What the tests' model is called.
MODEL = "demo"


@attrs.define(eq=False)
class Fleet:
    """Processes that find each other, and nobody else."""

    folder: Path
    model: Path
    servers: list[Server] = attrs.field(factory=list)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def start(self, module: str, *flags: str, **environ: str) -> Server:
        """Start a program; it may not be ready yet."""
        return self.run(sys.executable, "-m", module, *flags, **environ)

    def run(self, *command: str, **environ: str) -> Server:
        """Start a program by a command of one's own."""
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(**(self.environ | environ)),
        )
        self.servers.append(Server(popen))
        return self.servers[-1]

    @property
    def environ(self) -> dict[str, str]:
        return {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.store),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_TRIO_CACHE_DIR": str(self.folder / "cache"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
        }

    @property
    def named(self) -> tuple[str, ...]:
        """The flags of a worker with the simulated engine on the tests' model."""
        return ("--engine", "sim", "--model-path", str(self.model), "--model-name", MODEL)

    def worker(self, *flags: str, ready: bool = True, **environ: str) -> Server:
        """A worker with the simulated engine on the tests' model."""
        server = self.start("dynamo_trio.worker", *self.named, *flags, **environ)
        return server.wait_ready() if ready else server

    def frontend(self, *flags: str, ready: bool = True, **environ: str) -> Server:
        """A frontend on any free port."""
        bound = ("--http-host", "127.0.0.1", "--http-port", "0")
        server = self.start("dynamo_trio.frontend", *bound, *flags, **environ)
        return server.wait_ready() if ready else server

    def records(self, bucket: str) -> list[Path]:
        """The files of the store's ``v1/BUCKET``, but for instances that help a worker's other
        one, which come and go with it."""
        files = (self.store / "v1" / bucket).glob("[!.]*")
        return sorted(path for path in files if "worker%5Fkv%5Fquery" not in path.name)


def models(port: int) -> list[str]:
    """What a frontend offers."""
    return [model["id"] for model in ask(port, "GET", "/v1/models").json()["data"]]


def instances(port: int) -> list[int]:
    """The instances that a frontend knows."""
    return [i["instance_id"] for i in ask(port, "GET", "/health").json()["instances"]]


def wait_instances(frontend: Server, count: int) -> None:
    """Wait until a frontend can route to so many instances."""
    port = frontend.port
    wait_until(lambda: len(instances(port)) == count, f"{count} instances")


def status_port(worker: Server) -> int:
    """Where a worker's status server listens; waits until it does."""
    return int(worker.wait_log("status server on").rpartition(":")[2])


def close_fleet(fleet: Fleet) -> None:
    """End what a fleet has left running; fail if something does not end politely."""
    for server in fleet.servers:  # all at once, so that none waits for another's grace period
        server.kill(signal.SIGTERM)
    wrong = [complaint for server in fleet.servers if (complaint := close_server(server))]
    if wrong:
        pytest.fail("; ".join(wrong))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fleet(tmp_path: Path, model_folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, model_folder)
    yield fleet
    close_fleet(fleet)


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[tuple[Server, Server]]:
    """A worker with a status server and a frontend that knows it; not to be stopped."""
    fleet = Fleet(tmp_path_factory.mktemp("pair"), model_folder)
    worker = fleet.worker("--itl-ms", "1", "--system-port", "0", ready=False)
    frontend = fleet.frontend()
    worker.wait_ready()
    wait_until(partial(_offers, frontend), "the model is offered")
    yield worker, frontend
    close_fleet(fleet)


def _offers(frontend: Server) -> bool:
    return MODEL in models(frontend.port)
