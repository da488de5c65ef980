"""A file that this process put into the store: is it still there, and still ours?

Everything here blocks for as long as the file system does; it is called in threads.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery import files

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dynamo_trio.discovery.store import StoreKey

#: What became of a file. The first needs no words of its own in the log.
DELETED = "it was deleted"
_DIRECTORY = "a directory is in its place"
_NO_FILE = "a link, or something else that is no file, is in its place"
_OVERWRITTEN = "somebody else wrote to it"
_NOT_OURS = "it belongs to another user now"


@attrs.define(eq=False)
class OwnFile:
    """One file and what shall be in it."""

    path: Path
    value: bytes
    #: As it was when we last wrote, touched or read it; None: it is to be read.
    _mark: files.Mark | None = None
    #: Another value is being written, so what is there may be either.
    changing: bool = False
    #: Set by whoever wants it no more; seen by a thread that is still writing it.
    withdrawn: bool = False

    def write(self, wall: float) -> None:
        """Put it there.

        Raises:
            OSError: it could not be written.
        """
        self._mark = files.write(self.path, self.value, wall)
        if self.withdrawn:
            files.remove(self.path)

    def examine(self) -> str | None:
        """Returns what became of it, None if all is well.

        Raises:
            OSError: nobody knows.
        """
        status = files.status(self.path)
        if status is None:
            return DELETED
        if not stat.S_ISREG(status.st_mode):
            return _DIRECTORY if stat.S_ISDIR(status.st_mode) else _NO_FILE
        if files.Mark.of(status) != self._mark:
            return self._reread(status)
        return None

    def _reread(self, status: os.stat_result) -> str | None:
        try:
            if files.read_value(self.path) != self.value:
                return _OVERWRITTEN
        except FileNotFoundError:
            return DELETED
        self._mark = files.Mark.of(status)
        return None

    def touch(self, wall: float) -> str | None:
        """The same, and if all is well give it the time stamp ``wall``.

        Raises:
            OSError: it could not be touched.
        """
        reason = self.examine()
        if reason is not None:
            return reason
        try:
            if not files.touch(self.path, wall):
                return DELETED
        except PermissionError:
            return _NOT_OURS
        self._note(files.status(self.path))
        return None

    def _note(self, status: os.stat_result | None) -> None:
        """Remember the touch, unless somebody else was there at the same moment."""
        mark = None if status is None else files.Mark.of(status)
        known = self._mark
        same = mark and known and (mark.inode, mark.size) == (known.inode, known.size)
        self._mark = mark if same else None


@attrs.frozen
class Inspection:
    """What was found of several files."""

    #: What became of those that are gone.
    gone: Mapping[StoreKey, str]
    #: How many are as they should be.
    well: int
    #: Why nobody knows of the rest; the first reason.
    error: OSError | None


def inspect(owned: Mapping[StoreKey, OwnFile], look: Callable[[OwnFile], str | None]) -> Inspection:
    """Examine or touch each; one that makes trouble does not keep the others from it."""
    gone: dict[StoreKey, str] = {}
    errors: list[OSError] = []
    for at, own in owned.items():
        try:
            reason = look(own)
        except OSError as exc:
            errors.append(exc)
            continue
        if reason is not None:
            gone[at] = reason
    well = len(owned) - len(gone) - len(errors)
    return Inspection(gone, well, errors[0] if errors else None)
