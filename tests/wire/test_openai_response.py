"""Answers as a client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio import errors
from dynamo_trio.wire.llm import CompletionUsage, FinishError
from dynamo_trio.wire.openai import response as responses
from dynamo_trio.wire.openai.sse import EventParser

USAGE = CompletionUsage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
IDENTITY = ("chatcmpl-1", 1700000000, 'my "model"\u2028')


def events(data: bytes) -> list[Any]:
    return [json.loads(event.data) for event in EventParser().feed(data)]


def envelope(kind: str) -> dict[str, object]:
    return {"id": IDENTITY[0], "object": kind, "created": IDENTITY[1], "model": IDENTITY[2]}


def test_a_chat_stream_chunk_by_chunk() -> None:
    stream = responses.ChatStream(*IDENTITY)
    body = stream.start() + stream.content("Hi") + stream.finish("stop") + stream.usage(USAGE)
    fixed = envelope("chat.completion.chunk")

    def chunk(delta: object, finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**fixed, "choices": [choice]}

    assert events(body) == [
        chunk({"role": "assistant", "content": ""}, None),
        chunk({"content": "Hi"}, None),
        chunk({}, "stop"),
    ]


def test_a_completion_stream_chunk_by_chunk() -> None:
    stream = responses.CompletionStream(*IDENTITY)
    body = stream.start() + stream.content("Hi") + stream.finish("length") + stream.usage(USAGE)
    fixed = envelope("text_completion")

    def chunk(text: str, finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {**fixed, "choices": [choice]}

    assert events(body) == [chunk("Hi", None), chunk("", "length")]


@pytest.mark.parametrize("kind", [responses.ChatStream, responses.CompletionStream])
def test_with_include_usage_only_the_last_chunk_has_counts(kind: Any) -> None:
    stream = kind(*IDENTITY, include_usage=True)
    *chunks, last = events(
        stream.start() + stream.content("x") + stream.finish("stop") + stream.usage(USAGE)
    )
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (last["choices"], last["usage"]) == ([], COUNTS)


def test_unary_answers() -> None:
    chat = json.loads(responses.chat_completion(*IDENTITY, "Hi", "stop", USAGE))
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert chat == {**envelope("chat.completion"), "choices": [choice], "usage": COUNTS}
    text = json.loads(responses.text_completion(*IDENTITY, "Hi", "length", USAGE))
    choice = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}
    assert text == {**envelope("text_completion"), "choices": [choice], "usage": COUNTS}


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_any_text_survives_on_one_line(text: str) -> None:
    encoded = responses.json_string(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    for stream in (responses.ChatStream(*IDENTITY), responses.CompletionStream(*IDENTITY)):
        [chunk] = events(stream.content(text))
        choice = chunk["choices"][0]
        assert text == (choice["text"] if "text" in choice else choice["delta"]["content"])
        assert len(stream.content(text).decode().splitlines()) == 2  # the event, and its end


def test_models() -> None:
    entries = [responses.ModelEntry("a", 1, 2048), responses.ModelEntry("b", 2)]
    a = {"id": "a", "object": "model", "created": 1, "owned_by": "dynamo_trio"}
    b = {"id": "b", "object": "model", "created": 2, "owned_by": "dynamo_trio"}
    body = json.loads(responses.models_list(entries))
    assert body == {"object": "list", "data": [{**a, "context_window": 2048}, b]}
    assert json.loads(responses.model_entry(entries[1])) == b


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "stop"), ("eos", "stop"), ("cancelled", "stop"), ("length", "length")],
)
def test_finish_reasons(reason: Any, finish: str) -> None:
    assert responses.openai_finish(reason) == finish


def test_an_engine_error_is_no_finish_reason() -> None:
    with pytest.raises(errors.Unknown, match="boom"):
        responses.openai_finish(FinishError("boom"))


# --- errors --------------------------------------------------------------------------


def test_an_error_says_message_type_code_and_param() -> None:
    body = responses.error_body(errors.InvalidArgument("'n' is wrong", param="n"))
    fields = {"message": "'n' is wrong", "type": "invalid_request_error"}
    assert json.loads(body) == {"error": {**fields, "code": "invalid_request", "param": "n"}}


@pytest.mark.parametrize(
    ("exc", "code", "retry"),
    [
        (errors.Draining("stopping"), b"draining", True),
        (errors.NoWorker("none"), b"no_worker", True),
        (errors.Overloaded("full"), b"overloaded", True),
        (errors.RequestCut("cut"), b"cut", True),
        (errors.ModelNotFound("no such model"), b"model_not_found", False),
        (errors.ContextLengthExceeded("long"), b"context_length_exceeded", False),
        (errors.Disconnected("gone"), b"disconnected", True),
        (errors.Unknown("what?"), b"internal", False),
        (errors.DeadlineExceeded("late"), b"deadline", False),
    ],
)
def test_headers_carry_the_reason_and_when_to_retry(
    exc: errors.DynamoException, code: bytes, retry: bool
) -> None:
    headers = dict(responses.error_headers(exc))
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"x-dynamo-reason"] == code
    assert headers.get(b"retry-after") == (b"1" if retry else None)
    # Or OpenAI's SDK would send it again, twice.
    assert (headers.get(b"x-should-retry") == b"false") == (exc.status >= 500 and not retry)
    assert json.loads(responses.error_body(exc))["error"]["code"] == code.decode()


def test_what_is_not_ours_is_not_shown() -> None:
    body = responses.error_body(OSError("/secret/place"))
    assert b"secret" not in body
    assert json.loads(body)["error"]["type"] == "internal_server_error"
    assert responses.public_error(OSError("x")).status == 500


def test_a_farewell_is_an_event_and_no_end() -> None:
    farewell = responses.error_event(errors.RequestCut("The server is stopping."))
    [event] = EventParser().feed(farewell)
    assert json.loads(event.data)["error"]["code"] == "cut"
    assert not event.is_done


def _all_errors(kind: type[errors.DynamoException]) -> set[type[errors.DynamoException]]:
    return {kind}.union(*(_all_errors(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(_all_errors(errors.DynamoException), key=str))
def test_no_error_has_an_empty_body(kind: type[errors.DynamoException]) -> None:
    exc = kind("")
    error = json.loads(responses.error_body(exc))["error"]
    assert error["message"]
    assert error["type"]
    assert error["code"]


@given(st.text(st.characters()))
def test_any_message_can_be_encoded(text: str) -> None:
    error = json.loads(responses.error_body(errors.InvalidArgument(text)))["error"]
    assert error["param"] is None
    assert len(responses.error_event(errors.InvalidArgument(text)).decode().splitlines()) == 2
