"""A fleet of processes, NVIDIA's and ours, that find each other through one store.

Every setting is given in Dynamo's own variables, so both makes are configured by the same
lines. Each test names its model and its namespace for itself; the frontends, which are slow
to start, serve all tests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.interop.load import CHAT
from tests.interop.model import Model, unique
from tests.interop.processes import Process, free_port, start_process, wait_until
from tests.interop.stores import EtcdStore, FileStore
from tests.standalone.harness import ask, chat, clean_environ, metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.interop.stores import Store
    from tests.standalone.harness import Answer

PEERS = Path(__file__).parent / "peers"
ORACLE = "DYN_TRIO_TEST_ORACLE"
MAKE_ORACLE = f".ci/run oracle && export {ORACLE}=$PWD/.oracle"
MAKE_ETCD = "apt-get install etcd-server"

#: What every process is told. ``lo``: the real frontend wants the name of an interface.
LOCAL = {
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "DYN_LOG": "info,dynamo_llm::http=warn",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
}


def oracle_python() -> str:
    """The interpreter that has NVIDIA's Dynamo."""
    folder = os.environ.get(ORACLE)
    if not folder:
        pytest.skip(f"needs NVIDIA's Dynamo 1.5.1; enable with: {MAKE_ORACLE}")
    python = os.path.join(os.path.abspath(folder), "bin", "python")
    assert os.access(python, os.X_OK), f"{ORACLE} names no virtual environment: {folder}"
    return python


@attrs.define(eq=False)
class Frontend:
    """A frontend of either make."""

    process: Process
    port: int

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        return ask(self.port, method, path, None if body is None else dict(body))

    def models(self) -> set[str]:
        try:
            answer = self.ask("GET", "/v1/models")
        except OSError:  # it does not listen yet
            return set()
        if answer.status != 200:
            return set()
        return {model["id"] for model in answer.json()["data"]}

    def wait_model(self, model: Model, *workers: Process) -> None:
        """Wait until it serves the model, which these workers should bring about."""
        everybody = (self.process, *workers)
        wait_until(lambda: model.name in self.models(), f"model {model.name}", *everybody)

    def wait_serving(self, model: Model, *workers: Worker) -> None:
        """Wait until all these workers are to be found, and it has answered from one of them.

        NVIDIA's KV router may know a model a moment before it knows where to send a request: one
        that comes then is answered with 500.
        """
        for worker in workers:
            worker.instance_id  # noqa: B018 - reading it waits
        processes = [worker.process for worker in workers]
        self.wait_model(model, *processes)
        wait_until(lambda: self.serves(model), f"an answer of {model.name}", *processes)

    def serves(self, model: Model) -> bool:
        """Whether a short chat is answered."""
        body = chat(4, model=model.name, stream=False)
        return self.ask("POST", CHAT, body).status == 200

    def wait_no_model(self, model: Model) -> None:
        wait_until(lambda: model.name not in self.models(), f"no {model.name}", self.process)


@attrs.define(eq=False)
class Worker:
    """A worker of ours, with its status port."""

    process: Process
    port: int

    @property
    def instance_id(self) -> int:
        """Under which others find it; waits until they do."""
        line = self.process.wait_log(" as instance ")
        return int(line.rsplit(" ", 1)[1], 16)

    @property
    def running(self) -> float:
        """Requests in its handlers."""
        return metric(self.port, "dynamo_component_inflight_requests")

    @property
    def taken(self) -> float:
        """Requests that it has ever taken."""
        return metric(self.port, "dynamo_component_requests_total") + self.running

    def tell(self, route: str) -> Answer:
        """Call one of its engine routes."""
        return ask(self.port, "POST", f"/engine/{route}", {})


