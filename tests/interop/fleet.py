"""A fleet of processes, NVIDIA's and ours, that find each other through one store.

Every setting is given in Dynamo's own variables, so both makes are configured by the same
lines. Each test names its model and its namespace for itself; the frontends, which are slow
to start, serve all tests.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from dynamo_trio.testing import make_model_folder
from tests.interop.processes import Process, free_port, start_process, wait_until
from tests.standalone.harness import ask, clean_environ

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.standalone.harness import Answer

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

_numbers = itertools.count(1)


def unique(word: str) -> str:
    """A name that no other test has."""
    return f"{word}{next(_numbers)}"


def oracle_python() -> str:
    """The interpreter that has NVIDIA's Dynamo."""
    folder = os.environ.get(ORACLE)
    if not folder:
        pytest.skip(f"needs NVIDIA's Dynamo 1.5.1; enable with: {MAKE_ORACLE}")
    python = os.path.join(os.path.abspath(folder), "bin", "python")
    assert os.access(python, os.X_OK), f"{ORACLE} names no virtual environment: {folder}"
    return python


@attrs.frozen
class Store:
    """Where a fleet's processes find each other."""

    kind: str  # file or etcd
    environ: Mapping[str, str]


@attrs.frozen
class Model:
    """A model under a name of its own, served under an endpoint of its own."""

    folder: Path
    name: str = attrs.field(factory=lambda: unique("tiny-"))
    namespace: str = attrs.field(factory=lambda: unique("ns"))

    @property
    def endpoint(self) -> str:
        return f"{self.namespace}.backend.generate"

    def flags(self) -> list[str]:
        endpoint = f"dyn://{self.endpoint}"
        return [
            *("--model-path", str(self.folder), "--model-name", self.name),
            *("--endpoint", endpoint),
        ]


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

    def wait_no_model(self, model: Model) -> None:
        wait_until(lambda: model.name not in self.models(), f"no {model.name}", self.process)


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
        return Store("file", {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder)})

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
        return Store("etcd", {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": client})

    def _environ(self, store: Store, more: Mapping[str, str]) -> dict[str, str]:
        return clean_environ(HOME=self.home()) | LOCAL | dict(store.environ) | dict(more)

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

    # --- ours ---------------------------------------------------------------------------

    def our_frontend(self, store: Store, *flags: str, **environ: str) -> Frontend:
        port = free_port()
        program = [sys.executable, "-m", "dynamo_trio.frontend", "--http-host", "127.0.0.1"]
        command = [*program, "--http-port", str(port), *flags]
        process = self.start("our-frontend", command, self._environ(store, environ))
        frontend = Frontend(process, port)
        wait_until(lambda: _listens(frontend), "an HTTP port", process)
        return frontend

    def our_worker(self, store: Store, model: Model, *flags: str, **environ: str) -> Process:
        program = [sys.executable, "-m", "dynamo_trio.worker", "--engine", "sim"]
        command = [*program, *model.flags(), *flags]
        return self.start("our-worker", command, self._environ(store, environ))


def _listens(frontend: Frontend) -> bool:
    try:
        return bool(frontend.ask("GET", "/live").status)
    except OSError:
        return False


def tiny_model(folder: Path, *, context_length: int = 8192) -> Path:
    """The folder of the model that all fleets serve."""
    return make_model_folder(folder, context_length=context_length)


def records_of(store: Store, bucket: str) -> list[dict[str, Any]]:
    """What a file store holds in one bucket (``instances`` or ``mdc``)."""
    folder = os.path.join(store.environ["DYN_FILE_KV"], "v1", bucket)
    names = [name for name in os.listdir(folder) if not name.startswith(".tmp_")]
    return [json.loads(open(os.path.join(folder, name)).read()) for name in names]
