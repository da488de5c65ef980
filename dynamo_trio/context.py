"""What a handler knows about the request that it serves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.lifecycle.prospects import Prospects

if TYPE_CHECKING:
    from dynamo_trio.wire.trace import TraceContext

#: A shield with a limit in seconds, capped by the shutdown's hard deadline.
Cleanup = Callable[[float], AbstractContextManager[trio.CancelScope]]


@contextmanager
def plain_cleanup(limit: float) -> Iterator[trio.CancelScope]:
    """A shield of ``limit`` seconds, for use outside a lifecycle (tests, scripts)."""
    with trio.move_on_after(limit, shield=True) as scope:
        yield scope


class Follower(Protocol):
    """What ends with a request: a child context, a stream to another worker."""

    def stop_generating(self) -> None:
        """Come to an end; what is still sent is taken."""

    def kill(self) -> None:
        """Nobody reads any further."""


def _identity(value: str | None) -> str:
    if value is None:
        return str(uuid.uuid4())
    if not isinstance(value, str):
        raise InvalidArgument(f"a context's id must be text or None, not {type(value).__name__}")
    return value


def _read_only(value: Mapping[str, str] | None) -> Mapping[str, str]:
    given: Any = {} if value is None else value  # who calls may not check its types
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in given.items()
    ):
        raise InvalidArgument("a context's metadata must be a mapping of text to text")
    return MappingProxyType(dict(given))


@attrs.define(eq=False)
class Context:
    """Identity and cancellation of one request (``dynamo.runtime.Context``).

    A handler seldom has to ask: when the client leaves or the shutdown limit is
    reached, ``trio.Cancelled`` is raised where the handler waits. Code in
    ``finally`` that must itself wait does so under :meth:`cleanup`.

    Raises:
        InvalidArgument: when it is made: the id is no text, or ``metadata`` does not map text
            to text.
    """

    #: Without one, or with None, it is given one.
    _id: str = attrs.field(default=None, converter=_identity)
    #: What travels with the request. It cannot be changed.
    metadata: Mapping[str, str] = attrs.field(default=None, converter=_read_only)
    _cleanup: Cleanup = plain_cleanup
    #: How the request may go on: a handler says here what it knows of that.
    prospects: Prospects = attrs.field(factory=Prospects)
    #: Invariant: killed implies stopped.
    _stopped: trio.Event = attrs.field(factory=trio.Event)
    _killed: bool = False
    #: Where the request stands in its trace, if that is known.
    trace: TraceContext | None = attrs.field(default=None, kw_only=True)
    #: Told, once each, what this context is told.
    _followers: list[Follower] = attrs.field(factory=list)

    def id(self) -> str:
        """The request's id, the same on every worker that ever serves it."""
        return self._id

    @property
    def trace_id(self) -> str | None:
        """The trace that the request belongs to: 32 hex digits."""
        return self.trace.trace_id if self.trace else None

    @property
    def span_id(self) -> str | None:
        """The span of the request in this process: 16 hex digits."""
        return self.trace.span_id if self.trace else None

    @property
    def parent_span_id(self) -> str | None:
        """The span of who asked: 16 hex digits; None if nobody said so."""
        return (self.trace.parent_id or None) if self.trace else None

    def trace_headers(self) -> dict[str, str] | None:
        """What an inference engine is given, so that its spans are below this request's.

        ``traceparent`` and, as far as they came with the request, ``tracestate`` and
        ``x-request-id``; beside them the request's own id, as ``request-id``. None: nothing is
        known of a trace.
        """
        return {**self.trace.headers(), "request-id": self._id} if self.trace else None

    def is_stopped(self) -> bool:
        """Was the generation asked to end early?"""
        return self._stopped.is_set()

    def is_killed(self) -> bool:
        """Has the client left, so that nobody reads any further?"""
        return self._killed

    def stop_generating(self) -> None:
        """Ask the handler to come to an end; what it still sends is delivered."""
        if not self._stopped.is_set():
            self._stopped.set()
            for follower in list(self._followers):
                follower.stop_generating()

    def kill(self) -> None:
        """Stop, and say that nobody reads any further."""
        if not self._killed:
            self._killed = True
            self._stopped.set()
            for follower in list(self._followers):
                follower.kill()

    def child(self, id: str | None = None) -> Context:
        """A context that stops when this one does, but not the other way round."""
        child = Context(
            id or self._id, self.metadata, self._cleanup, self.prospects, trace=self.trace
        )
        self.link(child)
        return child

    def link(self, follower: Follower) -> None:
        """Let ``follower`` stop, and be killed, with this context; at once if that is past."""
        self._followers.append(follower)
        if self._killed:
            follower.kill()
        elif self.is_stopped():
            follower.stop_generating()

    def unlink(self, follower: Follower) -> None:
        """Take :meth:`link` back."""
        self._followers.remove(follower)

    async def async_killed_or_stopped(self) -> None:
        """Wait until the request is stopped or killed."""
        await self._stopped.wait()

    def cleanup(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Shield a ``finally`` that waits, for at most ``seconds``.

        The limit shrinks when the shutdown's hard deadline comes first.
        """
        return self._cleanup(seconds)
