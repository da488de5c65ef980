"""OpenAI's answers as bytes: completions, chunks, model lists, errors.

Theory of operation
-------------------
Everything of a streamed chunk except the text is the same for a whole request, so a
stream object encodes it once; a content chunk is then ``head + JSON string + tail``.
Both kinds of stream have the same methods, so that whoever pumps tokens need not
know which endpoint it serves: :meth:`~ChatStream.start`, :meth:`~ChatStream.content`,
:meth:`~ChatStream.finish`, :meth:`~ChatStream.usage`. Each returns whole SSE events.

Ids and times come from the caller: nothing here reads a clock or draws a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from attrs import frozen

from dynamo_trio.errors import InvalidArgument, Unknown
from dynamo_trio.wire.llm import FinishError
from dynamo_trio.wire.openai import sse
from dynamo_trio.wire.openai.public import public_error as public_error
from dynamo_trio.wire.openai.public import public_message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_trio.wire.llm import CompletionUsage, FinishReason

#: What OpenAI's clients know. ``content_filter`` and ``tool_calls`` come with their features.
OpenAIFinish = Literal["stop", "length"]

_FINISH: dict[FinishReason, OpenAIFinish] = {
    "stop": "stop",
    "eos": "stop",
    "cancelled": "stop",  # as Dynamo 1.5.1 maps it
    "length": "length",
}

# Legal in JSON, but some clients split a stream into lines at them.
_LINE_BREAKS = (
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
    ("\u0085".encode(), rb"\u0085"),
)

_encode = msgspec.json.Encoder().encode


def openai_finish(reason: FinishReason) -> OpenAIFinish:
    """An engine's finish reason in OpenAI's words.

    Raises:
        Unknown: the engine ended with an error and nothing more precise was said, or for a
            reason that has no word here yet.
    """
    try:
        return _FINISH[reason]
    except KeyError:
        said = reason.error if isinstance(reason, FinishError) else ""
        raise Unknown(said or "The engine ended the request with an error.") from None


def json_string(text: str) -> bytes:
    """``text`` as a JSON string, quotes included, on one line for every kind of client."""
    encoded = _encode(text)
    if not text.isascii():
        for raw, escaped in _LINE_BREAKS:
            if raw in encoded:
                encoded = encoded.replace(raw, escaped)
    return encoded


# --- streams -------------------------------------------------------------------------


class AnswerStream(Protocol):
    """What the two kinds of stream have in common. Every method returns SSE events."""

    #: What is before and behind a piece of the answer that is a JSON string already, on one line.
    head: bytes
    tail: bytes

    def start(self) -> bytes:
        """What comes before the first token; may be empty."""

    def content(self, text: str) -> bytes:
        """A piece of the answer."""

    def finish(self, reason: OpenAIFinish) -> bytes:
        """Why the answer ends here."""

    def usage(self, usage: CompletionUsage) -> bytes:
        """The token counts; empty unless the request asked for them."""


class _Stream:
    """The envelope of one streamed answer, encoded once."""

    #: What is around the text of a content chunk. Set by the subclass.
    head: bytes
    tail: bytes

    def __init__(self, object_name: str, id: str, created: int, model: str, usage: bool) -> None:
        fields = {"id": id, "object": object_name, "created": created, "model": model}
        # Without the closing brace: choices and the end are put behind it.
        self._prefix = b"data: " + _one_line(_encode(fields))[:-1]
        # OpenAI sends "usage":null in every chunk of a stream that ends with counts.
        self._suffix = b"]" + (b',"usage":null' if usage else b"") + b"}\n\n"
        self._include_usage = usage

    def _chunk(self, choice: bytes) -> bytes:
        return b"".join((self._prefix, b',"choices":[', choice, self._suffix))

    def content(self, text: str) -> bytes:
        """A chunk with a piece of the answer."""
        return b"%b%b%b" % (self.head, json_string(text), self.tail)

    def usage(self, usage: CompletionUsage) -> bytes:
        """The chunk with counts and no choices; empty unless the request asked for it."""
        if not self._include_usage:
            return b""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._prefix, _encode(usage))


class ChatStream(_Stream):
    """Chunks of a streamed ``chat.completion``."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        super().__init__("chat.completion.chunk", id, created, model, include_usage)
        self.head = self._prefix + b',"choices":[{"index":0,"delta":{"content":'
        self.tail = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def start(self) -> bytes:
        """The chunk that names the role. It is no token: the request stays untouched."""
        delta = b'"delta":{"role":"assistant","content":""}'
        return self._chunk(b'{"index":0,' + delta + b',"logprobs":null,"finish_reason":null}')

    def finish(self, reason: OpenAIFinish) -> bytes:
        """The chunk that says why the answer ends."""
        end = b'"delta":{},"logprobs":null,"finish_reason":"%b"}' % reason.encode()
        return self._chunk(b'{"index":0,' + end)


