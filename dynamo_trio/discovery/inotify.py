"""Linux's own news of a directory, so that a watch need not look ten times a second.

Only ever a hint to look: it is missing on other systems, it says nothing of what other hosts
do to a shared directory, and its queue may overflow.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# From linux/inotify.h.
_MODIFIED = 0x0000_0008  # closed after writing
_NAMES = 0x0000_0040 | 0x0000_0080 | 0x0000_0100 | 0x0000_0200  # moved from, to; made; deleted
_DIRECTORY_GONE = 0x0000_0400 | 0x0000_0800  # deleted, moved
_UNMOUNTED, _IGNORED = 0x0000_2000, 0x0000_8000
_ONLY_DIRECTORIES = 0x0100_0000

_WANTED = _MODIFIED | _NAMES | _DIRECTORY_GONE | _ONLY_DIRECTORIES
_GONE = _DIRECTORY_GONE | _UNMOUNTED | _IGNORED

_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@attrs.define(eq=False)
class Inotify:
    """The news of one directory. ``fd`` becomes readable when there are some."""

    fd: int

    @classmethod
    def open(cls) -> Inotify:
        """Cannot block.

        Raises:
            OSError: too many listeners, or no such thing on this system.
        """
        try:
            start = _libc().inotify_init1
        except AttributeError:
            raise OSError("this system has no inotify") from None
        return cls(_checked(start(os.O_NONBLOCK | os.O_CLOEXEC)))

    def listen(self, directory: Path) -> None:
        """Hear of what happens in this directory from now on. May block as file systems do.

        Raises:
            OSError: no such directory, or too many listeners.
        """
        _checked(_libc().inotify_add_watch(self.fd, os.fsencode(directory), _WANTED))

    def drain(self) -> bool:
        """Forget all news. True if one of them is that the directory itself is gone."""
        gone = False
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return gone
            gone = any(mask & _GONE for mask in _masks(data)) or gone

    def close(self) -> None:
        """Listen no more. Nobody may be waiting for ``fd``."""
        os.close(self.fd)


def _masks(data: bytes) -> Iterator[int]:
    position = 0
    while position < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, position)
        yield mask
        position += _EVENT.size + length
