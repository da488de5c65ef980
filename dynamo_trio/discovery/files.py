"""Files of the file backend: written whole or not at all, read without trust.

Everything here blocks for as long as the file system does; it is called in threads.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

#: Names that begin so are being written; every reader ignores them.
TEMPORARY = ".tmp_"
#: More of a file is not read, in bytes; so it comes out as unreadable.
MAX_VALUE = 4 * 1024 * 1024
#: A file that changed less than this ago may change again without a new time stamp, in seconds.
_RACY = 0.1


@attrs.frozen
class Stamp:
    """Tells whether a file may have changed since it was read."""

    inode: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds; unlike the other nobody can set it
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


@attrs.frozen
class Mark:
    """Tells whether somebody else has changed a file that only we touch.

    Not the time of change, unlike a stamp: a rename may set that.
    """

    inode: int
    size: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, status: os.stat_result) -> Mark:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@attrs.frozen
class Content:
    """What a file held when it was read. ``stamp``: None if it must be read again."""

    value: bytes
    stamp: Stamp | None


@attrs.frozen
class Look:
    """A directory as it was at one moment."""

    identity: tuple[int, int]  # device and inode
    files: Mapping[str, Content]  # by file name


# --- writing -----------------------------------------------------------------------------


def write(path: Path, value: bytes, now: float) -> Mark:
    """Let the file hold ``value``, and make its directory if need be. Readers never see half of it.

    ``now``: its time stamp, in seconds since the epoch.

    Raises:
        OSError: it could not be written, or a directory is in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(TEMPORARY + secrets.token_hex(8))
    try:
        with temporary.open("xb") as file:
            file.write(value)
        os.utime(temporary, (now, now))
        mark = Mark.of(temporary.lstat())
        temporary.replace(path)
    except IsADirectoryError as exc:
        temporary.unlink(missing_ok=True)
        raise IsADirectoryError(f"a directory is in its place; remove it: {path}") from exc
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return mark


def remove(path: Path) -> None:
    """Let the file not be there.

    Raises:
        OSError: it may still be there. So may one whose folder is gone: nobody knows what is in
            it when it comes back, and until then its readers believe what they read last.
    """
    try:
        path.unlink()
    except IsADirectoryError:
        return
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise


def touch(path: Path, now: float) -> bool:
    """Give the file the time stamp ``now``. False: it is not there.

    Raises:
        OSError: the file system does not answer as it should.
    """
    try:
        os.utime(path, (now, now), follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def status(path: Path) -> os.stat_result | None:
    """What is known of the file; None: it is not there.

    Raises:
        OSError: the file system does not answer as it should.
    """
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def require_writable(directories: Iterable[Path]) -> None:
    """See whether their entries may be changed; those that are not there are left out.

    Raises:
        PermissionError: this process may not write to one of them.
        OSError: a file system is read-only, or does not answer as it should.
    """
    for directory in directories:
        try:
            if not os.access(directory, os.W_OK):
                status = os.statvfs(directory)
                read_only = status.f_flag & os.ST_RDONLY
                number = errno.EROFS if read_only else errno.EACCES
                raise OSError(number, os.strerror(number), str(directory))
        except FileNotFoundError:
            continue


def probe(root: Path, below: Iterable[Path]) -> None:
    """See whether a file can be made and touched just now.

    In the root, where nobody listens; if that is not ours to write to, in one ``below`` it.

    Raises:
        OSError: it cannot, or the directories are not there.
    """
    try:
        _probe(root)
    except OSError:
        if not any(_takes_touches(directory) for directory in below):
            raise


def _takes_touches(directory: Path) -> bool:
    try:
        _probe(directory)
    except OSError:
        return False
    return True


def _probe(directory: Path) -> None:
    path = directory / (TEMPORARY + secrets.token_hex(8))
    with path.open("xb"):
        pass
    try:
        os.utime(path, (0, 0))
    finally:
        path.unlink(missing_ok=True)


# --- reading -----------------------------------------------------------------------------


def statuses(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file that may hold a value, by name.

    Raises:
        OSError: the directory cannot be read.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted just now
                continue
            if stat.S_ISREG(status.st_mode):
                yield entry.name, status


def look(directory: Path, before: Mapping[str, Content]) -> Look:
    """What is in the directory. Files that did not change since ``before`` are not read again.

    A file without content is one that somebody has yet to write: until then it holds what it
    held before, if anything.

    Raises:
        OSError: the directory cannot be read.
    """
    status = directory.stat()
    found = {
        name: _content(directory / name, s, before.get(name)) for name, s in statuses(directory)
    }
    files = {name: content for name, content in found.items() if content is not None}
    return Look((status.st_dev, status.st_ino), files)


def _content(path: Path, status: os.stat_result, before: Content | None) -> Content | None:
    if before is not None and before.stamp == Stamp.of(status):
        return before
    try:
        content = _read(path)
    except FileNotFoundError:
        return None
    except OSError:  # unreadable is not the same as gone
        return before
    return content if content.value else before


def read_value(path: Path) -> bytes:
    """What the file holds, but no more than a little over :data:`MAX_VALUE` of it.

    Raises:
        OSError: it is not there, no plain file, or cannot be read.
    """
    return _read(path).value


def _read(path: Path) -> Content:
    # What is not a plain file any more must neither be followed nor waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        value = file.read(MAX_VALUE + 1)
    racy = time.time() - status.st_ctime < _RACY
    return Content(value, None if racy else Stamp.of(status))


# --- expiry ------------------------------------------------------------------------------


def times(directory: Path) -> dict[str, int]:
    """When each file was modified, in nanoseconds.

    Raises:
        OSError: the directory cannot be read.
    """
    return {name: status.st_mtime_ns for name, status in statuses(directory)}


def remove_unchanged(directory: Path, times: Mapping[str, int], until: float) -> list[str]:
    """Delete the files that still have these times of modification. Returns their names.

    ``times``: nanoseconds by file name; ``until``: the judgement holds so long, on the
    monotonic clock. If the file system does not answer before, their owners may have been
    unable to touch them.
    """
    return [
        name for name, modified in times.items() if _remove_if(directory / name, modified, until)
    ]


def _remove_if(path: Path, modified: int, until: float) -> bool:
    try:
        if path.lstat().st_mtime_ns != modified or time.monotonic() > until:
            return False
        path.unlink()
    except OSError:  # somebody else was faster, or we may not
        return False
    return True
