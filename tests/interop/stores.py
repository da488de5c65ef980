"""The two stores, as a stranger sees them: what is in there, and how to take it away."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import attrs

from dynamo_trio.wire.dynamo import keys
from tests.standalone.harness import ask

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.interop.model import Model


class Store(ABC):
    """Where a fleet's processes find each other."""

    kind: str

    @property
    @abstractmethod
    def environ(self) -> Mapping[str, str]:
        """What a process of either make is told."""

    @abstractmethod
    def instances(self, model: Model) -> set[int]:
        """The ids of the model's instances."""

    @abstractmethod
    def record(self, model: Model, instance_id: int) -> dict[str, Any]:
        """What stands there under the key of an instance."""

    @abstractmethod
    def lose(self, model: Model, instance_id: int) -> None:
        """Let a stranger take away what an instance has registered."""


@attrs.frozen
class FileStore(Store):
    folder: Path
    kind = "file"

    @property
    def environ(self) -> Mapping[str, str]:
        return {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.folder)}

    def instances(self, model: Model) -> set[int]:
        found = [keys.key_of_file(path.name) for path in self._files("v1/instances")]
        begin = model.endpoint.replace(".", "/") + "/"
        return {keys.parse_id(key.removeprefix(begin)) for key in found if key.startswith(begin)}

    def record(self, model: Model, instance_id: int) -> dict[str, Any]:
        name = keys.file_name(f"{model.endpoint.replace('.', '/')}/{instance_id:x}")
        return _object((self.folder / "v1/instances" / name).read_bytes())

    def lose(self, model: Model, instance_id: int) -> None:
        name = keys.file_name(f"{model.endpoint.replace('.', '/')}/{instance_id:x}")
        for bucket in ("v1/instances", "v1/mdc"):
            (self.folder / bucket / name).unlink()

    def _files(self, bucket: str) -> list[Path]:
        folder = self.folder / bucket
        if not folder.is_dir():
            return []
        return [path for path in folder.iterdir() if not path.name.startswith(".tmp_")]


@attrs.frozen
class EtcdStore(Store):
    url: str
    kind = "etcd"

    @property
    def environ(self) -> Mapping[str, str]:
        return {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": self.url}

    @property
    def _port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def instances(self, model: Model) -> set[int]:
        begin = f"v1/instances/{model.endpoint.replace('.', '/')}/"
        first, after = begin.encode(), begin.encode()[:-1] + b"0"  # "0" comes after "/"
        asked = {"key": _base64(first), "range_end": _base64(after), "keys_only": True}
        found = ask(self._port, "POST", "/v3/kv/range", asked).json().get("kvs", [])
        names = [base64.b64decode(each["key"]).decode() for each in found]
        return {keys.parse_id(name.removeprefix(begin)) for name in names}

    def record(self, model: Model, instance_id: int) -> dict[str, Any]:
        key = f"v1/instances/{model.endpoint.replace('.', '/')}/{instance_id:x}"
        asked = {"key": _base64(key.encode())}
        (found,) = ask(self._port, "POST", "/v3/kv/range", asked).json()["kvs"]
        return _object(base64.b64decode(found["value"]))

    def lose(self, model: Model, instance_id: int) -> None:
        answer = ask(self._port, "POST", "/v3/lease/revoke", {"ID": str(instance_id)})
        assert answer.status == 200, answer


def _object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
