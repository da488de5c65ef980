"""What a client sets: for its session (``session.update``), and for one response.

What is not supported and would change an answer is refused by name, as in the other
endpoints; an event that is refused changes nothing.
"""

from __future__ import annotations

import attrs
from attrs import frozen

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.openai.fields import (
    Fields,
    Json,
    Rule,
    anything,
    array,
    boolean,
    integer,
    mapping,
    number,
    only,
    refuse,
    text,
)
from dynamo_trio.wire.openai.realtime.conversation import (
    MAX_ITEMS,
    MAX_TEXT,
    Conversation,
    Item,
    item_id,
    parse_item,
)
from dynamo_trio.wire.openai.request import MAX_TOKENS

#: Of ``metadata``, as OpenAI has it.
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512

_INFINITE = "inf"

# Known, and allowed only with the value that they have anyway.
_FIXED: dict[str, Rule[object]] = {
    "audio": only({}),
    "tools": only([]),
    "tool_choice": only("auto", "none"),
    "parallel_tool_calls": boolean,
    "prompt": only(),
    "reasoning": only(),
}
_FIXED_SESSION: dict[str, Rule[object]] = {
    "include": only([]),
    "tracing": anything,
    "truncation": only("disabled"),
    # Of the API before its general availability.
    "voice": only(),
    "turn_detection": only(),
    "input_audio_format": only(),
    "output_audio_format": only(),
    "input_audio_transcription": only(),
    "input_audio_noise_reduction": only(),
}
# What our own session object has beside these, for clients that send it back.
_OWN = ("id", "object", "expires_at", "client_secret")
_SETTABLE = ("instructions", "max_output_tokens", "output_modalities", "temperature")


@frozen
class Settings:
    """What holds for every response. ``max_output_tokens``: None is as many as fit."""

    instructions: str = ""
    max_output_tokens: int | None = None
    temperature: float | None = None  # 0 to 2

    def to_json(self, model: str) -> dict[str, Json]:
        """As a ``session.update`` has it."""
        fields: dict[str, Json] = {
            "type": "realtime",
            "model": model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "max_output_tokens": _tokens_json(self.max_output_tokens),
        }
        return fields if self.temperature is None else {**fields, "temperature": self.temperature}


@frozen
class ResponseOptions:
    """What a ``response.create`` asks for."""

    settings: Settings
    #: The whole context, in place of the conversation.
    input: tuple[Item, ...] | None = None
    #: Is the answer added to the conversation?
    in_conversation: bool = True
    metadata: dict[str, str] | None = None


def updated(settings: Settings, event: dict[str, Json], model: str) -> Settings:
    """The settings after a ``session.update``.

    Raises:
        InvalidArgument: with ``param`` naming the field that breaks a rule.
    """
    outer = Fields(event)
    outer.forbid_unknown(("type", "event_id", "session"))
    fields = Fields(outer.required("session", mapping), "session.")
    fields.forbid_unknown(_SETTABLE, _FIXED, _FIXED_SESSION, ("type", "model"), _OWN)
    fields.check({"type": only("realtime"), **_FIXED, **_FIXED_SESSION})
    named = fields.optional("model", text)
    if named not in (None, model):
        why = f"The model of a session cannot be changed; this one has {model!r}."
        raise InvalidArgument(why, param="session.model")
    return _merged(settings, fields)


def response_options(
    settings: Settings, event: dict[str, Json], conversation: Conversation, fresh_id: str
) -> ResponseOptions:
    """What a ``response.create`` asks for. ``fresh_id``: begins the ids of its input items.

    Raises:
        InvalidArgument: with ``param`` naming the field that breaks a rule.
    """
    outer = Fields(event)
    outer.forbid_unknown(("type", "event_id", "response"))
    fields = Fields(outer.optional("response", mapping) or {}, "response.")
    fields.forbid_unknown(_SETTABLE, _FIXED, ("conversation", "input", "metadata"))
    fields.check(_FIXED)
    where = fields.optional("conversation", _conversation)
    given = fields.optional("input", array)
    return ResponseOptions(
        settings=_merged(settings, fields),
        input=None if given is None else _input(given, conversation, fresh_id),
        in_conversation=where != "none",
        metadata=fields.optional("metadata", _metadata),
    )


def _merged(settings: Settings, fields: Fields) -> Settings:
    changes: dict[str, Json] = {}
    for key, rule in _RULES.items():
        value = fields.optional(key, rule)
        if value is not None:
            changes[key] = None if value == _INFINITE and key != "instructions" else value
    fields.optional("output_modalities", only(["text"]))
    return attrs.evolve(settings, **changes)


def _instructions(value: Json, name: str) -> str:
    given = text(value, name)
    if len(given) > MAX_TEXT:
        raise InvalidArgument(f"'{name}' must have at most {MAX_TEXT} characters.", param=name)
    return given


def _tokens(value: Json, name: str) -> int | str:
    return _INFINITE if value == _INFINITE else _POSITIVE(value, name)


_POSITIVE = integer(1, MAX_TOKENS)
_RULES: dict[str, Rule[object]] = {
    "instructions": _instructions,
    "max_output_tokens": _tokens,
    "temperature": number(0, 2),
}


def _tokens_json(value: int | None) -> int | str:
    return _INFINITE if value is None else value


def _conversation(value: Json, name: str) -> str:
    if value not in ("auto", "none"):
        raise refuse(name, "auto or none", value)
    return str(value)


def _input(values: list[Json], conversation: Conversation, fresh_id: str) -> tuple[Item, ...]:
    name = "response.input"
    if len(values) > MAX_ITEMS:
        raise InvalidArgument(f"'{name}' must have at most {MAX_ITEMS} items.", param=name)
    items = tuple(
        _input_item(value, f"{name}[{at}]", conversation, f"{fresh_id}_{at}")
        for at, value in enumerate(values)
    )
    if sum(item.size for item in items) > MAX_TEXT:
        raise InvalidArgument(f"'{name}' must have at most {MAX_TEXT} characters.", param=name)
    return items


def _input_item(value: Json, name: str, conversation: Conversation, fresh_id: str) -> Item:
    fields = Fields(mapping(value, name), f"{name}.")
    if fields.optional("type", text) != "item_reference":
        return parse_item(value, name, fresh_id)
    fields.forbid_unknown(("type", "id"))
    return conversation.get(fields.required("id", item_id), f"{name}.id")


def _metadata(value: Json, name: str) -> dict[str, str]:
    pairs = mapping(value, name)
    if len(pairs) > MAX_METADATA:
        raise InvalidArgument(f"'{name}' must have at most {MAX_METADATA} pairs.", param=name)
    for key, one in pairs.items():
        if len(key) > MAX_KEY or len(text(one, f"{name}.{key[:MAX_KEY]}")) > MAX_VALUE:
            rule = f"keys of at most {MAX_KEY} and values of at most {MAX_VALUE} characters"
            raise InvalidArgument(f"'{name}' must have {rule}.", param=name)
    return pairs
