"""What outlives the loop of a process that is about to exit: children and threads.

An engine may leave child processes behind. They would hold a GPU, a port, or the other end
of a pipe, though their parent is gone. So an entry point kills its descendants when it
exits, by their ids, and names them. Threads go with the process; those that an ordinary
exit would wait for are named.

This runs in a process in any state, from a signal handler and from the watchdog's thread
too. So it takes no lock, and what it cannot read or kill it passes over.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A child that is started while its siblings are looked for is found by the next look.
LOOKS = 3
#: States of /proc/PID/stat in which a process has ended: nobody has waited for it yet.
_ENDED = frozenset("ZX")


@attrs.frozen
class Descendant:
    """A process that this one has started, or one of those that those have."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"child {self.pid}: {self.command}"


def end_leftovers() -> tuple[str, ...]:
    """Kill every descendant of this process; returns the names of those, and of threads.

    Only for a process that exits next. Where there is no /proc, children are not found.
    """
    return (*(str(child) for child in kill_descendants()), *stray_threads())


def kill_descendants() -> list[Descendant]:
    """Send SIGKILL to all of them; parents first, which could start more."""
    found: dict[int, Descendant] = {}
    for _ in range(LOOKS):
        new = [child for child in descendants() if child.pid not in found]
        for child in new:
            found[child.pid] = child
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                os.kill(child.pid, signal.SIGKILL)
        if not new:
            break
    return list(found.values())


def descendants() -> list[Descendant]:
    """Those that run, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _running():
        children.setdefault(parent, []).append(pid)
    found, parents = [], [os.getpid()]
    for parent in parents:  # grows meanwhile
        for pid in children.get(parent, ()):
            parents.append(pid)
            found.append(Descendant(pid, _command(pid)))
    return found


def _running() -> Iterator[tuple[int, int]]:
    """Every process that runs, as (id, id of its parent)."""
    with suppress(OSError, ValueError):  # no /proc, or one that reads otherwise
        if os.readlink("/proc/self") != str(os.getpid()):
            return  # it is that of another PID namespace: its ids are other processes here
        for name in os.listdir("/proc"):
            if name.isdecimal() and (stat := _read(f"/proc/{name}/stat")):
                # The command in parentheses may hold anything, parentheses included.
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in _ENDED:
                    yield int(name), int(parent)


def _command(pid: int) -> str:
    words = _read(f"/proc/{pid}/cmdline").split("\0")
    text = " ".join(words).strip() or _read(f"/proc/{pid}/comm").strip() or "?"
    return "".join(c if c.isprintable() else " " for c in text)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def known_threads() -> dict[int, threading.Thread]:
    """The threads that Python knows, by their ids."""
    # Not enumerate(): whoever hangs may hold its lock.
    active = threading._active  # type: ignore[attr-defined]  # it is private
    return dict(active)


def stray_threads() -> list[str]:
    """The threads that an ordinary exit would wait for, by name."""
    main = threading.main_thread()
    strays = (t for t in known_threads().values() if not t.daemon and t is not main)
    return [f"thread {thread.name}" for thread in strays]
