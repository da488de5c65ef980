"""What a handler knows about the request that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import attrs
import trio

#: A shield with a limit in seconds, capped by the shutdown's hard deadline.
Cleanup = Callable[[float], AbstractContextManager[trio.CancelScope]]


@contextmanager
def plain_cleanup(limit: float) -> Iterator[trio.CancelScope]:
    """A shield of ``limit`` seconds, for use outside a lifecycle (tests, scripts)."""
    with trio.move_on_after(limit, shield=True) as scope:
        yield scope


@attrs.define(eq=False)
class Context:
    """Identity and cancellation of one request (``dynamo.runtime.Context``).

    A handler seldom has to ask: when the client leaves or the shutdown limit is
    reached, ``trio.Cancelled`` is raised where the handler waits. Code in
    ``finally`` that must itself wait does so under :meth:`cleanup`.
    """

    id: str
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    _cleanup: Cleanup = plain_cleanup
    #: Invariant: killed implies stopped.
    _stopped: trio.Event = attrs.field(factory=trio.Event)
    _killed: bool = False

    def is_stopped(self) -> bool:
        """Was the generation asked to end early?"""
        return self._stopped.is_set()

    def is_killed(self) -> bool:
        """Has the client left, so that nobody reads any further?"""
        return self._killed

    def stop_generating(self) -> None:
        """Ask the handler to come to an end; what it still sends is delivered."""
        self._stopped.set()

    def kill(self) -> None:
        """Stop, and say that nobody reads any further."""
        self._killed = True
        self._stopped.set()

    async def async_killed_or_stopped(self) -> None:
        """Wait until the request is stopped or killed."""
        await self._stopped.wait()

    def cleanup(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Shield a ``finally`` that waits, for at most ``seconds``.

        The limit shrinks when the shutdown's hard deadline comes first.
        """
        return self._cleanup(seconds)
