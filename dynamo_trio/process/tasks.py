"""Who still holds a process: its nurseries and tasks as a tree, and its threads.

Theory of operation
-------------------
:func:`task_tree` only reads, takes no lock and awaits nothing. So any thread may call it,
also while the loop is stuck in one task. A loop that turns meanwhile may be seen in the
middle of a change; it is looked at for a few milliseconds, and in copies.

One line of a tree is one task::

    name: where it is > what it called there [what may end it]

*Where* is the innermost frame that is not Trio's own. In brackets are the cancel scopes
around that place, up to the nursery of the task, that have a deadline, a shield or a
cancellation. Tasks of one nursery that look alike but for these are counted after the
third.

To look at a task takes a tenth of a millisecond, and there may be very many. So of those of
one kind (the first word of their names) in one nursery only some are looked at, and fewer
once many have been; the others are counted.

Trio shows neither the cancel scopes of a task nor its parent scopes to others; what is
read here of its private state is read with care for the day on which it is gone.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.process.leftovers import known_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

#: Of tasks that look alike, so many are shown.
ALIKE = 3
#: Of tasks of one kind in one nursery so many are looked at ...
OF_ONE_KIND = 30
#: ... until so many have been in all; from then on as many as are shown of those that look alike.
MANY = 1000
#: Tasks that are looked at between two checkpoints.
STEP = 100
#: The innermost frames of a thread that are shown.
DEPTH = 12

_INDENT = "  "
_TRIO = os.path.dirname(trio.__file__) + os.sep
#: Where modules live, the longest first; a file is shown from below there.
_ROOTS = sorted(
    {os.path.join(path, "") for path in (*sys.path, str(Path(__file__).parents[2])) if path},
    key=len,
    reverse=True,
)


@attrs.frozen(eq=False)
class Loop:
    """A run of Trio, to be looked at from any thread."""

    root: trio.lowlevel.Task
    clock: trio.abc.Clock
    #: The thread that it runs in.
    thread: int

    @classmethod
    def current(cls) -> Loop:
        """The one that runs in this thread.

        Raises:
            RuntimeError: there is none.
        """
        root = trio.lowlevel.current_root_task()
        if root is None:
            raise RuntimeError("the loop has not begun, or is over")
        return cls(root, trio.lowlevel.current_clock(), threading.get_ident())


def task_tree(loop: Loop | None = None) -> str:
    """The tree of nurseries and tasks, then the threads. For people; no program reads it.

    Args:
        loop: whose tasks; without it, those of the loop in this thread, if there is one.
    """
    here = sys._getframe(1)
    try:
        if loop is None and trio.lowlevel.in_trio_run():
            loop = Loop.current()
        return "\n".join([*_tasks(loop, here), *_threads(here)])
    except Exception as exc:  # a question must not break what it asks about
        return f"cannot tell the tasks: {exc!r}"


async def tell_tasks() -> str:
    """What :func:`task_tree` tells of the loop in this thread; others run meanwhile."""
    here = sys._getframe(0)
    loop = Loop.current()
    look = _Look(here, loop.clock.current_time())
    lines, pause = [], STEP
    try:
        for line in look.task(loop.root, ""):
            lines.append(line)
            if look.count >= pause:
                pause = look.count + STEP
                await trio.lowlevel.checkpoint()
        return "\n".join([_title(look, loop), *lines, *_threads(here)])
    except Exception as exc:
        return f"cannot tell the tasks: {exc!r}"


def _threads(here: FrameType) -> Iterator[str]:
    """Every thread with its stack, the innermost frame first."""
    frames = sys._current_frames() | {threading.get_ident(): here}
    known = known_threads()
    yield f"{len(frames)} threads"
    for ident, frame in frames.items():
        yield f"{_INDENT}{_thread(known.get(ident), ident)}"
        for spot, _ in zip(_stack(frame), range(DEPTH), strict=False):
            yield f"{_INDENT * 2}{spot}"


def _thread(thread: threading.Thread | None, ident: int) -> str:
    if thread is None:
        return f"thread {ident:#x}"
    return f"{thread.name}{'' if thread.daemon else ' (not a daemon)'}"


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield _spot(frame, frame.f_lineno)
        frame = frame.f_back


# --- tasks --------------------------------------------------------------------------------


def _tasks(loop: Loop | None, here: FrameType) -> Iterator[str]:
    if loop is None:
        yield "there is no event loop yet"
        return
    own = loop.thread == threading.get_ident()
    look = _Look(here if own else sys._current_frames().get(loop.thread), loop.clock.current_time())
    lines = [*look.task(loop.root, "")]
    yield _title(look, loop)
    yield from lines


def _title(look: _Look, loop: Loop) -> str:
    count = _count(loop.root)
    return f"{count} tasks" + (f", {look.count} of them looked at" if look.count < count else "")


def _count(root: trio.lowlevel.Task) -> int:
    tasks = [root]
    for task in tasks:
        for nursery in tuple(task.child_nurseries):
            tasks += tuple(nursery.child_tasks)
    return len(tasks)


class _Look:
    """One look at a tree."""

    def __init__(self, here: FrameType | None, now: float) -> None:
        #: Where the thread of the loop is.
        self._here = here
        self._now = now
        #: Tasks that have been looked at.
        self.count = 0

    def task(self, task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
        """A task and everything below it."""
        yield indent + self._line(task)
        yield from self._below(task, indent + _INDENT)

    def _line(self, task: trio.lowlevel.Task) -> str:
        self.count += 1
        scopes = ", ".join(self._scopes(task))
        return f"{task.name}: {self._where(task)}{f' [{scopes}]' if scopes else ''}"

    def _below(self, task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
        for nursery in tuple(task.child_nurseries):
            why = ", ".join(self._scope(nursery.cancel_scope))
            yield f"{indent}nursery{f' [{why}]' if why else ''}"
            yield from self._children(tuple(nursery.child_tasks), indent + _INDENT)

    def _children(self, tasks: tuple[trio.lowlevel.Task, ...], indent: str) -> Iterator[str]:
        some, others = self._choose(tasks)
        lines = sorted(((self._line(task), task) for task in some), key=lambda pair: pair[0])
        for _, same in groupby(lines, key=lambda pair: pair[0].partition(" [")[0]):
            alike = list(same)
            shown = [pair for i, pair in enumerate(alike) if i < ALIKE or pair[1].child_nurseries]
            for line, task in shown:
                yield indent + line
                yield from self._below(task, indent + _INDENT)
            if len(alike) > len(shown):
                yield f"{indent}and {len(alike) - len(shown)} more of these"
        for kind, count in sorted(others.items()):
            yield f"{indent}and {count} more of {kind}, not looked at"

    def _choose(
        self, tasks: tuple[trio.lowlevel.Task, ...]
    ) -> tuple[list[trio.lowlevel.Task], Counter[str]]:
        """Those to look at, and how many others there are of each kind."""
        most = OF_ONE_KIND if self.count < MANY else ALIKE
        seen: Counter[str] = Counter()
        some = []
        for task in tasks:
            seen[kind := _kind(task)] += 1
            if seen[kind] <= most:
                some.append(task)
        return some, seen - Counter(map(_kind, some))

    # --- where it is ------------------------------------------------------------------

    def _where(self, task: trio.lowlevel.Task) -> str:
        if getattr(task.coro, "cr_running", False) and self._here is not None:
            return f"runs now: {_spot(self._here, self._here.f_lineno)}"
        frames = [*task.iter_await_frames()]
        own = [i for i, (frame, _) in enumerate(frames) if not _is_trios(frame)]
        if not frames:
            return "has ended"
        at = own[-1] if own else 0
        return _spot(*frames[at]) + _called(frame.f_code.co_name for frame, _ in frames[at + 1 :])

    # --- what may end it --------------------------------------------------------------

    def _scopes(self, task: trio.lowlevel.Task) -> Iterator[str]:
        """The scopes within the task, the innermost first; those of its nurseries are theirs."""
        status = getattr(task, "_cancel_status", None)
        nurseries = {id(nursery.cancel_scope) for nursery in task.child_nurseries}
        parent = task.parent_nursery
        end = None if parent is None else getattr(parent, "_cancel_status", None)
        while status is not None and status is not end:
            scope = status._scope
            if id(scope) not in nurseries:
                yield from self._scope(scope)
            status = status._parent

    def _scope(self, scope: trio.CancelScope) -> Iterator[str]:
        parts = []
        # As it was set: to ask the scope itself might begin the cancellation that is due.
        deadline = getattr(scope, "_deadline", math.inf)
        if getattr(scope, "_cancel_called", False):
            reason = getattr(getattr(scope, "_cancel_reason", None), "reason", None)
            parts.append(f"cancelled: {reason}" if reason else "cancelled")
        elif deadline != math.inf:
            parts.append(f"ends in {deadline - self._now:.1f} s")
        if scope.shield:
            parts.append("shielded")
        if parts:
            yield " ".join(parts)


def _kind(task: trio.lowlevel.Task) -> str:
    return task.name.partition(" ")[0]  # requests bear their ids behind it


def _called(names: Iterator[str]) -> str:
    """What a task asked of Trio."""
    for name in names:
        if name == "_nested_child_finished":
            return " > waits for its tasks"
        if not name.startswith("_"):
            return f" > {name}"
    return ""


def _is_trios(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TRIO)


def _spot(frame: FrameType, line: int) -> str:
    return f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_qualname}"


def _short(path: str) -> str:
    return next((path.removeprefix(root) for root in _ROOTS if path.startswith(root)), path)
