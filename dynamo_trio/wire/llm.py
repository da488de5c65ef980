"""The values that travel between a frontend and a worker for one generation.

Field names and meanings are Dynamo 1.5.1's ``PreprocessedRequest`` and
``LLMEngineOutput``; unset values of a request are sent as null, those of an output are left
out, and unknown keys are ignored, as the real peers do.

Fields that Dynamo holds in 32-bit floats arrive through MessagePack as what such a float
really is: 0.7 as 0.699999988. :func:`read_request` gives them back as they were written.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dynamo_trio.wire.dynamo.careful import CarefulReader
from dynamo_trio.wire.dynamo.codec import Codec, per_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: An unsigned 32-bit number, as Dynamo declares tokens and most counts.
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class FinishError(msgspec.Struct, frozen=True):
    """The finish reason of an engine that failed, with what it said."""

    error: str


FinishReason = Literal["stop", "length", "eos", "cancelled", "content_filter"] | FinishError


# --- the request -------------------------------------------------------------------------


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When generation ends. Counts are tokens; ``max_tokens`` 0 means none, not a default."""

    max_tokens: U32 | None = None
    stop: list[str] | None = None
    stop_token_ids: list[U32] | None = None
    stop_token_ids_visible: list[U32] | None = None
    stop_token_ids_hidden: list[U32] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: U32 | None = None


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. ``temperature`` 0 is greedy."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: dict[str, object] | None = None


#: Floats of 32 bits on Dynamo's side.
_SINGLE = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
    *("top_p", "min_p", "length_penalty"),
)


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer holds beside its tokens."""

    logprobs: U32 | None = None
    prompt_logprobs: U32 | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """What a router was told or has decided. Absent unless used."""

    backend_instance_id: int | UnsetType = UNSET
    prefill_worker_id: int | UnsetType = UNSET
    decode_worker_id: int | UnsetType = UNSET
    dp_rank: U32 | UnsetType = UNSET
    prefill_dp_rank: U32 | UnsetType = UNSET
    expected_output_tokens: U32 | UnsetType = UNSET
    lora_name: str | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    priority_jump: float | UnsetType = UNSET  # seconds
    strict_priority: U32 | UnsetType = UNSET
    priority: int | UnsetType = UNSET


class PreprocessedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised request, ready for an engine."""

    model: str = ""
    token_ids: list[U32]
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    output_options: OutputOptions = OutputOptions()
    eos_token_ids: list[U32] | None = None
    mdc_sum: str | None = None  # of the card, computed by the frontend; a worker need not check
    annotations: list[str] = []
    routing: Routing | None = Routing()
    router_config_override: dict[str, object] | None = None
    extra_args: dict[str, object] | UnsetType = UNSET
    agent_context: dict[str, object] | UnsetType = UNSET


# --- the answer --------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompt's tokens were, as OpenAI names it."""

    audio_tokens: U32 | None = None
    cached_tokens: U32 | None = None


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of one request, as OpenAI names them."""

    prompt_tokens: U32
    completion_tokens: U32
    total_tokens: U32
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the tokens that were most likely at a place."""

    rank: U32
    token_id: U32
    token: str | None = None
    logprob: float
    bytes: list[int] | None = None


class LLMEngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of an engine's answer: only the *new* token ids, never the ones before.

    With ``text`` an engine has detokenised itself, and its text is what counts.
    """

    token_ids: list[U32]
    tokens: list[str | None] | None = None
    text: str | None = None
    cum_log_probs: float | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[TopLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token, if that was why
    index: U32 | None = None
    disaggregated_params: dict[str, object] | None = None
    extra_args: dict[str, object] | None = None
    completion_usage: CompletionUsage | None = None
    engine_data: dict[str, object] | None = None


# --- reading and writing -----------------------------------------------------------------

_OPEN_IN_REQUESTS: dict[type[msgspec.Struct], frozenset[str]] = {
    PreprocessedRequest: frozenset({"router_config_override", "extra_args", "agent_context"}),
    SamplingOptions: frozenset({"guided_decoding"}),
}
_OPEN_IN_OUTPUTS: dict[type[msgspec.Struct], frozenset[str]] = {
    LLMEngineOutput: frozenset(
        {"top_logprobs", "disaggregated_params", "extra_args", "engine_data"}
    ),
}

_request_readers = per_codec(
    lambda codec: CarefulReader(codec, PreprocessedRequest, _OPEN_IN_REQUESTS, "request")
)
_output_readers = per_codec(
    lambda codec: CarefulReader(codec, LLMEngineOutput, _OPEN_IN_OUTPUTS, "engine output")
)


def read_request(codec: Codec, body: bytes) -> PreprocessedRequest:
    """The body of a request to ``generate``.

    Raises:
        RemoteProtocolError: it is no such request.
    """
    request = _request_readers[codec.name](body)
    changed = dict(_rounded(request.sampling_options))
    if not changed:
        return request
    sampling = msgspec.structs.replace(request.sampling_options, **changed)
    return msgspec.structs.replace(request, sampling_options=sampling)


def output_reader(codec: Codec) -> Callable[[bytes], LLMEngineOutput]:
    """The function that reads an item's value; it raises RemoteProtocolError and nothing else."""
    return _output_readers[codec.name]


def encode_token(codec: Codec, token_id: int) -> bytes:
    """An item that holds one token and nothing else, as an engine's answer mostly does."""
    before, after = _AROUND_TOKEN[codec.name]
    return before + codec.encode(token_id) + after


def size_of_token(codec: Codec, token_id: int) -> int:
    """The bytes of :func:`encode_token`."""
    return _TOKEN_ROOM[codec.name] + len(codec.encode(token_id))


def _around(codec: Codec) -> tuple[bytes, bytes]:
    before, _, after = codec.encode({"token_ids": [0]}).rpartition(codec.encode(0))
    return before, after


_AROUND_TOKEN = per_codec(_around)
_TOKEN_ROOM = {name: len(before) + len(after) for name, (before, after) in _AROUND_TOKEN.items()}


def _rounded(sampling: SamplingOptions) -> Iterator[tuple[str, float]]:
    for name in _SINGLE:
        value: float | None = getattr(sampling, name)
        if value is not None and (short := shortest_single(value)) != value:
            yield name, short


def shortest_single(value: float) -> float:
    """The number with the fewest digits that a 32-bit float cannot tell from ``value``.

    A value that is no 32-bit float is its own answer.
    """
    if _single(value) != value:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((short for short in candidates if _single(short) == value), value)


def _single(value: float) -> float | None:
    """``value`` in 32 bits; None if it is too large for them."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        return None
    single: float = struct.unpack("<f", packed)[0]
    return single
