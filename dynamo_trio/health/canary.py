"""Canaries: requests to our own endpoint, to see that it answers.

Theory of operation
-------------------
One task for each endpoint that has a payload. It sends nothing while the endpoint gives answers
to others: these are proof enough. After a silence it sends the payload to the handler, by the
very way of other requests, but through a gate of its own: a canary is no admitted work, so no
limit refuses it and no drain waits for it.

At most one canary lives. One that is not answered in time counts as failed at that moment, and
is cancelled as if its client had left. Until it is really gone (a handler may shield itself, an
engine may be stuck) no other is sent; what the endpoint answers to others still counts.

What follows from a failure is not decided here but told (``tell``): the endpoint leaves the
routing pool until it answers again. Telling fails if the store does; then it is repeated. The
first canary is sent before the endpoint is registered: who cannot answer is not found.

Nothing is sent, and nothing is told, once the process stops, or while the endpoint is out of
routing for another reason (``wanted``). A stop cancels the canary that lives, and waits for it in
no phase; one that does not end holds the nursery of its endpoint, and is named as left.
"""

from __future__ import annotations

import logging
import math
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.engines.awake import Allowance
from dynamo_trio.errors import DynamoException
from dynamo_trio.health.answer import Answer
from dynamo_trio.health.payload import marked
from dynamo_trio.health.standing import Standing
from dynamo_trio.plane.abc import Acceptor, RequestHead
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from dynamo_trio.lifecycle import Gate
    from dynamo_trio.plane.abc import AcceptedCall

logger = logging.getLogger("dynamo_trio.health")

#: How often in each silence it is looked whether it is one.
LOOKS = 4
#: Seconds until what could not be told is told again.
RETRY = 1.0


@attrs.frozen
class CanarySettings:
    """When canaries are sent, and what. Times are seconds."""

    #: ``DYN_HEALTH_CHECK_ENABLED``
    enabled: bool = False
    #: A silence so long asks for a canary (``DYN_CANARY_WAIT_TIME``). Must be above 0.
    wait: float = 10.0
    #: For its answer (``DYN_HEALTH_CHECK_REQUEST_TIMEOUT``).
    limit: float = 3.0
    #: What the operator wants to be sent (``DYN_HEALTH_CHECK_PAYLOAD``).
    payload: Mapping[str, object] | None = None

    def payload_or(self, default: Mapping[str, object]) -> dict[str, object]:
        """The operator's payload, or else ``default``; with Dynamo's marker in either case."""
        return marked(default if self.payload is None else self.payload)


@attrs.define(eq=False)
class Canary:
    """The health checks of one endpoint. :meth:`run` is called once."""

    name: str
    payload: bytes
    settings: CanarySettings
    #: Takes canaries on; they pass through ``gate``.
    acceptor: Acceptor
    #: Invariant: holds the canary that lives, and never more than one.
    gate: Gate
    #: Grows with every item that the endpoint gives to others.
    activity: Callable[[], int]
    #: Is the endpoint to be found, its health apart?
    wanted: Callable[[], bool]
    #: Told when the endpoint is found to be healthy, or not to be.
    tell: Callable[[bool], Awaitable[object]]
    #: Returns when the process begins to stop.
    stopping: Callable[[], Awaitable[object]]
    codec: Codec = MSGPACK
    standing: Standing = attrs.field(factory=Standing)
    _seen: int = 0
    #: When the endpoint was last known to answer, or was asked, on Trio's clock.
    _since: float = -math.inf
    #: What was told last; None: that has failed, and nobody knows what came of it.
    _told: bool | None = False
    #: What the handler raised at the last canary is in the log.
    _broken: bool = False

    async def check(self) -> None:
        """Send one canary and judge the endpoint by it, unless the process stops meanwhile."""
        async with self._until_the_stop():
            await self._judge(await self._ask())

    async def run(self) -> None:
        """Send canaries until the process stops."""
        async with self._until_the_stop():
            while True:
                await self._wait_due()
                if self.wanted():
                    await self._judge(await self._ask())
                else:
                    self._since = trio.current_time()

    @asynccontextmanager
    async def _until_the_stop(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end, nursery.cancel_scope)
            yield
            nursery.cancel_scope.cancel("the check is over")

    async def _end(self, scope: trio.CancelScope) -> None:
        await self.stopping()
        scope.cancel("the process stops")

    # --- when -------------------------------------------------------------------------------

    async def _wait_due(self) -> None:
        """Wait until the endpoint has been silent for so long, and no canary lives any more."""
        while True:
            await self._note_activity()
            left = self._since + self.settings.wait - trio.current_time()
            if left <= 0 and not self.gate.count:
                return
            look = self.settings.wait / LOOKS
            if self._told is None:
                look = min(look, RETRY)
            await trio.sleep(min(left, look) if left > 0 else look)
            await self._tell()

    async def _note_activity(self) -> None:
        """What was answered to others counts as a pass."""
        if self._has_answered():
            self._since = trio.current_time()
            await self._judge(None)

    def _has_answered(self) -> bool:
        """Has anybody been given something since this was asked last?"""
        before, self._seen = self._seen, self.activity()
        return self._seen != before

    # --- one canary -------------------------------------------------------------------------

    async def _ask(self) -> str | None:
        """Send one; returns what is wrong, or None."""
        self._seen = self.activity()
        answer = Answer(self.codec, is_repeat=self._broken)
        head = RequestHead(f"canary-{uuid.uuid4()}", codec=self.codec)
        try:
            call = self.acceptor.accept(head, self.payload, answer)
        except DynamoException as exc:
            return f"it was refused: {exc.message}"
        try:
            await self._wait_for(answer)
        finally:
            self._leave(call, answer)
            self._since, self._broken = trio.current_time(), answer.broken
        if answer.verdict is None or self._has_answered():
            return None
        return answer.verdict

    async def _wait_for(self, answer: Answer) -> None:
        allowance = Allowance(self.settings.limit)  # time in which the process stood still is none
        while not (answer.is_known or allowance.spent):
            with allowance.spending():
                await answer.wait()

    @staticmethod
    def _leave(call: AcceptedCall, answer: Answer) -> None:
        if not answer.finished:
            call.cancel()

    async def _judge(self, fault: str | None) -> None:
        first = not self.standing.healthy and not self.standing.was_ill
        changed = self.standing.note(passed=fault is None, now=trio.current_time())
        if fault is not None and (changed or first):
            logger.warning(
                "%s fails its health check (%s): it is in no routing until it passes one",
                self.name,
                fault,
            )
        elif changed and not first:
            logger.info("%s passes its health checks again", self.name)
        await self._tell()

    async def _tell(self) -> None:
        """Tell the verdict, if that has not been done."""
        verdict = self.standing.healthy
        if verdict is self._told:
            return
        self._told = None
        try:
            await self.tell(verdict)
            self._told = verdict
        except* Exception as group:
            what = "its return to routing" if verdict else "taking it out of routing"
            logger.error("%s: %s failed; trying again", self.name, what, exc_info=group)


@asynccontextmanager
async def watched(canary: Canary) -> AsyncIterator[None]:
    """Check the endpoint while the block runs; entered, its first canary is judged."""
    async with trio.open_nursery() as nursery:
        await canary.check()
        nursery.start_soon(canary.run, name=f"canary {canary.name}")
        yield
        nursery.cancel_scope.cancel("the endpoint is closed")