class CompletionStream(_Stream):
    """Chunks of a streamed ``text_completion``."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        super().__init__("text_completion", id, created, model, include_usage)
        self.head = self._prefix + b',"choices":[{"index":0,"text":'
        self.tail = b',"logprobs":null,"finish_reason":null}' + self._suffix

    def start(self) -> bytes:
        """Nothing: this endpoint has no roles."""
        return b""

    def finish(self, reason: OpenAIFinish) -> bytes:
        """The chunk that says why the answer ends."""
        end = b'"text":"","logprobs":null,"finish_reason":"%b"}' % reason.encode()
        return self._chunk(b'{"index":0,' + end)


# --- unary answers -------------------------------------------------------------------


def chat_completion(
    id: str, created: int, model: str, text: str, finish: OpenAIFinish, usage: CompletionUsage
) -> bytes:
    """The body of an unstreamed chat answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return _answer("chat.completion", id, created, model, choice, usage)


def text_completion(
    id: str, created: int, model: str, text: str, finish: OpenAIFinish, usage: CompletionUsage
) -> bytes:
    """The body of an unstreamed completion."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return _answer("text_completion", id, created, model, choice, usage)


def _answer(
    object_name: str, id: str, created: int, model: str, choice: object, usage: CompletionUsage
) -> bytes:
    fields = {"id": id, "object": object_name, "created": created, "model": model}
    return _encode({**fields, "choices": [choice], "usage": usage})


@frozen
class ModelEntry:
    """One model of ``/v1/models``. ``created``: Unix seconds; ``context_window``: tokens."""

    id: str
    created: int
    context_window: int | None = None


def models_list(models: Iterable[ModelEntry]) -> bytes:
    """The body of ``GET /v1/models``."""
    return _encode({"object": "list", "data": [_model(model) for model in models]})


def model_entry(model: ModelEntry) -> bytes:
    """The body of ``GET /v1/models/{id}``."""
    return _encode(_model(model))


def _model(model: ModelEntry) -> dict[str, object]:
    fields: dict[str, object] = {"id": model.id, "object": "model", "created": model.created}
    fields["owned_by"] = "dynamo_trio"
    if model.context_window is not None:
        fields["context_window"] = model.context_window
    return fields


# --- errors --------------------------------------------------------------------------

#: When trying again helps, it helps soon: by then another server, or worker, is asked.
RETRY_AFTER_SECONDS = 1
#: OpenAI's SDK tries again what has such a status, unless it is told not to.
_SERVERS_FAULT = 500
_NOT_AGAIN = (b"x-should-retry", b"false")


def error_body(exc: BaseException) -> bytes:
    """OpenAI's error envelope; ``code`` is the machine-readable reason. Never empty."""
    error = public_error(exc)
    param = error.param if isinstance(error, InvalidArgument) else None
    fields = {"message": public_message(error), "type": error.kind}
    return _one_line(_encode({"error": {**fields, "code": error.reason, "param": param}}))


def error_headers(exc: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers for an error answer, content type included; length is the caller's.

    ``retry-after`` (seconds) stands where the same request may be sent again.
    ``x-should-retry`` is what OpenAI's SDK goes by.
    """
    error = public_error(exc)
    headers = [
        (b"content-type", b"application/json"),
        (b"x-dynamo-reason", error.reason.encode("ascii")),
    ]
    if error.retry:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_SECONDS))
    elif error.status >= _SERVERS_FAULT:
        headers.append(_NOT_AGAIN)
    return headers


def error_event(exc: BaseException) -> bytes:
    """The farewell of a stream that ends early. No ``[DONE]`` may follow it."""
    return sse.frame(error_body(exc))


def _one_line(encoded: bytes) -> bytes:
    for raw, escaped in _LINE_BREAKS:
        encoded = encoded.replace(raw, escaped)
    return encoded
