"""Ends what a worker leaves without a word (``DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS``).

Theory of operation
-------------------
A worker that hangs, or is frozen, ends no stream. On the ``mux`` plane heartbeats show that;
Dynamo's ``tcp`` plane has none, so there a stream is given up that brings nothing for too long,
be it before the first item or between two. One task looks at all streams now and then, and
compares what each has brought with what it had brought before: a token costs nothing. So a
stream is given up up to a tenth later than its limit says, and never earlier.

Whoever waits for its own client is not silent, and a process that was itself frozen has no
right to judge. A request that is given up while it is untouched goes to another worker.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import ResponseTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from dynamo_trio.frontend.answers import Answer

#: Seconds, for planes without heartbeats. Dynamo 1.5.1 has no limit unless one is set; this
#: one is longer than any prompt takes, and shorter than the patience of most clients.
DEFAULT = 120.0
#: The planes that it is for.
SILENT_PLANES = frozenset({"tcp"})
#: Looks per limit, and seconds between two of them, at least and at most.
LOOKS = 10
PACE = (0.01, 5.0)


@attrs.define(eq=False)
class _Watched:
    limit: float  # seconds
    heard_at: float  # on Trio's clock
    progress: int


@attrs.define(eq=False)
class Stalls:
    """All streams that workers are to feed. ``run`` is to run in a task beside them."""

    #: Seconds on every plane; ``inf``: never. None: as the plane needs it.
    limit: float | None = None
    _watched: dict[Answer, _Watched] = attrs.field(factory=dict)
    _more: trio.Event = attrs.field(factory=trio.Event)

    def limit_on(self, plane: str) -> float:
        """Seconds without a word after which a stream on this plane is given up."""
        if self.limit is not None:
            return self.limit
        return DEFAULT if plane in SILENT_PLANES else math.inf

    def opening(self) -> AbstractContextManager[Callable[[], object]]:
        """A request is being sent within the block, until it calls what it is given.

        A plane has limits of its own for that (``DYN_TCP_REQUEST_TIMEOUT``), but a shorter one
        may be set here.

        Raises:
            ResponseTimeout: that took longer than a worker may be silent.
        """
        if self.limit is None or self.limit == math.inf:
            return _BEGUN
        return _bounded(self.limit)

    def watch(self, answer: Answer, plane: str) -> AbstractContextManager[None]:
        """Finish ``answer`` with ResponseTimeout if its worker falls silent within the block."""
        limit = self.limit_on(plane)
        return _UNWATCHED if limit == math.inf else self._watch(answer, limit)

    @contextmanager
    def _watch(self, answer: Answer, limit: float) -> Iterator[None]:
        self._watched[answer] = _Watched(limit, trio.current_time(), answer.progress)
        self._more.set()
        try:
            yield
        finally:
            self._watched.pop(answer, None)

    async def run(self) -> None:
        """Look at them until cancelled."""
        pace = min(max((self.limit or DEFAULT) / LOOKS, PACE[0]), PACE[1])
        while True:
            while not self._watched:
                self._more = trio.Event()
                await self._more.wait()
            looked = trio.current_time()
            await trio.sleep(pace)
            self._look(frozen=trio.current_time() - looked > 2 * pace)

    def _look(self, *, frozen: bool) -> None:
        now = trio.current_time()
        for answer, watched in list(self._watched.items()):
            if frozen or answer.progress != watched.progress or answer.waits_for_client:
                watched.heard_at, watched.progress = now, answer.progress
            elif now - watched.heard_at >= watched.limit:
                del self._watched[answer]
                answer.finish(ResponseTimeout(_said_nothing(watched.limit)))


def _begun() -> None:
    """Nothing depends on it."""


# Nothing is kept in one, so all requests have the same.
_BEGUN = nullcontext(_begun)
_UNWATCHED = nullcontext()


@contextmanager
def _bounded(limit: float) -> Iterator[Callable[[], object]]:
    with trio.CancelScope(deadline=trio.current_time() + limit) as scope:
        yield partial(setattr, scope, "deadline", math.inf)
    if scope.cancelled_caught:
        raise ResponseTimeout(_said_nothing(limit))


def _said_nothing(seconds: float) -> str:
    return f"the worker said nothing for {seconds:g} seconds"
