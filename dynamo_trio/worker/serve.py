"""An engine as a handler: what a worker's ``generate`` endpoint runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.engines import Delta, Engine, Request
from dynamo_trio.wire.llm import (
    CompletionUsage,
    FinishError,
    LLMEngineOutput,
    PreprocessedRequest,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dynamo_trio import engines
    from dynamo_trio.context import Context
    from dynamo_trio.endpoint import Handler
    from dynamo_trio.engines.stream import DeltaStream
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


#: An engine's words for the end -> those of the wire.
_FINISH: dict[engines.FinishReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "aborted": "cancelled",
    "error": FinishError("The engine failed."),
}


def engine_handler(engine: Engine) -> Handler:
    """The handler of ``generate``: one engine stream per request."""

    async def generate(
        request: PreprocessedRequest, context: Context
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        prompt, sent = len(request.token_ids), 0
        async with engine.open(to_engine(request, context.id())) as deltas:
            context.link(_StopsWith(deltas))
            async for delta in deltas:
                sent += len(delta.token_ids)
                yield _output(delta, prompt, sent)

    return generate


@attrs.frozen(eq=False)
class _StopsWith:
    """Lets an engine's stream end, at once, when its request is stopped."""

    deltas: DeltaStream

    def stop_generating(self) -> None:
        self.deltas.stop()

    def kill(self) -> None:
        self.deltas.stop()


def _output(delta: Delta, prompt: int, sent: int) -> LLMEngineOutput:
    if delta.finish_reason is None:
        return LLMEngineOutput(token_ids=list(delta.token_ids))
    usage = CompletionUsage(
        prompt_tokens=prompt, completion_tokens=sent, total_tokens=prompt + sent
    )
    return LLMEngineOutput(
        token_ids=list(delta.token_ids),
        finish_reason=_FINISH[delta.finish_reason],
        completion_usage=usage,
    )
