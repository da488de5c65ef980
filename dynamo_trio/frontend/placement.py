"""Which worker answers a request, and who is asked next when one fails it.

Theory of operation
-------------------
A request is *untouched* as long as its client has seen nothing of an answer: no piece of a
streamed one, and none of a whole one until all of it is there. What came from the worker may
then be thrown away, and another worker asked from the beginning. That is done where the
worker, or the way to it, is to blame (:attr:`~dynamo_trio.errors.DynamoException.migratable`):
with up to :data:`OTHERS` others, each once, all within the one admission and the one HTTP
exchange. Whoever cuts the request cancels the loop; it is not sent on then.

An answer that has begun stays where it is: its client is told why it ends.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NoReturn

import attrs
import trio

from dynamo_trio.errors import (
    DynamoException,
    NoWorker,
    Overloaded,
    ResponseTimeout,
    Unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from dynamo_trio.client import Client
    from dynamo_trio.discovery import Instance
    from dynamo_trio.frontend.answers import Answer
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.plane import RequestHead
    from dynamo_trio.wire.llm import PreprocessedRequest

    #: Chooses an instance, but none with these ids; raises NoWorker.
    Route = Callable[[Client, Collection[int]], Instance]

logger = logging.getLogger("dynamo_trio.frontend")

#: How many others are asked when the first has failed.
OTHERS = 3


@attrs.define(eq=False)
class Placement:
    """To whom one request was sent."""

    _frontend: Frontend
    _model: ServedModel
    _head: RequestHead
    #: When the request is cut, on Trio's clock; None: the cancel scopes around it say so.
    _deadline: float | None = None
    #: Invariant: nobody is in here twice.
    tried: list[Instance] = attrs.field(factory=list)
    #: The plane that carries it to the last of them, once there is one.
    plane: str = ""

    def __str__(self) -> str:
        """Who has it, for the log; empty before anybody was asked."""
        if not self.tried:
            return ""
        others = len(self.tried) - 1
        return (
            f" by {self.tried[-1].instance_id:x}"
            + (f" over {self.plane}" if self.plane else "")
            + (f", after {others} other{'s' * (others > 1)}" if others else "")
        )

    async def serve(
        self, request: PreprocessedRequest, answer: Answer, attend: Callable[[], Awaitable[object]]
    ) -> None:
        """Ask one worker after the other until ``answer`` has begun, or cannot.

        Args:
            attend: waits for the answer, and passes it on. It returns when the answer is over,
                or has failed untouched.

        Raises:
            NoWorker: there was nobody to ask.
            Overloaded: everybody is busy, or full.
            DynamoException: the request failed, and its client has seen nothing of an answer.
        """
        instance = self._frontend.choose(self._model)
        while (failure := await self._ask(instance, request, answer, attend)) is not None:
            following = self._another() if failure.migratable else None
            if following is None:
                _tell(failure)
            logger.debug(
                "instance %x failed the request, %x is asked: %s (%.200s)",
                *(instance.instance_id, following.instance_id, failure.reason, failure.message),
            )
            instance = following
            answer.restart(self._model.preprocessor.output(request))
            await trio.lowlevel.checkpoint()  # a request that was cut goes no further

    async def _ask(
        self,
        instance: Instance,
        request: PreprocessedRequest,
        answer: Answer,
        attend: Callable[[], Awaitable[object]],
    ) -> DynamoException | None:
        """Returns why it failed untouched, if it did."""
        self.tried.append(instance)
        self.plane = ""
        answer.record.asks(instance)
        deadline = math.inf if self._deadline is None else self._deadline
        opening = self._model.client.open_stream(
            *(instance, self._head, request, answer),
            deadline=deadline,
            scopes_tell=self._deadline is None,
        )
        try:
            with self._frontend.stalls.opening() as begun:
                async with opening as stream:
                    begun()
                    self.plane = stream.plane
                    answer.attach(stream)
                    with self._frontend.stalls.watch(answer, stream.plane):
                        await attend()
        except DynamoException as exc:
            if isinstance(exc, ResponseTimeout):
                self._model.client.inhibitions.note(instance, exc)
            if not answer.untouched:
                raise
            return exc
        if isinstance(answer.error, ResponseTimeout):
            self._model.client.inhibitions.note(instance, answer.error)
        return answer.error if answer.untouched else None

    def _another(self) -> Instance | None:
        if len(self.tried) > OTHERS:
            return None
        try:
            return self._frontend.choose(self._model, [i.instance_id for i in self.tried])
        except (NoWorker, Overloaded):
            return None


def _tell(failure: DynamoException) -> NoReturn:
    """Of a request that was never begun its client may be sure that it can send it again."""
    if not failure.migratable or failure.status == 503 or isinstance(failure, Overloaded):
        raise failure
    raise Unanswered(failure.message) from failure
