"""Steps of a stop that are somebody else's code, in tasks that the stop can leave behind.

Theory of operation
-------------------
A limit ends code by cancelling it, and code may not hear that: it sits in a thread or under a
shield, or it catches the cancellation. Whoever awaits such code has no limit himself. So each
step gets a task of its own, in a nursery that is left last, and the sequence only waits for its
end: for as long as its patience lasts, and for a moment more, in which whatever can be cancelled
unwinds. Then the stop goes on. What is left behind stays in the record as a step that has not
ended, and is named among the leftovers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

logger = logging.getLogger("dynamo_trio.lifecycle")

#: So many seconds a step that is being cancelled is still waited for.
UNWIND = 1 / 16


async def wait_beside(
    nursery: trio.Nursery,
    name: str,
    step: Callable[[trio.CancelScope], Awaitable[object]],
    patience: AbstractContextManager[trio.CancelScope],
    *,
    insist: bool = False,
) -> None:
    """Run ``step(limit)`` in a task of ``nursery``, and wait until it ends or ``patience`` does.

    Args:
        step: runs its work within ``limit``. That is cancelled when nobody waits any more.
        patience: a cancel scope, or what makes one.
        insist: the work goes on when the nursery is cancelled.
    """
    over = trio.Event()

    async def run(limit: trio.CancelScope) -> None:
        try:
            await step(limit)
        finally:
            over.set()

    with patience:
        end = max(trio.current_time(), trio.current_effective_deadline())
        limit = trio.CancelScope(deadline=end, shield=insist)
        nursery.start_soon(run, limit, name=name)
        try:
            await over.wait()
        finally:
            limit.cancel("nobody waits for it any more")
            await _unwind(name, over)


async def _unwind(name: str, over: trio.Event) -> None:
    if not over.is_set():
        with trio.move_on_after(UNWIND, shield=True):
            await over.wait()
    if not over.is_set():
        logger.error("%s cannot be cancelled; the stop goes on without its end", name)
