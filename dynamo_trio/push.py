"""Handlers that push: what they send does not pass through their own task.

Theory of operation
-------------------
An asynchronous generator costs a wake-up of its task for each item. An engine that steps many
requests at once has its tokens together in one place, its own task; so a handler can instead
be given an :class:`Output` and let the engine's task put into it. The handler itself then
only waits for the end, and is cancelled like any other by a cut.

:meth:`Output.put_tokens` is the way of a token, and costs the call of a function. It asks for
no credit: what a client does not take yet waits in the plane, so whoever calls it must bound
what is sent to one request (an engine does, by ``max_tokens``). The last item does wait: until
then the request is under way, so that a stop of the process waits for a slow client too.

From :meth:`Output.put_last` on the request counts as complete: a cut in the moment between the
last item and the handler's return changes nothing any more.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.lifecycle import CutReason
from dynamo_trio.wire.llm import size_of_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dynamo_trio.context import Context
    from dynamo_trio.lifecycle import Admission
    from dynamo_trio.metrics.component import CallRecord
    from dynamo_trio.plane.abc import Outbox
    from dynamo_trio.wire.dynamo.codec import Codec


@attrs.define(eq=False)
class Output:
    """Where a pushing handler's items go. Plain calls, from any task of the Trio thread.

    Behind the last item, and once the handler has returned, everything is dropped.
    """

    _outbox: Outbox
    _codec: Codec
    _record: CallRecord
    _admission: Admission
    #: The last item was put while there was a client. Never set back.
    complete: bool = False
    #: Invariant: once set nothing is sent any more.
    _closed: bool = False

    def put_tokens(self, token_ids: Sequence[int]) -> None:
        """Send new tokens: each as an item of an engine's answer with nothing else in it."""
        if not self._closed and token_ids:
            self._outbox.put_tokens(token_ids)
            for token_id in token_ids:
                self._record.item(size_of_token(self._codec, token_id))

    @property
    def has_credit(self) -> bool:
        """Does the client keep up? Nothing that was put waits here, and one more may go."""
        return self._outbox.has_credit

    async def wait_credit(self) -> None:
        """Wait until the client keeps up."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._outbox.has_credit:
            await self._outbox.wait_credit()

    def put(self, item: object) -> None:
        """Send an item of any kind; if there may be many, only while :attr:`has_credit`.

        Raises:
            LocalProtocolError: no codec can spell it.
        """
        if not self._closed:
            payload = self._codec.encode(item)
            self._outbox.put(payload)
            self._record.item(len(payload))

    def put_last(self, item: object) -> None:
        """Send the last item, for which there should be credit: the request is then complete.

        Raises as :meth:`put`.
        """
        if not self._closed:
            self.put(item)
            self.complete = self._admission.reason is not CutReason.CLIENT_LEFT
            self.close()

    def close(self) -> None:
        """Drop what comes from now on."""
        self._closed = True


@attrs.frozen(eq=False)
class PushHandler:
    """A handler that pushes: ``async def function(request, context, output)``.

    It returns when everything was put, and raises what the request is to fail with. It can
    decorate the function (``TypeError`` for one that is no coroutine function)::

        @PushHandler
        async def generate(request, context, output):
            with engine.attach(to_engine(request), sink_for(output)):
                await the_end
    """

    function: Callable[[Any, Context, Output], Awaitable[None]]

    def __attrs_post_init__(self) -> None:
        if inspect.isasyncgenfunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise TypeError(
                f"the handler {self.function.__qualname__} is a generator, and those do not push; "
                "a handler that pushes is 'async def' without 'yield'"
            )

    def start(self, request: object, context: Context) -> Pushed:
        """The work for one request."""
        return Pushed(partial(self.function, request, context))


@attrs.frozen(eq=False)
class Pushed:
    """A pushing handler that has its request; what it lacks is where its items go."""

    run: Callable[[Output], Awaitable[None]]
