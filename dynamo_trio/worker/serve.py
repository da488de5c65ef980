"""An engine as a handler: what a worker's ``generate`` endpoint runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dynamo_trio.context import Context
from dynamo_trio.endpoint import Handler
from dynamo_trio.engines import Delta, Engine, Request
from dynamo_trio.wire.llm import CompletionUsage, LLMEngineOutput, PreprocessedRequest


def to_engine(request: PreprocessedRequest, request_id: str, context_tokens: int) -> Request:
    """The engine's view of a request. Without ``max_tokens`` the context is the limit."""
    stop, sampling = request.stop_conditions, request.sampling_options
    room = context_tokens - len(request.token_ids)
    hidden = stop.stop_token_ids_hidden or []
    return Request(
        request_id=request_id,
        token_ids=tuple(request.token_ids),
        max_tokens=stop.max_tokens if stop.max_tokens is not None else max(room, 1),
        min_tokens=stop.min_tokens or 0,
        temperature=sampling.temperature if sampling.temperature is not None else 1.0,
        top_p=sampling.top_p if sampling.top_p is not None else 1.0,
        top_k=sampling.top_k or 0,
        seed=sampling.seed,
        stop_token_ids=tuple({*hidden, *(stop.stop_token_ids or []), *(request.eos_token_ids or [])}),
        ignore_eos=bool(stop.ignore_eos),
    )


def engine_handler(engine: Engine) -> Handler:
    """The handler of ``generate``: one engine stream per request."""

    async def generate(
        request: PreprocessedRequest, context: Context
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        prompt, sent = len(request.token_ids), 0
        engine_request = to_engine(request, context.id, engine.info.context_tokens_per_request)
        async with engine.open(engine_request) as deltas:
            async for delta in deltas:
                sent += len(delta.token_ids)
                yield _output(delta, prompt, sent)

    return generate


def _output(delta: Delta, prompt: int, sent: int) -> LLMEngineOutput:
    if delta.finish_reason is None:
        return LLMEngineOutput(token_ids=list(delta.token_ids))
    usage = CompletionUsage(
        prompt_tokens=prompt, completion_tokens=sent, total_tokens=prompt + sent
    )
    return LLMEngineOutput(
        token_ids=list(delta.token_ids),
        finish_reason=delta.finish_reason,
        completion_usage=usage,
    )
