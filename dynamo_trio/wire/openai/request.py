"""Bodies of ``/v1/chat/completions`` and ``/v1/completions``: bytes to typed values.

What is not supported yet and would change the answer is refused, naming the field;
what cannot change it is accepted and dropped; a key that OpenAI's API and Dynamo's
extensions do not know is refused as OpenAI does. ``ignore_eos``, ``min_tokens`` and
``top_k`` stand at the top level, where Dynamo and vLLM have them.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.openai.fields import (
    Fields,
    Json,
    Rule,
    anything,
    array,
    boolean,
    decode_object,
    integer,
    mapping,
    name_text,
    number,
    only,
    refuse,
    text,
    unsupported,
)

Role = Literal["system", "developer", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant")

MAX_STOPS = 4
#: Characters. A longer stop string would hold back that much text.
MAX_STOP_LENGTH = 1024
MAX_TOKENS = 2**31 - 1
#: Less than the values that a body may have, so that this rule is the one that is named.
MAX_PROMPT_TOKENS = 1_000_000
#: Messages of a request, and parts of a message.
MAX_ITEMS = 10_000
#: JSON values in a chat request, which has no use for a million token ids. It is decoded in some
#: fifty milliseconds, in which nobody else has a turn.
MAX_CHAT_VALUES = 2**17


@frozen
class Message:
    """One turn of the conversation. Text parts are joined with a newline."""

    role: Role
    content: str
    name: str | None = None


@frozen(kw_only=True)
class GenerationRequest:
    """What both endpoints have in common. None means "not given"."""

    model: str
    stream: bool = False
    include_usage: bool = False  # true only with ``stream``
    max_tokens: int | None = None  # >= 1
    min_tokens: int | None = None  # >= 0 and <= max_tokens
    temperature: float | None = None  # 0 to 2; 0 is greedy
    top_p: float | None = None  # above 0, up to 1
    top_k: int | None = None  # >= 1
    seed: int | None = None  # 64 bits, signed
    stop: tuple[str, ...] = ()  # none is empty
    ignore_eos: bool = False


@frozen(kw_only=True)
class ChatRequest(GenerationRequest):
    """A body of ``POST /v1/chat/completions``."""

    messages: tuple[Message, ...]  # at least one


@frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """A body of ``POST /v1/completions``. The prompt is text or token ids."""

    prompt: str | tuple[int, ...]


# Accepted and dropped: none of these can change what is generated.
_NEUTRAL = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)

# Known, and allowed only with the value that they have anyway.
_FIXED: dict[str, Rule[object]] = {
    **dict.fromkeys(_NEUTRAL, anything),
    "n": only(1),
    "best_of": only(1),
    "logit_bias": only({}),
    "presence_penalty": only(0),
    "frequency_penalty": only(0),
    "repetition_penalty": only(1),
    "min_p": only(0),
    "stop_token_ids": only([]),
    "skip_special_tokens": only(True),
    "include_stop_str_in_output": only(False),
    "nvext": only({}),
    "moderation": only(),
}

_FIXED_CHAT: dict[str, Rule[object]] = {
    "tools": only([]),
    "tool_choice": only("none"),
    "parallel_tool_calls": boolean,
    "functions": only([]),
    "function_call": only("none"),
    "response_format": only({"type": "text"}),
    "logprobs": only(False),
    "top_logprobs": only(0),
    "modalities": only(["text"]),
    "reasoning_effort": only(),
    "verbosity": only("medium"),
    "audio": only(),
    "prediction": only(),
    "web_search_options": only(),
    "chat_template": only(),
    "chat_template_kwargs": only({}),
    "chat_template_args": only({}),
    "add_generation_prompt": only(True),
    "continue_final_message": only(False),
}

_FIXED_COMPLETION: dict[str, Rule[object]] = {
    "echo": only(False),
    "suffix": only(""),
    "logprobs": only(),
}

_FIXED_OPTIONS: dict[str, Rule[object]] = {
    "include_obfuscation": boolean,
    "continuous_usage_stats": only(False),
}

_COMMON = (
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "ignore_eos",
)
#: What nobody has to set, and many do not; their defaults are those of a request.
_SAMPLING = frozenset({"min_tokens", "temperature", "top_p", "top_k", "seed", "stop"})
_CHAT = ("messages", "max_completion_tokens")
_COMPLETION = ("prompt",)

# Put together once: every request is held against them.
_FIXED_OF_CHAT = _FIXED | _FIXED_CHAT
_FIXED_OF_COMPLETION = _FIXED | _FIXED_COMPLETION
_KNOWN_OF_CHAT = frozenset({*_COMMON, *_CHAT, *_FIXED_OF_CHAT})
_KNOWN_OF_COMPLETION = frozenset({*_COMMON, *_COMPLETION, *_FIXED_OF_COMPLETION})


def parse_chat(body: bytes) -> ChatRequest:
    """The chat request in ``body``.

    Raises:
        PayloadTooLarge: it has more than :data:`MAX_CHAT_VALUES` JSON values.
        InvalidArgument: with ``param`` naming the field that breaks a rule.
    """
    fields = Fields(decode_object(body, MAX_CHAT_VALUES))
    fields.forbid_unknown(_KNOWN_OF_CHAT)
    common = _common(fields, _chat_max_tokens(fields))
    messages = fields.required("messages", _messages)
    fields.check(_FIXED_OF_CHAT)
    return ChatRequest(messages=messages, **common)


def parse_completion(body: bytes) -> CompletionRequest:
    """The completion request in ``body``.

    Raises:
        InvalidArgument: with ``param`` naming the field that breaks a rule.
    """
    fields = Fields(decode_object(body))
    fields.forbid_unknown(_KNOWN_OF_COMPLETION)
    common = _common(fields, fields.optional("max_tokens", _POSITIVE))
    prompt = fields.required("prompt", _prompt)
    fields.check(_FIXED_OF_COMPLETION)
    return CompletionRequest(prompt=prompt, **common)


# --- what both have in common --------------------------------------------------------

_POSITIVE = integer(1, MAX_TOKENS)
_MIN_TOKENS = integer(0, MAX_TOKENS)
_TEMPERATURE = number(0, 2)
_TOP_P = number(0, 1, above=True)
_TOP_K = integer(-1, MAX_TOKENS)
_SEED = integer(-(2**63), 2**63 - 1)


def _common(fields: Fields, max_tokens: int | None) -> dict[str, Json]:
    stream = fields.flag("stream")
    asked = {
        "model": fields.required("model", name_text),
        "stream": stream,
        "include_usage": _include_usage(fields, stream),
        "max_tokens": max_tokens,
        "ignore_eos": fields.flag("ignore_eos"),
    }
    if fields.lack(_SAMPLING):
        return asked
    return asked | {
        "min_tokens": _min_tokens(fields, max_tokens),
        "temperature": fields.optional("temperature", _TEMPERATURE),
        "top_p": fields.optional("top_p", _TOP_P),
        "top_k": _top_k(fields),
        "seed": fields.optional("seed", _SEED),
        "stop": fields.optional("stop", _stops) or (),
    }


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.optional("stream_options", mapping)
    if options is None:
        return False
    if not stream:
        raise InvalidArgument(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    inner = Fields(options, "stream_options.")
    inner.forbid_unknown(("include_usage",), _FIXED_OPTIONS)
    inner.check(_FIXED_OPTIONS)
    return inner.flag("include_usage")


def _min_tokens(fields: Fields, max_tokens: int | None) -> int | None:
    low = fields.optional("min_tokens", _MIN_TOKENS)
    if low is not None and max_tokens is not None and low > max_tokens:
        raise refuse("min_tokens", f"at most 'max_tokens' ({max_tokens})", low)
    return low


def _top_k(fields: Fields) -> int | None:
    # vLLM and Dynamo write "no limit" as -1 or 0.
    value = fields.optional("top_k", _TOP_K)
    return None if value is None or value < 1 else value


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.optional("max_tokens", _POSITIVE)
    new = fields.optional("max_completion_tokens", _POSITIVE)
    if old is not None and new is not None and old != new:
        raise InvalidArgument(
            "'max_tokens' and 'max_completion_tokens' contradict each other; send one of them.",
            param="max_tokens",
        )
    return old if new is None else new


def _stops(value: Json, name: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else array(value, name)
    if len(items) > MAX_STOPS:
        raise InvalidArgument(
            f"'{name}' must have at most {MAX_STOPS} strings, not {len(items)}.", param=name
        )
    return tuple(_stop(item, name) for item in items)


def _stop(value: Json, name: str) -> str:
    stop = name_text(value, name)
    if len(stop) > MAX_STOP_LENGTH:
        raise InvalidArgument(
            f"'{name}' must have at most {MAX_STOP_LENGTH} characters in each string,"
            f" not {len(stop)}.",
            param=name,
        )
    return stop


# --- messages ------------------------------------------------------------------------

# What OpenAI's own answers carry beside role and content, for clients that send an
# assistant's message back as they got it.
_FIXED_MESSAGE: dict[str, Rule[object]] = {
    "refusal": only(),
    "annotations": only([]),
    "audio": only(),
    "function_call": only(),
    "tool_calls": only([]),
    "tool_call_id": only(),
}


def _bound(items: list[Json], name: str, what: str, most: int) -> None:
    """Judge the length first: it costs nothing, and every item does."""
    if len(items) > most:
        raise InvalidArgument(
            f"'{name}' must have at most {most} {what}, not {len(items)}.", param=name
        )


def _messages(value: Json, name: str) -> tuple[Message, ...]:
    items = array(value, name)
    _bound(items, name, "messages", MAX_ITEMS)
    if not items:
        raise InvalidArgument(f"'{name}' must have at least one message.", param=name)
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(items))


def _message(value: Json, name: str) -> Message:
    fields = Fields(mapping(value, name), f"{name}.")
    fields.forbid_unknown(("role", "content", "name"), _FIXED_MESSAGE)
    role = fields.required("role", _role)
    fields.check(_FIXED_MESSAGE)
    # An assistant's turn may be empty; OpenAI then has null in its place.
    content = fields.optional("content", _content)
    if content is None and role != "assistant":
        content = fields.required("content", _content)
    return Message(role, content or "", fields.optional("name", text))


def _role(value: Json, name: str) -> Role:
    role = text(value, name)
    if role in ("tool", "function"):
        raise unsupported(name, f" (role {role})")
    if role not in ROLES:
        raise refuse(name, f"one of {', '.join(ROLES)}", value)
    return role


def _content(value: Json, name: str) -> str:
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, list):
        raise refuse(name, "a string or a list of text parts", value)
    if not value:
        raise InvalidArgument(f"'{name}' must have at least one part.", param=name)
    _bound(value, name, "parts", MAX_ITEMS)
    return "\n".join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))


def _part(value: Json, name: str) -> str:
    fields = Fields(mapping(value, name), f"{name}.")
    kind = fields.required("type", text)
    if kind != "text":
        raise unsupported(f"{name}.type", " (only text parts are)")
    fields.forbid_unknown(("type", "text"))
    return fields.required("text", text)


# --- prompts -------------------------------------------------------------------------

_MAX_TOKEN_ID = 2**31 - 1
_TOKEN = integer(0, _MAX_TOKEN_ID)


def _prompt(value: Json, name: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return text(value, name)
    items = array(value, name)
    if not items:
        raise InvalidArgument(f"'{name}' must not be an empty list.", param=name)
    if isinstance(items[0], (str, list)):
        return _single_prompt(items, name)
    return _tokens(items, name)


def _single_prompt(items: list[Json], name: str) -> str | tuple[int, ...]:
    if len(items) > 1:
        raise unsupported(name, f" with more than one prompt (there are {len(items)})")
    if isinstance(items[0], str):
        return text(items[0], name)
    if not items[0]:
        raise InvalidArgument(f"'{name}' must not be an empty list of tokens.", param=name)
    return _tokens(items[0], name)


def _tokens(items: list[Json], name: str) -> tuple[int, ...]:
    _bound(items, name, "tokens", MAX_PROMPT_TOKENS)
    for index, item in enumerate(items):
        # The rule is asked only to word the refusal: naming every token takes too long.
        if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
            _TOKEN(item, f"{name}[{index}]")
    return tuple(items)
