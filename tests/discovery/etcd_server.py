"""A real etcd for tests: on free ports, with data that survive it, and all that can befall it."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

MAKE_ETCD = "apt-get install etcd-server"
#: With these a lease of one second is possible, and a start takes a fraction of one.
QUICK = ("--heartbeat-interval=10", "--election-timeout=100")
READY = b"ready to serve client requests"
#: Far above what a start needs, in seconds.
START_TIME = 30.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def program() -> str:
    found = shutil.which("etcd")
    if found is None:
        pytest.skip(f"needs etcd; enable with: {MAKE_ETCD}")
    return found


@attrs.define(eq=False)
class EtcdServer:
    """One member on the loopback. Its ports stay the same through restarts."""

    folder: Path
    flags: Sequence[str] = ()
    scheme: str = "http"
    #: For :meth:`call`, when etcd asks for TLS.
    verify: Any = True
    port: int = attrs.field(factory=free_port)
    _peer_port: int = attrs.field(factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        client, peer = self.url, f"http://127.0.0.1:{self._peer_port}"
        command = [
            *(program(), "--name=one", f"--data-dir={self.folder / 'data'}", *QUICK),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=one={peer}", *self.flags),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        # What would configure it from outside belongs to nobody here.
        env = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        self._spawn(command, env)
        await self._wait_ready()

    def _spawn(self, command: list[str], env: dict[str, str]) -> None:
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    async def _wait_ready(self) -> None:
        with trio.fail_after(START_TIME):
            while READY not in (log := (self.folder / "log").read_bytes()):
                assert self._running.poll() is None, log.decode("utf-8", "replace")
                await trio.sleep(0.02)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            await trio.to_thread.run_sync(self._process.wait)
            self._process = None

    async def restart_empty(self) -> None:
        """As after the loss of its disk."""
        await self.kill()
        shutil.rmtree(self.folder / "data")
        await self.start()

    def freeze(self) -> None:
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    async def call(self, path: str, body: object, token: str = "") -> dict[str, Any]:
        """Ask it something as a stranger."""
        headers = {"Authorization": token} if token else {}
        async with httpx.AsyncClient(verify=self.verify, trust_env=False) as client:
            answer = await client.post(self.url + path, json=body, headers=headers)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def delete(self, key: str) -> None:
        await self.call("/v3/kv/deleterange", {"key": b64(key)})

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        body = {"key": b64(key), "value": b64(value), "lease": str(lease)}
        await self.call("/v3/kv/put", body)

    async def value(self, key: str) -> bytes:
        [kv] = (await self.call("/v3/kv/range", {"key": b64(key)}))["kvs"]
        return base64.b64decode(kv["value"])

    async def keys(self) -> dict[str, int]:
        """All keys, with the leases on which they hang."""
        answer = await self.call("/v3/kv/range", {"key": "AA==", "range_end": "AA=="})
        pairs = answer.get("kvs", ())
        return {base64.b64decode(kv["key"]).decode(): int(kv.get("lease", 0)) for kv in pairs}

    async def revision(self) -> int:
        answer = await self.call("/v3/kv/range", {"key": "AA=="})
        return int(answer["header"]["revision"])

    async def ttl(self, lease: int) -> int:
        """Seconds that a lease has left; -1 for one that is not there."""
        answer = await self.call("/v3/lease/timetolive", {"ID": str(lease)})
        return int(answer["TTL"])


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@asynccontextmanager
async def open_etcd(
    folder: Path, flags: Sequence[str] = (), scheme: str = "http", verify: object = True
) -> AsyncIterator[EtcdServer]:
    """A server that runs while the block does."""
    server = EtcdServer(folder, flags, scheme, verify)
    try:
        await server.start()
        yield server
    finally:
        with trio.CancelScope(shield=True):  # SIGKILL is prompt
            await server.kill()
