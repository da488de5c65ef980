"""Services: tasks whose failure stops the process, but gracefully."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@attrs.define(eq=False)
class _Started:
    """A task status that passes ``started()`` on and remembers that it was called."""

    inner: trio.TaskStatus[object]
    called: bool = False

    def started(self, value: object = None) -> None:
        self.inner.started(value)
        self.called = True


async def supervise(
    fail: Callable[[BaseException], object],
    async_fn: Callable[..., Awaitable[object]],
    *args: object,
    task_status: trio.TaskStatus[object],
) -> None:
    """Run a service; an ``Exception`` that ends it goes to ``fail``, a cancellation passes.

    A service that is started (``await nursery.start(...)``) and fails before it has begun
    fails its starter instead: a port in use is no reason to drain.
    """
    status = _Started(task_status)
    started = task_status is not trio.TASK_STATUS_IGNORED
    try:
        if started:
            await async_fn(*args, task_status=status)
        else:
            await async_fn(*args)
    except Exception as exc:
        if started and not status.called:
            raise
        fail(exc)
    except BaseExceptionGroup as group:
        failed, rest = group.split(Exception)
        if failed is None or (started and not status.called):
            raise
        fail(failed)
        assert rest is not None, "a group of Exceptions alone is an Exception"
        raise rest from None
