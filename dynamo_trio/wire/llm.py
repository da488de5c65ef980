"""The values that travel between a frontend and a worker for one generation.

Field names and meanings are Dynamo 1.5.1's ``PreprocessedRequest`` and
``LLMEngineOutput``; unset values are sent as null and unknown keys are ignored,
as the real peers do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "eos", "error", "cancelled"]


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When generation ends. Counts are tokens."""

    max_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. ``temperature`` 0 is greedy."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class PreprocessedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised request, ready for an engine."""

    model: str = ""
    token_ids: list[int]
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    eos_token_ids: list[int] | None = None
    annotations: list[str] = []


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LLMEngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of an engine's answer: only the *new* token ids, never the ones before."""

    token_ids: list[int]
    text: str | None = None
    finish_reason: FinishReason | None = None
    index: int | None = None
    completion_usage: CompletionUsage | None = None
