"""Keeps the requests of one session at one worker (``--router-session-affinity-ttl-secs``)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.routing.abc import Ask, Router, Target

#: Sessions that are remembered at most; who has been idle for longest goes first.
MAX_SESSIONS = 2**17


@attrs.define(eq=False)
class SessionAffinity:
    """Session -> worker. Times are seconds on the caller's clock; each call takes O(1)."""

    #: For how long an idle session is remembered.
    ttl: float
    max_sessions: int = MAX_SESSIONS
    # Where each session is and when it was last used, the longest ago first.
    _bound: OrderedDict[str, tuple[Target, float]] = attrs.field(factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, session: str, now: float) -> Target | None:
        """Where the session is, if it was used lately."""
        self._expire(now)
        bound = self._bound.get(session)
        return None if bound is None else bound[0]

    def bind(self, session: str, target: Target, now: float) -> None:
        """A request of the session goes to ``target``."""
        self._expire(now)
        self._bound[session] = target, now
        self._bound.move_to_end(session)
        if len(self._bound) > self.max_sessions:
            self._bound.popitem(last=False)

    def forget(self, session: str) -> None:
        """The session is over."""
        self._bound.pop(session, None)

    def _expire(self, now: float) -> None:
        while self._bound and next(iter(self._bound.values()))[1] + self.ttl <= now:
            self._bound.popitem(last=False)


@attrs.define(eq=False)
class Sticky:
    """A router mode whose choice is kept for the session of a request.

    A session whose worker is gone, or may not be asked this time, is bound to the worker that
    is chosen instead.
    """

    router: Router
    affinity: SessionAffinity

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self.router

    def __len__(self) -> int:
        return len(self.router)

    def add(self, worker_id: int, dp_ranks: Sequence[int] = (0,)) -> None:
        """A worker has come, or its ranks have changed."""
        self.router.add(worker_id, dp_ranks)

    def remove(self, worker_id: int) -> None:
        """A worker has gone. Its sessions are bound to others as their requests come."""
        self.router.remove(worker_id)

    def choose(self, ask: Ask) -> Target:
        """Where the session is, else whom the mode chooses. Raises as the mode does."""
        if ask.session is None:
            return self.router.choose(ask)
        bound = self.affinity.find(ask.session, ask.now)
        if bound is None or bound.worker_id not in self.router or bound.worker_id in ask.without:
            return self.router.choose(ask)
        return bound

    def begin(self, request_id: str, target: Target, ask: Ask) -> None:
        """The request, and from now on its session, goes to ``target``."""
        if ask.session is not None:
            self.affinity.bind(ask.session, target, ask.now)
        self.router.begin(request_id, target, ask)

    def prefilled(self, request_id: str) -> None:
        """Its first token has come."""
        self.router.prefilled(request_id)

    def grew(self, request_id: str, tokens: int) -> None:
        """So many more tokens have come."""
        self.router.grew(request_id, tokens)

    def end(self, request_id: str) -> None:
        """It is over."""
        self.router.end(request_id)
