"""An engine as a handler: what a worker's ``generate`` endpoint runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.engines import Delta, Engine, Request
from dynamo_trio.errors import Unknown
from dynamo_trio.lifecycle.handover import estimate
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.wire.llm import (
    CompletionUsage,
    LLMEngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio import engines
    from dynamo_trio.context import Context
    from dynamo_trio.wire.llm import FinishReason


def to_engine(request: PreprocessedRequest, request_id: str) -> Request:
    """The engine's view of a request. Without ``max_tokens`` the context is the limit."""
    stop, sampling = request.stop_conditions, request.sampling_options
    prompt = tuple(request.token_ids)
    ends = [
        *(stop.stop_token_ids_hidden or ()),
        *(stop.stop_token_ids or ()),
        *(request.eos_token_ids or ()),
    ]
    return Request(
        request_id=request_id,
        token_ids=prompt,
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens or 0,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=frozenset(ends),
        ignore_eos=bool(stop.ignore_eos),
    )


def is_movable(request: PreprocessedRequest) -> bool:
    """Can another worker continue the request from the tokens that were sent?

    It cannot know how far a grammar has come, nor which of several choices has got which token.
    """
    sampling = request.sampling_options
    several = max(sampling.n or 1, sampling.best_of or 1) > 1 or sampling.use_beam_search
    return sampling.guided_decoding is None and not several


#: An engine's words for the end -> those of the wire.
_FINISH: dict[engines.FinishReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "aborted": "cancelled",
}


def engine_handler(engine: Engine) -> PushHandler:
    """The handler of ``generate``: one engine stream per request, put from the engine's task."""

    async def generate(request: PreprocessedRequest, context: Context, output: Output) -> None:
        tokens = _Tokens(output, len(request.token_ids))
        context.prospects.movable = is_movable(request)
        context.prospects.estimate = partial(tokens.time_left, engine, request)
        with engine.attach(to_engine(request, context.id()), tokens.take):
            context.link(tokens)
            await tokens.finish()

    return PushHandler(generate)


@attrs.define(eq=False)
class _Tokens:
    """The sink of one request in the engine, and what ends it at once when it is stopped."""

    _output: Output
    _prompt: int
    _sent: int = 0
    #: Invariant: once set, nothing more of the engine is sent.
    _over: bool = False
    _error: Exception | None = None
    #: The item that ends it well, once it is known.
    _last: LLMEngineOutput | None = None
    _waiter: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def time_left(self, engine: Engine, request: PreprocessedRequest) -> float | None:
        """Seconds until the answer ends at the latest; None: it has no limit of its own, or the
        engine's pace is not known yet."""
        limit = request.stop_conditions.max_tokens
        remaining = None if limit is None else max(0, limit - self._sent)
        return estimate(remaining, engine.seconds_per_token)

    def take(self, delta: Delta) -> None:
        """Called by the engine, in its own task, for each of its steps. Does not raise."""
        if self._over:
            return
        try:
            self._pass_on(delta)
        except Exception as exc:  # a mistake in what the items lead to: this request's, no other's
            self._error = exc
            self._end()

    def _pass_on(self, delta: Delta) -> None:
        self._sent += len(delta.token_ids)
        if delta.finish_reason is None:
            self._output.put_tokens(delta.token_ids)
        elif delta.finish_reason == "error":
            self._error = delta.error or Unknown("the engine failed this request")
            self._end()
        else:
            reason = _FINISH[delta.finish_reason]
            self._last = self._item(delta.token_ids, reason, delta.cached_tokens)
            self._end()
            self._put_last_soon()

    def stop_generating(self) -> None:
        """The client takes what is there, and wants no more."""
        if not self._over:
            self._last = self._item((), "cancelled")
            self._end()
            self._put_last_soon()

    def kill(self) -> None:
        """Nobody reads any further."""
        if not self._over:
            self._last = self._item((), "cancelled")
            self._end()

    async def finish(self) -> None:
        """Wait for the end, and see to it that the last item goes.

        Raises what the engine failed this request with.
        """
        while not self._over:
            await self._waiter.park()
        if self._error is not None:
            raise self._error
        if not self._output.complete:
            await self._output.wait_credit()
            self._output.put_last(self._last)

    def _end(self) -> None:
        self._over = True
        self._waiter.unpark()

    def _put_last_soon(self) -> None:
        """At once, if the client keeps up: it then leaves together with the others of its step."""
        if self._output.has_credit:
            self._output.put_last(self._last)

    def _item(
        self, token_ids: Sequence[int], reason: FinishReason, cached: int | None = None
    ) -> LLMEngineOutput:
        usage = CompletionUsage(
            prompt_tokens=self._prompt,
            completion_tokens=self._sent,
            total_tokens=self._prompt + self._sent,
            prompt_tokens_details=(
                None if cached is None else PromptTokensDetails(cached_tokens=cached)
            ),
        )
        return LLMEngineOutput(
            token_ids=list(token_ids), finish_reason=reason, completion_usage=usage
        )
