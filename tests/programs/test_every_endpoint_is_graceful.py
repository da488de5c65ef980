"""The drain waits for the requests of every endpoint that dynamo_trio ships, one test per role."""

from __future__ import annotations

import ast
import inspect
import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

import dynamo_trio
from dynamo_trio import Endpoint, Lifecycle, open_runtime, runtime
from dynamo_trio.config.programs import STANDALONE, WORKER
from dynamo_trio.console import Terminal
from dynamo_trio.endpoint import EndpointService
from dynamo_trio.kv import open_kv_publisher
from dynamo_trio.program.entry import Body, Start
from dynamo_trio.standalone.program import BODY as STANDALONE_BODY
from dynamo_trio.worker.program import BODY as WORKER_BODY

if TYPE_CHECKING:
    from dynamo_trio.config import ProgramSpec


@attrs.define(eq=False)
class Services:
    """Every endpoint that is served: its name, and whether a drain waits for it."""

    graceful: dict[str, bool] = attrs.field(factory=dict)
    enough: int = 1
    served: trio.Event = attrs.field(factory=trio.Event)

    def make(self, name: str, *args: Any, **kwargs: Any) -> EndpointService:
        service = EndpointService(name, *args, **kwargs)
        self.graceful[name] = service.graceful
        if len(self.graceful) >= self.enough:
            self.served.set()
        return service


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    services = Services()
    monkeypatch.setattr(runtime, "EndpointService", services.make)
    return services


async def run_until_served(
    spec: ProgramSpec, body: Body, argv: list[str], services: Services
) -> None:
    """Run a program in this process until it serves as many endpoints as are expected."""
    config = spec.read_config(argv)
    lifecycle = Lifecycle(attrs.evolve(body.timetable(config), grace=0.0))

    async def stop() -> None:
        await services.served.wait()
        lifecycle.request_stop("the test has seen enough")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        await body.run(Start(config, Terminal(io.StringIO()), lifecycle, time.monotonic()))


async def test_a_worker(
    services: Services, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TRIO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "store"))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    services.enough = 2
    argv = ["--engine", "sim", "--model-path", str(model_folder), "--load-ms", "0"]
    await run_until_served(WORKER, WORKER_BODY, argv, services)
    # Its model's endpoint, and that at which others ask for the log of its cache.
    assert len(services.graceful) == 2
    assert services.graceful.pop("generate")
    assert list(services.graceful.values()) == [True]


async def test_everything_in_one_process(services: Services) -> None:
    argv = ["--engine", "sim", "--http-host", "127.0.0.1", "--http-port", "0", "--load-ms", "0"]
    await run_until_served(STANDALONE, STANDALONE_BODY, argv, services)
    assert services.graceful == {"generate": True}


async def test_the_log_of_a_cache(services: Services) -> None:
    async with open_runtime() as process:
        async with open_kv_publisher(process.endpoint("t.b.generate")):
            assert list(services.graceful.values()) == [True]


@pytest.mark.parametrize(
    "method",
    [
        Endpoint.serving,
        Endpoint.serve_endpoint,
        Endpoint.serving_bidirectional,
        Endpoint.serve_bidirectional_endpoint,
    ],
    ids=lambda method: method.__name__,
)
def test_a_program_of_ones_own_by_default(method: Any) -> None:
    assert inspect.signature(method).parameters["graceful_shutdown"].default is True


def test_no_code_of_ours_says_otherwise() -> None:
    package = Path(dynamo_trio.__file__).parent
    said = [
        ast.unparse(node.value)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "graceful_shutdown"
    ]
    assert set(said) == {"graceful_shutdown"}  # one method hands it to another, and no more
