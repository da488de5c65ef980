"""A token alone, in the middle of a streamed answer, goes a shorter way to the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import EngineShutdown
from dynamo_trio.frontend.answers import StreamAnswer
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.record import RequestRecord
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.sinks import BodySink
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.tokenizers.abc import TokenTable
from dynamo_trio.tokenizers.preprocess import MAX_READY_SIZE
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import LLMEngineOutput, encode_token
from dynamo_trio.wire.openai.request import parse_completion
from dynamo_trio.wire.openai.response import CompletionStream
from dynamo_trio.wire.openai.sse import EventParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from dynamo_trio.http.asgi import Message

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_token_ids[0]


@attrs.define(eq=False)
class Collecting(BodySink):
    """Keeps what it is given."""

    pieces: list[bytes] = attrs.field(factory=list)

    def _put(self, data: bytes) -> None:
        self.pieces.append(data)

    async def drain(self) -> None:
        raise AssertionError("nothing is sent")


async def nowhere(message: Message) -> None:
    raise AssertionError(f"nothing is sent: {message}")


def new_answer(preprocessor: Preprocessor, body: bytes) -> StreamAnswer:
    output = preprocessor.output(preprocessor.completion(parse_completion(body)))
    record = RequestRecord(FrontendMetrics(), "m", "completions", "stream")
    chunks = CompletionStream("cmpl-1", 0, "m", include_usage=True)
    return StreamAnswer(output, record, Collecting(nowhere, HttpLimits()), chunks)


def written(answer: StreamAnswer) -> bytes:
    assert isinstance(answer.sink, Collecting)
    return b"".join(answer.sink.pieces)


BODIES = (
    b'{"model":"m","prompt":"hi","max_tokens":9}',
    b'{"model":"m","prompt":"hi","max_tokens":400}',
    b'{"model":"m","prompt":"hi","ignore_eos":true}',
    b'{"model":"m","prompt":"hi","max_tokens":400,"min_tokens":5}',
    b'{"model":"m","prompt":"hi","max_tokens":400,"stop":["ab","ca"]}',
)
TOKENS = [*b'abc"\n\xc3\xa9\xe2\x80\xa8\xff', END]


@given(
    body=st.sampled_from(BODIES),
    tokens=st.lists(st.sampled_from(TOKENS), max_size=30),
    told=st.booleans(),
)
async def test_it_makes_the_same_bytes_as_whole_items(
    body: bytes, tokens: Sequence[int], told: bool
) -> None:
    preprocessor = Preprocessor(TOKENIZER, context_length=512, model="m")
    learning, knowing, items = (new_answer(preprocessor, body) for _ in range(3))
    for answer in (learning, knowing):
        for token in tokens:
            answer.feed_tokens([token])
    for token in tokens:
        items.feed([encode_token(MSGPACK, token)])
    for answer in (learning, knowing, items):
        if told:
            answer.feed([MSGPACK.encode(LLMEngineOutput(token_ids=[], finish_reason="stop"))])
        answer.finish(EngineShutdown("cut"))
    assert written(learning) == written(knowing) == written(items)
    for one, other in ((learning, items), (knowing, items)):
        assert one.output.usage == other.output.usage
        assert one.output.finish_reason == other.output.finish_reason
        assert one.record.token_count == other.record.token_count
        assert (one.complete, type(one.error)) == (other.complete, type(other.error))


async def test_all_tokens_are_ready_that_show_a_text() -> None:
    preprocessor = Preprocessor(TOKENIZER, context_length=512, model="m")
    output = new_answer(preprocessor, BODIES[1]).output
    assert [output.ready(token) for token in b'a"'] == [b'"a"', rb'"\""']
    assert [output.ready(token) for token in (END, 0xC3, TOKENIZER.vocab_size, -2)] == [None] * 4
    assert output.completion_tokens == 2


async def test_a_long_token_is_not_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"a", b"b" * MAX_READY_SIZE, b"c"]
    monkeypatch.setattr(TOKENIZER, "_table", TokenTable(pieces), raising=False)
    monkeypatch.setattr(TOKENIZER, "vocab_size", len(pieces), raising=False)
    preprocessor = Preprocessor(TOKENIZER, context_length=512, model="m")
    answer = new_answer(preprocessor, b'{"model":"m","prompt":[0],"max_tokens":9}')
    assert [answer.output.ready(token) for token in range(3)] == [b'"a"', None, b'"c"']
    assert answer.output.push_ids([1]) == "b" * MAX_READY_SIZE


async def test_half_a_character_is_never_ready() -> None:
    preprocessor = Preprocessor(TOKENIZER, context_length=512, model="m")
    for tokens in (b"\xc3\xa9", b"\xc3a", b"a\xc3\xa9a"):
        answer = new_answer(preprocessor, BODIES[1])
        for token in tokens:
            answer.feed_tokens([token])
        answer.feed_tokens([97])
        answer.finish(EngineShutdown("cut"))
        assert text_of(answer).startswith(tokens.decode("utf-8", "replace"))
    fresh = new_answer(preprocessor, BODIES[1]).output
    assert fresh.ready(0xC3) is None


def text_of(answer: StreamAnswer) -> str:
    chunks = (event.data for event in EventParser().feed(written(answer)))
    return "".join(data.split('"text":"')[1].split('"')[0] for data in chunks if '"text":"' in data)