@attrs.define(eq=False)
class Fleet:
    """Starts processes and knows all of them."""

    folder: Path
    oracle: str
    processes: list[Process] = attrs.field(factory=list)

    def start(self, name: str, command: list[str], environ: Mapping[str, str]) -> Process:
        process = start_process(name, command, environ, self.folder)
        self.processes.append(process)
        return process

    def close(self, *processes: Process) -> list[str]:
        """End these, the last started first; returns what was wrong."""
        ending = [p for p in reversed(self.processes) if p in processes]
        complaints = [complaint for p in ending if (complaint := p.close())]
        self.processes = [p for p in self.processes if p not in processes]
        return complaints

    def close_all(self) -> list[str]:
        return self.close(*self.processes)

    def news(self) -> str:
        """What each process has logged since this was last asked."""
        return "\n".join(f"--- {p.name} (pid {p.popen.pid})\n{p.news()}" for p in self.processes)

    def home(self) -> str:
        """An empty folder: what is cached in HOME may hide that a file cannot be had."""
        path = self.folder / unique("home")
        path.mkdir()
        return str(path)

    # --- stores -------------------------------------------------------------------------

    def file_store(self) -> Store:
        folder = self.folder / unique("file-store")
        folder.mkdir()
        return FileStore(folder)

    def etcd_store(self) -> Store:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip(f"needs etcd; enable with: {MAKE_ETCD}")
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        data = self.folder / unique("etcd")
        urls = {
            **{"listen-client-urls": client, "advertise-client-urls": client},
            **{"listen-peer-urls": peer, "initial-advertise-peer-urls": peer},
            **{"initial-cluster": f"default={peer}", "data-dir": str(data)},
        }
        flags = [f"--{name}={value}" for name, value in urls.items()]
        etcd = self.start("etcd", [program, *flags], clean_environ())
        etcd.wait_log("ready to serve client requests")
        return EtcdStore(client)

    def _environ(self, store: Store, more: Mapping[str, str]) -> dict[str, str]:
        base = clean_environ(HOME=self.home()) | LOCAL | dict(store.environ) | dict(more)
        # What these processes run is covered by tests/programs; here it would only be slower.
        return {name: value for name, value in base.items() if not name.startswith("COVERAGE_")}

    # --- NVIDIA's -----------------------------------------------------------------------

    def their_frontend(self, store: Store, *flags: str, **environ: str) -> Frontend:
        port = free_port()
        program = [self.oracle, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command = [*program, "--http-port", str(port), *flags]
        process = self.start("their-frontend", command, self._environ(store, environ))
        frontend = Frontend(process, port)
        wait_until(lambda: _listens(frontend), "an HTTP port", process)
        return frontend

    def their_mocker(self, store: Store, model: Model, *flags: str, **environ: str) -> Process:
        # Its port: 0 for any; it cannot be told one above 32767.
        environ.setdefault("DYN_SYSTEM_PORT", "0")
        command = [self.oracle, "-m", "dynamo.mocker", *model.flags(), *flags]
        return self.start("their-mocker", command, self._environ(store, environ))

    def their_router(self, store: Store, model: Model, *flags: str) -> Process:
        """``dynamo.router`` for the model's workers; it serves ``NAMESPACE.router.generate``."""
        routed = ("--endpoint", model.endpoint, "--router-block-size", "16")
        command = [self.oracle, "-m", "dynamo.router", *routed, *flags]
        return self.start("their-router", command, self._environ(store, {}))

    def their_python_worker(self, store: Store, model: Model, **environ: str) -> Process:
        script = str(PEERS / "python_worker.py")
        command = [self.oracle, script, str(model.folder), model.name, model.namespace]
        return self.start("their-python-worker", command, self._environ(store, environ))

    def their_bidirectional_worker(self, store: Store, namespace: str, **environ: str) -> Process:
        """It serves ``NAMESPACE.backend.talk``, whose requests stream in."""
        command = [self.oracle, str(PEERS / "bidirectional_worker.py"), namespace]
        return self.start("their-bidirectional-worker", command, self._environ(store, environ))

    def their_realtime_worker(self, store: Store, model: Model, **environ: str) -> Process:
        """Its model is spoken to at ``/v1/realtime``."""
        script = str(PEERS / "realtime_worker.py")
        command = [self.oracle, script, str(model.folder), model.name, model.namespace]
        return self.start("their-realtime-worker", command, self._environ(store, environ))

    def their_python_client(self, store: Store, endpoint: str, *requests: object) -> Process:
        """It asks for each of these in turn and prints what it gets."""
        command = [self.oracle, str(PEERS / "python_client.py"), endpoint]
        more = [json.dumps(request) for request in requests]
        return self.start("their-python-client", command + more, self._environ(store, {}))

    # --- ours ---------------------------------------------------------------------------

    def our_frontend(self, store: Store, *flags: str, **environ: str) -> Frontend:
        port = free_port()
        program = [sys.executable, "-m", "dynamo_trio.frontend", "--http-host", "127.0.0.1"]
        command = [*program, "--http-port", str(port), *flags]
        process = self.start("our-frontend", command, self._environ(store, environ))
        frontend = Frontend(process, port)
        wait_until(lambda: _listens(frontend), "an HTTP port", process)
        return frontend

    def our_worker(self, store: Store, model: Model, *flags: str, **environ: str) -> Worker:
        return self._worker(["-m", "dynamo_trio.worker"], store, model, flags, environ)

    def our_restless_worker(
        self, store: Store, model: Model, *flags: str, **environ: str
    ) -> Worker:
        """One that leaves the routing pool, and comes back, when it is told to."""
        script = str(PEERS / "restless_worker.py")
        return self._worker([script], store, model, flags, environ)

    def _worker(
        self,
        program: Sequence[str],
        store: Store,
        model: Model,
        flags: Sequence[str],
        environ: Mapping[str, str],
    ) -> Worker:
        port = free_port()
        ours = {"DYN_SYSTEM_PORT": str(port), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.1"}
        command = [sys.executable, *program, "--engine", "sim", *model.flags(), *flags]
        environ = self._environ(store, ours | dict(environ))
        return Worker(self.start("our-worker", command, environ), port)


def _listens(frontend: Frontend) -> bool:
    try:
        return bool(frontend.ask("GET", "/live").status)
    except OSError:
        return False
