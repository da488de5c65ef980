"""``/drain`` and ``/resume`` of the status server, and ``/debug/tasks``.

``GET /drain`` is always answered. What changes the process needs a permission, since the
status port is open to whoever reaches it: ``DYN_TRIO_DRAIN_API``, or a port that is bound to
this machine alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import attrs
import msgspec
import trio

from dynamo_trio.errors import Cancelled, Draining, DynamoException, InvalidArgument
from dynamo_trio.http.respond import read_body, watch_disconnect
from dynamo_trio.lifecycle import DrainState
from dynamo_trio.process.tasks import tell_tasks
from dynamo_trio.worker.callers import foreign_host, has_origin, is_from_here
from dynamo_trio.worker.drain_view import view

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dynamo_trio.http.asgi import Scope
    from dynamo_trio.lifecycle import ReversibleDrain
    from dynamo_trio.worker.status import WorkerStatus
    from dynamo_trio.worker.status_request import Handler, Request

TEXT = b"text/plain; charset=utf-8"

OFF = (
    "draining over HTTP is off: set DYN_TRIO_DRAIN_API=1, or bind the status server to this"
    " machine (DYN_SYSTEM_HOST=127.0.0.1)"
)
DENIED = "the drain API was switched off by DYN_TRIO_DRAIN_API"
FOREIGN = "this is not for web pages: the request has an Origin header"
STARTING = "the process is still starting: it has nothing to drain yet"
TAKEN_BACK = "the drain was taken back before the process was empty"
ELSEWHERE = (
    "the tasks are shown to callers on this machine only, as with curl"
    " http://127.0.0.1:PORT/debug/tasks"
)


def _anybodys(host: str) -> str:
    return (
        f"the request is for the host {host[:100]!r}, which may be anybody's name for this machine:"
        " ask by its address, or as localhost, or by the name in DYN_SYSTEM_HOST"
    )


def _crowd(waiting: int) -> str:
    return (
        f"it has begun, but {waiting} callers wait for its end already, and so many may: ask"
        " without wait=true, and GET /drain for how far it is"
    )


@attrs.frozen(eq=False)
class _Asked:
    """A request that may tell the process something."""

    drain: ReversibleDrain
    #: The client wants its answer when it is done.
    waits: bool
    #: Everybody who waits.
    waiting: set[_Asked]
    most_waiting: int

    async def settled(self, request: Request) -> bool:
        """Wait, if the client does, until it is done or the process has stopped.

        False: the client has left, or has been told that too many wait.
        """
        if not self.waits:
            return True
        if len(self.waiting) >= self.most_waiting:
            await request.fail(503, "Service unavailable", _crowd(len(self.waiting)))
            return False
        self.waiting.add(self)
        try:
            return await self._wait(request)
        finally:
            self.waiting.discard(self)

    async def _wait(self, request: Request) -> bool:
        with trio.CancelScope() as left:
            leave = partial(left.cancel, "the client has left")
            async with watch_disconnect(request.scope, request.receive, leave):
                await _wait(self.drain)
        return not left.cancelled_caught


@attrs.frozen(eq=False)
class DrainApi:
    """The routes."""

    status: WorkerStatus
    #: ``DYN_TRIO_DRAIN_API``; None: it is not set, and the address that is bound decides.
    allowed: bool | None = None
    #: The port is bound to this machine alone.
    is_local: bool = False
    #: ``DYN_SYSTEM_HOST``.
    host: str = ""
    #: Who waits for the end of a drain; others are asked to look again later.
    most_waiting: int = 64
    _waiting: set[_Asked] = attrs.field(init=False, factory=set)

    @property
    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Path -> method -> handler."""
        return {
            "/drain": {"GET": self._tell, "POST": self._drain},
            "/resume": {"POST": self._resume},
            "/debug/tasks": {"GET": self._tasks},
        }

    async def _tell(self, request: Request) -> None:
        await self._answer(request, 200)

    async def _drain(self, request: Request) -> None:
        asked = await self._read(request)
        if asked is None:
            return
        drain = asked.drain
        drain.begin()
        if not await asked.settled(request):
            return
        if drain.safe_to_delete:
            await self._answer(request, 200)
        elif drain.is_wanted or drain.lifecycle.stopping:
            await self._answer(request, 202)
        else:
            await request.fail(409, "Conflict", TAKEN_BACK)

    async def _resume(self, request: Request) -> None:
        asked = await self._read(request)
        if asked is None:
            return
        try:
            asked.drain.resume()
        except Draining as exc:
            await request.fail(409, "Conflict", exc.message)
            return
        if await asked.settled(request):
            is_back = asked.drain.state is DrainState.SERVING
            await self._answer(request, 200 if is_back else 202)

    async def _tasks(self, request: Request) -> None:
        reason = self._foreign(request.scope)
        if not (self.is_local or is_from_here(request.scope)):
            reason = ELSEWHERE
        if reason is not None:
            await request.fail(403, "Forbidden", reason)
            return
        await request.bytes((await tell_tasks()).encode(errors="replace"), TEXT)

    async def _answer(self, request: Request, code: int) -> None:
        await request.json(code, msgspec.json.encode(view(self.status)))

    async def _read(self, request: Request) -> _Asked | None:
        """What is asked for, if it may be; None: the request has been answered."""
        reason, drain = self._forbidden(request.scope), self.status.drain
        if reason is not None:
            await request.fail(403, "Forbidden", reason)
            return None
        try:
            waits = _wants_to_wait(request.scope)
            await read_body(request.scope, request.receive, request.limits)
        except Cancelled:
            return None
        except DynamoException as exc:
            await request.fail(exc.status, "Bad request", exc.message)
            return None
        if drain is None:
            await request.fail(409, "Conflict", STARTING)
            return None
        return _Asked(drain, waits, self._waiting, self.most_waiting)

    def _forbidden(self, scope: Scope) -> str | None:
        if self.allowed is False:
            return DENIED
        if not (self.allowed or self.is_local):
            return OFF
        return self._foreign(scope, by_any_name=bool(self.allowed))

    def _foreign(self, scope: Scope, *, by_any_name: bool = False) -> str | None:
        # A page in somebody's browser can send a plain GET or POST to a port of this machine.
        if has_origin(scope):
            return FOREIGN
        # With a permission others may ask, and by the name that they have for us.
        host = None if by_any_name else foreign_host(scope, self.host)
        return None if host is None else _anybodys(host)


def _wants_to_wait(scope: Scope) -> bool:
    """``?wait=true``.

    Raises:
        InvalidArgument: it has another value.
    """
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    value = query.get("wait", ["false"])[-1].lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidArgument(f"wait={value[:40]!r}: must be true or false")
    return value in ("true", "1")


async def _wait(drain: ReversibleDrain) -> None:
    if drain.lifecycle.stopping:
        await drain.lifecycle.wait_stopped()
        return
    async with trio.open_nursery() as nursery:

        async def wait_for(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            nursery.cancel_scope.cancel("one of them is there")

        nursery.start_soon(wait_for, drain.wait_settled)
        nursery.start_soon(wait_for, drain.lifecycle.wait_stopped)
