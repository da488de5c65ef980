"""What a router mode is asked, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import attrs

from dynamo_trio.errors import NoWorker

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Target(NamedTuple):
    """Who gets a request."""

    #: The instance id.
    worker_id: int
    #: Which of its data-parallel ranks; None: the engine chooses.
    dp_rank: int | None = None


@attrs.frozen(kw_only=True)
class Ask:
    """What a choice may depend on. What a mode has no use for may be left out."""

    #: How long the prompt is.
    tokens: int = 0
    #: The tokens hashes of its full blocks (:mod:`dynamo_trio.wire.dynamo.block_hash`).
    blocks: Sequence[int] = ()
    #: Instances that must not be chosen: asked before, or suspected. A set, if it is long.
    without: Collection[int] = ()
    #: The instance that the client has named.
    worker_id: int | None = None
    #: What the request belongs to, for its requests to stay together.
    session: str | None = None
    #: Seconds, on whatever clock; it never goes back.
    now: float = 0.0


class Router(Protocol):
    """One router mode. All calls are of one thread.

    A request is told with :meth:`begin` when it goes to its worker, and with :meth:`end` when
    it is over there, whatever the end is; a second try at another worker is a request of its
    own. Modes that look at no load take these calls and do nothing.
    """

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come, or its ranks have changed."""
        ...

    def remove(self, worker_id: int) -> None:
        """A worker has gone; requests that it has are told of no more, or until their ends."""
        ...

    def __contains__(self, worker_id: object) -> bool: ...

    def __len__(self) -> int: ...

    def choose(self, ask: Ask) -> Target:
        """Who is to get this request.

        Raises:
            NoWorker: there is nobody, or nobody but those in ``ask.without``.
            InvalidArgument: the request lacks what the mode needs.
        """
        ...

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The request goes to ``target``."""
        ...

    def prefilled(self, request_id: str) -> None:
        """Its first token has come."""
        ...

    def grew(self, request_id: str, tokens: int) -> None:
        """So many more tokens have come."""
        ...

    def end(self, request_id: str) -> None:
        """It is over. Of a request that is not known: nothing happens."""
        ...


class Unbooked:
    """For modes that look at no load."""

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """Nothing happens."""

    def prefilled(self, request_id: str) -> None:
        """Nothing happens."""

    def grew(self, request_id: str, tokens: int) -> None:
        """Nothing happens."""

    def end(self, request_id: str) -> None:
        """Nothing happens."""


def refuse(ask: Ask) -> NoReturn:
    """Say that there is nobody to choose."""
    raise NoWorker("no other worker can be asked" if ask.without else "there is no worker")
