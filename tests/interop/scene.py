"""What a test plays in: the axes, the shared frontends, a model of its own."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio.testing import make_model_folder
from tests.interop.model import Model
from tests.interop.stores import FileStore

if TYPE_CHECKING:
    from tests.interop.fleet import Fleet, Frontend, Worker
    from tests.interop.processes import Process
    from tests.interop.stores import Store

BACKENDS = ("file", "etcd")
CODECS = ("msgpack", "json")
#: Each pair of values of two axes is in one of these, and each in both halves.
DIAGONALS = ((("file", "msgpack"), ("etcd", "json")), (("file", "json"), ("etcd", "msgpack")))

#: Inotify instances of shared frontends behind which these are started anew. Several of pytest's
#: processes have as many each, tests have frontends of their own, and all share 128.
INSTANCES = 12

Mark = pytest.MarkDecorator


def axes(diagonal: int, *, few: bool = False) -> Mark:
    """Run the test on one diagonal of backend x codec; under ``-m soak`` on all four.

    ``few``: on only the first of the diagonal, for a test that takes long.
    """
    pairs = DIAGONALS[diagonal][: 1 if few else 2]
    some = [pytest.param(pair, id="-".join(pair)) for pair in pairs]
    every = [
        pytest.param(pair, id="-".join((*pair, "soak")), marks=pytest.mark.soak)
        for pair in itertools.product(BACKENDS, CODECS)
    ]
    return pytest.mark.parametrize("scene", [*some, *every], indirect=True)


def inotify_instances(pid: int) -> int:
    """How many a process has."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed by now
            found += str(descriptor.readlink()) == "anon_inode:inotify"
    return found


def _name_all_tokens(folder: Path) -> None:
    """The real mocker answers with random ids from 1000 to 2000: give each a text."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"\u0120n{number}": number for number in range(len(vocabulary), 2048)})
    path.write_text(json.dumps(tokenizer))


@attrs.define(eq=False)
class Stage:
    """What lasts for the session: stores, frontends and model folders, made when first used."""

    fleet: Fleet
    _stores: dict[str, Store] = attrs.field(factory=dict)
    _frontends: dict[int, Frontend] = attrs.field(factory=dict)
    _folders: dict[int, Path] = attrs.field(factory=dict)
    #: Processes that do not end with the test in which they were started.
    lasting: list[Process] = attrs.field(factory=list)
    #: What was wrong with frontends that were ended.
    complaints: list[str] = attrs.field(factory=list)
    #: Some tests ask from several threads.
    _making: threading.Lock = attrs.field(factory=threading.Lock)

    def store(self, backend: str, name: str = "") -> Store:
        """The store of this kind, or a further one with a name of its own."""
        key = f"{backend} {name}"
        with self._making:
            if key not in self._stores:
                before = len(self.fleet.processes)
                make = {"file": self.fleet.file_store, "etcd": self.fleet.etcd_store}
                self._stores[key] = make[backend]()
                self.lasting += self.fleet.processes[before:]
            return self._stores[key]

    def file_store(self, name: str) -> FileStore:
        store = self.store("file", name)
        assert isinstance(store, FileStore)
        return store

    def their_frontend(self, store: Store, migrations: int = 3) -> Frontend:
        """The frontend of a store; it has one at most."""
        with self._making:
            if id(store) not in self._frontends:
                flags = ("--migration-limit", str(migrations))
                frontend = self.fleet.their_frontend(store, *flags)
                self.lasting.append(frontend.process)
                self._frontends[id(store)] = frontend
            return self._frontends[id(store)]

    def renew_frontends(self) -> None:
        """End the frontends of theirs once they have seen many endpoints go.

        Over file discovery each takes one of the 128 inotify instances of a user with it; a
        frontend that gets none shuts down.
        """
        old = [frontend.process for frontend in self._frontends.values()]
        if sum(inotify_instances(process.popen.pid) for process in old) > INSTANCES:
            self._frontends.clear()
            self.lasting = [process for process in self.lasting if process not in old]
            self.complaints += self.fleet.close(*old)

    def folder(self, context_length: int = 8192) -> Path:
        with self._making:
            if context_length not in self._folders:
                path = self.fleet.folder / f"tiny-{context_length}"
                make_model_folder(path, context_length=context_length)
                _name_all_tokens(path)
                self._folders[context_length] = path
            return self._folders[context_length]


@attrs.define(eq=False)
class Scene:
    """One test's view of it. What is started through it ends with the test."""

    stage: Stage
    backend: str
    codec: str

    @property
    def store(self) -> Store:
        return self.stage.store(self.backend)

    @property
    def their_frontend(self) -> Frontend:
        return self.stage.their_frontend(self.store)

    def model(self, *, context_length: int = 8192) -> Model:
        return Model(self.stage.folder(context_length))

    def their_mocker(self, model: Model, *flags: str, **environ: str) -> Process:
        return self.stage.fleet.their_mocker(self.store, model, *flags, **self._coded(environ))

    def our_worker(self, model: Model, *flags: str, **environ: str) -> Worker:
        return self.stage.fleet.our_worker(self.store, model, *flags, **self._coded(environ))

    def our_restless_worker(self, model: Model, *flags: str) -> Worker:
        fleet = self.stage.fleet
        return fleet.our_restless_worker(self.store, model, *flags, **self._coded({}))

    def their_python_worker(self, model: Model) -> Process:
        return self.stage.fleet.their_python_worker(self.store, model, **self._coded({}))

    def their_bidirectional_worker(self, namespace: str) -> Process:
        fleet = self.stage.fleet
        return fleet.their_bidirectional_worker(self.store, namespace, **self._coded({}))

    def their_realtime_worker(self, model: Model) -> Process:
        fleet = self.stage.fleet
        return fleet.their_realtime_worker(self.store, model, **self._coded({}))

    def their_router(self, model: Model, *flags: str) -> Process:
        return self.stage.fleet.their_router(self.store, model, *flags)

    def their_python_client(self, endpoint: str, *requests: object) -> Process:
        return self.stage.fleet.their_python_client(self.store, endpoint, *requests)

    def _coded(self, environ: dict[str, str]) -> dict[str, str]:
        return {"DYN_REQUEST_PLANE_CODEC": self.codec} | environ

    def their_own_frontend(self, *flags: str, **environ: str) -> Frontend:
        """One with settings that the shared one has not."""
        return self.stage.fleet.their_frontend(self.store, *flags, **environ)

    def our_frontend(self, *flags: str, **environ: str) -> Frontend:
        return self.stage.fleet.our_frontend(self.store, *flags, **environ)

    def close(self) -> list[str]:
        """End what this test has started."""
        fleet = self.stage.fleet
        return fleet.close(*(p for p in fleet.processes if p not in self.stage.lasting))
