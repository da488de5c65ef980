"""The folder that keeps fetched models.

Theory of operation
-------------------
Below the cache folder, ``models/`` holds for each model the file itself, and beside it
a *stamp*: size, modification time and checksum of the file when it was last checked in
full. A file that agrees with its stamp is taken as intact without reading it again; one
that does not is read, and stamped or refused.

Whoever changes the folder holds its lock (``flock``, which the kernel drops when the
process dies). A download happens in a folder of its own, ``.fetch-*``; the finished file
comes to its place by a rename, so a file under its own name is always whole. With the
lock held, any ``.fetch-*`` is the leftover of a process that was killed, and is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.models.wheel import file_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_trio.models.wheel import WheelModel

_SCRATCH = ".fetch-"


def _nothing() -> None:
    pass


@frozen
class Store:
    """The models below one cache folder. Nothing is created before something is kept."""

    cache_dir: Path

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.cache_dir / "models"

    def path(self, model: WheelModel) -> Path:
        """Where this model's file is, or would be."""
        return self.folder / model.file_name

    def find(self, model: WheelModel, *, checkpoint: Callable[[], None] = _nothing) -> Path | None:
        """The model's file if it is there and intact. Reads all of it only without a stamp."""
        path = self.path(model)
        try:
            facts = _facts(path, model)
            if facts is None:
                return None
            if _stamp(path).read_bytes() == facts:
                return path
        except OSError:
            pass
        return self.verify(model, checkpoint=checkpoint)

    def verify(
        self, model: WheelModel, *, checkpoint: Callable[[], None] = _nothing
    ) -> Path | None:
        """As :meth:`find`, but the file is read in full, whatever its stamp says."""
        path = self.path(model)
        try:
            facts = _facts(path, model)
            if facts is None or file_sha256(path, checkpoint=checkpoint) != model.sha256:
                return None
        except OSError:
            return None
        self._write_stamp(path, facts)
        return path

    def put(self, model: WheelModel, file: Path) -> Path:
        """Move a file that was checked to its place. The lock is held."""
        path = self.path(model)
        _stamp(path).unlink(missing_ok=True)
        file.replace(path)
        facts = _facts(path, model)
        if facts is not None:
            self._write_stamp(path, facts)
        return path

    def remove(self, model: WheelModel) -> bool:
        """Remove file, stamp and leftovers; True if there was a file. The lock is held."""
        self.sweep()
        _stamp(self.path(model)).unlink(missing_ok=True)
        there = self.path(model).exists()
        self.path(model).unlink(missing_ok=True)
        return there

    def sweep(self) -> None:
        """Remove what interrupted downloads left. The lock is held."""
        for leftover in self.folder.glob(_SCRATCH + "*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder on the same disk, removed at the end. The lock is held."""
        path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def lock(self, wait: Callable[[], None]) -> Iterator[None]:
        """Hold the folder's lock, alone among all processes. Creates the folder.

        While another holds it, ``wait`` is called again and again; it sleeps, or raises.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _try_lock(descriptor):
                wait()
            yield
        finally:
            os.close(descriptor)

    def _write_stamp(self, path: Path, facts: bytes) -> None:
        # A read-only cache works too; then the file is read in full each time.
        try:
            fresh = _stamp(path).with_suffix(f".{os.getpid()}")
            fresh.write_bytes(facts)
            fresh.replace(_stamp(path))
        except OSError:
            pass


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _facts(path: Path, model: WheelModel) -> bytes | None:
    """What a stamp says about an intact file; None if the file cannot be it."""
    status = path.stat()
    if status.st_size != model.size:
        return None
    facts = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": model.sha256}
    return json.dumps(facts).encode()
