"""Bodies of the two completion endpoints: what is taken, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import InvalidArgument, PayloadTooLarge
from dynamo_trio.wire.openai import fields as fields_module
from dynamo_trio.wire.openai.fields import MAX_SHOWN, MAX_VALUES, decode_object, shown
from dynamo_trio.wire.openai.request import (
    MAX_CHAT_VALUES,
    MAX_ITEMS,
    MAX_PROMPT_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    parse_chat,
    parse_completion,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hello", **fields}).encode())


def refused(exc: pytest.ExceptionInfo[InvalidArgument], param: str | None) -> str:
    assert exc.value.param == param
    assert exc.value.status == 400
    message = exc.value.message
    assert len(message) < 400
    if param is not None:
        assert param in message
    return message


def test_a_chat_request_with_everything() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_completion_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=-(2**63),
        stop=["a", "b"],
        ignore_eos=True,
    )
    assert request == ChatRequest(
        model="m",
        messages=(Message("user", "Hello"),),
        stream=True,
        include_usage=True,
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        seed=-(2**63),
        stop=("a", "b"),
        ignore_eos=True,
    )


def test_what_is_absent_has_no_value() -> None:
    assert chat() == ChatRequest(model="m", messages=(Message("user", "Hello"),))
    assert completion() == CompletionRequest(model="m", prompt="Hello")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        ("Grüße 😀\u2028", "Grüße 😀\u2028"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_message_content_is_text_or_text_parts(content: object, text: str) -> None:
    messages = [{"role": "user", "content": content, "name": "eva"}]
    assert chat(messages=messages).messages == (Message("user", text, "eva"),)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_every_role(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "x"}]).messages[0].role == role


def test_an_assistant_may_say_nothing() -> None:
    # What OpenAI's SDK sends back of an answer that it received.
    message: dict[str, object] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[*HELLO, message]).messages[1] == Message("assistant", "")


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        (None, "messages", "required"),
        ([], "messages", "at least one"),
        ("hi", "messages", "a list"),
        (["hi"], "messages[0]", "an object"),
        ([{"content": "x"}], "messages[0].role", "required"),
        ([{"role": "boss", "content": "x"}], "messages[0].role", "assistant"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "a string"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "not supported"),
        ([*HELLO, {"role": "user"}], "messages[1].content", "required"),
        ([{"role": "user", "content": 1}], "messages[0].content", "a string or a list"),
        ([{"role": "user", "content": []}], "messages[0].content", "at least one part"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "required",
        ),
        ([{"role": "user", "content": "a\0b"}], "messages[0].content", "U+0000"),
        ([{"role": "user", "content": "x", "mood": "ok"}], "messages[0].mood", "Unrecognized"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
            "not supported",
        ),
    ],
)
def test_a_bad_message_is_named_by_its_place(messages: object, param: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as exc:
        chat(messages=messages)
    assert says in refused(exc, param)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", None, "required"),
        ("model", "", "empty"),
        ("model", 3, "a string"),
        ("stream", "true", "true or false"),
        ("stream", 1, "true or false"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", "hot", "from 0 to 2"),
        ("temperature", True, "from 0 to 2"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "up to 1"),
        ("top_k", -2, "from -1"),
        ("top_k", 1.5, "whole number"),
        ("max_tokens", 0, "from 1"),
        ("max_tokens", 2**31, "from 1"),
        ("max_tokens", 1.0, "whole number"),
        ("max_tokens", True, "whole number"),
        ("min_tokens", -1, "from 0"),
        ("seed", 2**63, "whole number"),
        ("seed", 10**100, "far too large"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", list("abcde"), "at most 4"),
        ("stop", 3, "a list"),
        ("stop", [3], "a string"),
        ("stop", "x" * 1025, "at most 1024"),
        ("ignore_eos", "yes", "true or false"),
        ("stream_options", {"include_usage": True}, "'stream' is true"),
        ("n", 2, "not supported"),
        ("n", True, "not supported"),
        ("best_of", 2, "not supported"),
        ("logit_bias", {"5": 1}, "not supported"),
        ("presence_penalty", 0.5, "not supported"),
        ("frequency_penalty", -1, "not supported"),
        ("nvext", {"x": 1}, "not supported"),
        ("stop_token_ids", [1], "not supported"),
        ("frobnicate", 1, "Unrecognized"),
    ],
)
@pytest.mark.parametrize("build", [chat, completion])
def test_a_bad_field_is_refused_by_name(build: Any, field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as exc:
        build(**{field: value})
    assert says in refused(exc, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
    ],
)
def test_chat_features_that_are_not_there_yet_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as exc:
        chat(**{field: value})
    assert "not supported" in refused(exc, field)


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("logprobs", 0)])
def test_completion_features_that_are_not_there_yet_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as exc:
        completion(**{field: value})
    assert "not supported" in refused(exc, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "flex"),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("parallel_tool_calls", True),
        ("n", 1),
        ("n", 1.0),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("modalities", ["text"]),
        ("nvext", {}),
        ("stop", []),
        ("top_k", -1),
        ("frobnicate", None),
        ("temperature", None),
        ("tools", None),
    ],
)
def test_what_cannot_change_the_answer_is_accepted(field: str, value: object) -> None:
    assert chat(**{field: value}) == chat()


def test_an_option_of_the_stream_is_named_in_full() -> None:
    with pytest.raises(InvalidArgument) as exc:
        chat(stream=True, stream_options={"include_usage": 1})
    refused(exc, "stream_options.include_usage")
    with pytest.raises(InvalidArgument) as exc:
        chat(stream=True, stream_options={"x": 1})
    refused(exc, "stream_options.x")


def test_the_two_names_of_max_tokens_must_agree() -> None:
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    with pytest.raises(InvalidArgument) as exc:
        chat(max_tokens=3, max_completion_tokens=4)
    refused(exc, "max_tokens")
    with pytest.raises(InvalidArgument) as exc:
        completion(max_completion_tokens=4)  # OpenAI has it for chats only
    refused(exc, "max_completion_tokens")


def test_min_tokens_is_at_most_max_tokens() -> None:
    with pytest.raises(InvalidArgument) as exc:
        chat(max_tokens=3, min_tokens=4)
    refused(exc, "min_tokens")


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("", ""),
        ("text", "text"),
        (["text"], "text"),
        ([1, 2], (1, 2)),
        ([[1, 2]], (1, 2)),
    ],
)
def test_a_prompt_is_text_or_tokens(prompt: object, taken: object) -> None:
    assert completion(prompt=prompt).prompt == taken


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        (None, "prompt", "required"),
        ([], "prompt", "empty"),
        ([[]], "prompt", "empty"),
        (["a", "b"], "prompt", "not supported"),
        ([[1], [2]], "prompt", "not supported"),
        ([1, "a"], "prompt[1]", "whole number"),
        ([-1], "prompt[0]", "whole number"),
        ([2**31], "prompt[0]", "whole number"),
        ({}, "prompt", "a list"),
        ([True], "prompt[0]", "whole number"),
        ("a\0", "prompt", "U+0000"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: object, param: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as exc:
        completion(prompt=prompt)
    assert says in refused(exc, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}x",
        b"nope",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',  # a surrogate in UTF-8
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": 1e999}',
        b'{"model": ' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_is_no_json_is_a_typed_error(parse: Any, body: bytes) -> None:
    with pytest.raises(InvalidArgument) as exc:
        parse(body)
    assert "The body" in refused(exc, None)


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"1", b"null"])
def test_the_body_must_be_an_object(body: bytes) -> None:
    with pytest.raises(InvalidArgument) as exc:
        parse_chat(body)
    assert "a JSON object" in refused(exc, None)


def test_a_message_never_repeats_a_long_input() -> None:
    with pytest.raises(InvalidArgument) as exc:
        chat(temperature="x" * 100_000)
    refused(exc, "temperature")
    with pytest.raises(InvalidArgument) as exc:
        chat(**{"k" * 100_000: 1})
    assert len(exc.value.message) < 200
    assert len(shown("é\n" * 1000)) <= MAX_SHOWN + 1
    assert shown([1]) == "a list"
    assert shown({}) == "an object"
    assert shown(None) == "null"


# --- how much one body may hold -------------------------------------------------------


@pytest.mark.parametrize("value", [b"1,", b"[],", b"{},", b'"",', b'{"a":1},', b'"\\\\",'])
def test_a_body_of_very_many_values_is_refused_undecoded(
    monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    body = b'{"user":[' + value * (MAX_VALUES + 1) + b"1]}"
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("decoded"))
    with pytest.raises(PayloadTooLarge) as exc:
        decode_object(body)
    assert str(MAX_VALUES) in exc.value.message


def test_a_chat_has_use_for_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    many = b'{"messages":[' + b'{"role":"user","content":"a"},' * (MAX_CHAT_VALUES // 3) + b"1]}"
    assert decode_object(many + b" " * MAX_VALUES)
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("decoded"))
    with pytest.raises(PayloadTooLarge) as exc:
        parse_chat(many.replace(b"[", b"[1,2,3,"))
    assert str(MAX_CHAT_VALUES) in exc.value.message


@pytest.mark.parametrize("piece", [",", "[{", 'a", "b', "\\,", '\\\\",'])
def test_commas_and_brackets_in_text_do_not_count(piece: str) -> None:
    text = piece * (MAX_VALUES + 1)
    assert completion(prompt=text).prompt == text


def test_a_prompt_has_a_most_tokens() -> None:
    assert completion(prompt=[7] * MAX_PROMPT_TOKENS).prompt == (7,) * MAX_PROMPT_TOKENS
    # The length is judged before the tokens, of which none would be taken.
    with pytest.raises(InvalidArgument) as exc:
        completion(prompt=[-1] * (MAX_PROMPT_TOKENS + 1))
    assert f"at most {MAX_PROMPT_TOKENS} tokens" in refused(exc, "prompt")


def test_messages_and_parts_are_bounded() -> None:
    assert len(chat(messages=HELLO * MAX_ITEMS).messages) == MAX_ITEMS
    with pytest.raises(InvalidArgument) as exc:
        chat(messages=[1] * (MAX_ITEMS + 1))
    assert f"at most {MAX_ITEMS} messages" in refused(exc, "messages")
    with pytest.raises(InvalidArgument) as exc:
        chat(messages=[{"role": "user", "content": [1] * (MAX_ITEMS + 1)}])
    assert f"at most {MAX_ITEMS} parts" in refused(exc, "messages[0].content")


def structure(value: Any) -> int:
    """Commas and opening brackets of ``value`` as JSON, outside of its strings."""
    if not isinstance(value, (list, dict)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(len(value) - 1, 0) + sum(map(structure, inner))


NASTY = st.text('",[{\\a', max_size=8)


@given(
    st.recursive(
        NASTY | st.integers(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    ).map(lambda value: {"x": value}),
    st.integers(1, 5),
)
def test_the_count_is_exact_wherever_the_pieces_are_cut(value: dict[str, Any], piece: int) -> None:
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields_module, "_PIECE", piece)
        patch.setattr(fields_module, "MAX_VALUES", structure(value))
        assert decode_object(body) == value
        patch.setattr(fields_module, "MAX_VALUES", structure(value) - 1)
        with pytest.raises(PayloadTooLarge):
            decode_object(body)


KEYS = st.sampled_from(
    [
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "seed"),
        *("temperature", "top_p", "top_k", "min_tokens", "role", "content", "type", "text", "name"),
        *("n", "tools", "response_format", "logprobs", "include_usage", "nvext", "x"),
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["user", "assistant", "text", "m"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


def outcome(parse: Callable[[bytes], GenerationRequest], body: bytes) -> GenerationRequest | str:
    try:
        return parse(body)
    except InvalidArgument as exc:
        return exc.message


@given(st.dictionaries(KEYS, VALUES, max_size=8))
@settings(max_examples=500)
def test_any_json_gives_a_request_or_a_typed_error(fields: dict[str, Any]) -> None:
    known = {"model": "m", "messages": HELLO, "prompt": "x"}
    for given_fields in (fields, {**known, **fields}):
        for parse in (parse_chat, parse_completion):
            result = outcome(parse, json.dumps(given_fields).encode())
            assert result.isprintable() if isinstance(result, str) else result.model


@given(
    st.binary(max_size=64) | st.text(max_size=32).map(lambda text: text.encode(errors="replace"))
)
def test_any_bytes_give_a_typed_error(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        # So short and random that no whole request comes about.
        assert isinstance(outcome(parse, body), str)
