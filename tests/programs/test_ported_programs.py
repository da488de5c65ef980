"""Programs made with ``@dynamo_worker()``, as processes: what they get besides a runtime."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import attrs
import httpx
import pytest

from tests.standalone.harness import PATIENCE, Server, clean_environ, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.programs.conftest import Fleet

PROGRAM = """
from dynamo_trio.process import signals
signals.install()
import logging
import trio
from dynamo_trio import dynamo_worker
from dynamo_trio.process import run_process

logger = logging.getLogger(__name__)

async def letters(request):
    for letter in request:
        yield letter

async def show(body):
    return {"seen": body}

@dynamo_worker()
async def main(runtime):
    logger.info("the function runs")
    logging.getLogger("elsewhere").info("what others say")
    runtime.register_engine_route("show", show)
    await trio.to_thread.run_sync(input, abandon_on_cancel=True)
    await runtime.endpoint("t.b.generate").serve_endpoint(letters)

%s
run_process(main)
"""


@attrs.define(eq=False)
class Ported:
    """Starts such a program; it serves once a line was written to it."""

    fleet: Fleet

    def start(self, before: str = "", **environ: str) -> Server:
        popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM % before],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(**(self.fleet.environ | environ)),
        )
        self.fleet.servers.append(Server(popen))
        return self.fleet.servers[-1]


@pytest.fixture
def ported(fleet: Fleet) -> Iterator[Ported]:
    yield Ported(fleet)
    for server in fleet.servers:
        assert server.popen.stdin is not None
        server.popen.stdin.close()


def serve(server: Server) -> None:
    assert server.popen.stdin is not None
    server.popen.stdin.write("\n")
    server.popen.stdin.flush()


def status_url(server: Server) -> str:
    match = re.search(r"status server on (\S+)", server.wait_log("status server on"))
    assert match is not None
    return f"http://{match[1]}"


def test_it_has_a_status_server(ported: Ported) -> None:
    server = ported.start(DYN_SYSTEM_PORT="0")
    url = status_url(server)
    server.wait_log("the function runs")
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["stage"]) == (503, "loading")
    assert httpx.get(f"{url}/live").status_code == 200
    serve(server)
    wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, "health")
    assert httpx.get(f"{url}/health").json()["endpoints"] == {"generate": "ready"}
    assert httpx.post(f"{url}/engine/show", json={"a": 1}).json() == {"seen": {"a": 1}}
    assert 'dynamo_endpoint="generate"' in httpx.get(f"{url}/metrics").text
    assert server.stop() == 0, server.log


def test_a_status_port_in_use(ported: Ported) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = ported.start(DYN_SYSTEM_PORT=port)
        assert server.end() == 64, server.log
    assert f"{port} (--system-port, DYN_SYSTEM_PORT): the port is in use" in server.log


def test_a_stop_while_it_waits_for_its_store(ported: Ported) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it answers nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server = ported.start(DYN_DISCOVERY_BACKEND="etcd", ETCD_ENDPOINTS=url, DYN_SYSTEM_PORT="0")
        status_url(server)
        began = time.monotonic()
        assert server.stop() == 0, server.log
        assert time.monotonic() - began < 20  # half a minute is what it would wait for the store
    assert "the function runs" not in server.log


# --- logging -----------------------------------------------------------------------------------


def test_it_logs_as_the_variables_say(ported: Ported) -> None:
    server = ported.start(DYN_LOGGING_JSONL="1")
    line = json.loads(server.wait_log("the function runs"))
    assert (line["level"], line["target"]) == ("INFO", "__main__")
    serve(server)
    assert json.loads(server.wait_log("serving dyn://t.b.generate"))["level"] == "INFO"
    assert server.stop() == 0
    assert "what others say" not in server.log


def test_others_are_heard_if_they_are_named(ported: Ported) -> None:
    server = ported.start(DYN_LOG="warn,elsewhere=info")
    server.wait_log("what others say")
    assert server.stop() == 0
    assert "the function runs" not in server.log


def test_logging_that_is_set_up_is_left_alone(ported: Ported) -> None:
    before = "logging.basicConfig(format='mine: %(message)s', level='INFO')"
    server = ported.start(before)
    assert server.wait_log("the function runs") == "mine: the function runs"
    server.wait_log("mine: shutdown timetable: ")
    assert server.stop() == 0


def test_its_report_goes_where_the_variable_says(ported: Ported) -> None:
    path = ported.fleet.folder / "report"
    server = ported.start(DYN_TRIO_SHUTDOWN_REPORT=str(path))
    server.wait_log("the function runs")
    assert server.stop() == 0
    assert json.loads(path.read_text()) == server.report
    assert server.popen.wait(PATIENCE) == 0
