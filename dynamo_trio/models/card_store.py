"""The folder that keeps the files of other processes' model cards, by checksum.

Below the cache folder, ``cards/blobs/<checksum>`` are the files, and ``cards/folders/<sum>/``
has for each card the names under which a tokeniser looks for them, as links to the blobs; the
sum covers names and checksums, so cards of the same content share it. No name comes from the
card.

Any number of processes may use the folder at once, without a lock: a file comes to its place
by a rename, whole, and whoever was first does not matter, since the content is the same. A
blob is checked each time it is used, so a damaged one is only fetched again.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import FileUnusable
from dynamo_trio.models.card_files import LIMITS, digest_of, is_missing, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dynamo_trio.models.card_files import CardFile

logger = logging.getLogger("dynamo_trio.models")

_NEW = ".new-"
#: Seconds after which a half-written file was surely left behind by a process that died.
_STALE = 3600.0


@attrs.frozen
class CardStore:
    """The cards below one cache folder. All methods block; nothing is created before use."""

    cache_dir: Path

    @property
    def _blobs(self) -> Path:
        return self.cache_dir / "cards" / "blobs"

    def holds(self, file: CardFile) -> bool:
        """Is the file here, and intact? Reads all of it."""
        path = self._blobs / file.digest
        try:
            content = read_file(path, LIMITS[file.name])
        except FileUnusable as exc:
            if not is_missing(exc):
                logger.warning("%s; it is fetched again", exc)
            return False
        if digest_of(content) == file.digest:
            return True
        logger.warning("%s is damaged; it is fetched again", path)
        return False

    def put(self, digest: str, content: bytes) -> None:
        """Keep content that was checked.

        Raises:
            FileUnusable: the folder cannot be written, or the disk is full.
        """
        with self._explained():
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._sweep()
            _write_whole(self._blobs / digest, lambda new: new.write_bytes(content))

    def link(self, files: Sequence[CardFile]) -> Path:
        """The folder with these files under their names.

        Raises:
            FileUnusable: the folder cannot be written.
        """
        lines = sorted(f"{file.name} {file.digest}" for file in files)
        folder = self._blobs.parent / "folders" / digest_of("\n".join(lines).encode())
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                _link(folder / file.name, f"../../blobs/{file.digest}")
        return folder

    def _sweep(self) -> None:
        oldest = time.time() - _STALE
        for leftover in self._blobs.glob(f"{_NEW}*"):
            try:
                if leftover.stat().st_mtime < oldest:
                    leftover.unlink()
            except OSError:
                continue  # another process was faster

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise FileUnusable(
                f"model files cannot be kept in {self.cache_dir}: {exc.strerror or exc}; "
                "name another folder with --cache-dir or DYN_TRIO_CACHE_DIR"
            ) from exc


def _link(path: Path, target: str) -> None:
    try:
        if os.readlink(path) == target:
            return
    except OSError:
        pass  # not there, or no link
    _write_whole(path, lambda new: new.symlink_to(target))


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Make a new file beside ``path`` and move it there: nobody ever sees half of it."""
    new = path.with_name(f"{_NEW}{secrets.token_hex(8)}")
    try:
        write(new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
