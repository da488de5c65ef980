"""The store of a fleet as a stranger sees it who takes registrations away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from tests.discovery.etcd_server import EtcdServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.programs.conftest import Fleet

GENERATE = "dynamo/backend/generate/"


class LossyStore(ABC):
    """What is registered at ``dynamo.backend.generate``, and how to lose it."""

    #: How long what nobody renews stays, in seconds.
    ttl: float

    @property
    @abstractmethod
    def environ(self) -> Mapping[str, str]:
        """What a process is told, beside what the fleet tells all."""

    @abstractmethod
    def ids(self) -> set[str]:
        """The instances, as they are written."""

    @abstractmethod
    def lose(self, instance_id: str) -> None:
        """Delete what this instance has registered."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Is nothing left of any process?"""


@attrs.define(eq=False)
class LossyFiles(LossyStore):
    """A folder whose files are deleted."""

    fleet: Fleet
    ttl = 10.0

    @property
    def environ(self) -> Mapping[str, str]:
        return {}

    def ids(self) -> set[str]:
        return {path.name.rpartition("%2F")[2] for path in self.fleet.records("instances")}

    def lose(self, instance_id: str) -> None:
        for path in (self.fleet.store / "v1").glob(f"*/*%2F{instance_id}"):
            path.unlink()

    def is_empty(self) -> bool:
        return list((self.fleet.store / "v1").glob("*/[!.]*")) == []


@attrs.define(eq=False)
class LossyEtcd(LossyStore):
    """An etcd whose leases are revoked. They are as short as may be."""

    server: EtcdServer
    ttl = 2.0

    @property
    def environ(self) -> Mapping[str, str]:
        store = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": self.server.url}
        return store | {"ETCD_LEASE_TTL": f"{self.ttl:.0f}"}

    def ids(self) -> set[str]:
        begin = f"v1/instances/{GENERATE}"
        return {key.removeprefix(begin) for key in self._keys() if key.startswith(begin)}

    def lose(self, instance_id: str) -> None:
        lease = {"ID": str(self._keys()[f"v1/instances/{GENERATE}{instance_id}"])}
        trio.run(self.server.call, "/v3/lease/revoke", lease)

    def is_empty(self) -> bool:
        return not self._keys()

    def _keys(self) -> dict[str, int]:
        return trio.run(self.server.keys)


@contextmanager
def open_lossy_store(kind: str, fleet: Fleet, folder: Path) -> Iterator[LossyStore]:
    """A store of this kind, ``file`` or ``etcd``, for the processes of a fleet."""
    if kind == "file":
        yield LossyFiles(fleet)
        return
    server = EtcdServer(folder / "etcd")
    try:
        trio.run(server.start)
        yield LossyEtcd(server)
    finally:
        trio.run(server.kill)
