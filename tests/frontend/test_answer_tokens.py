"""Tokens that come bare make the same answer as the items that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import DynamoException, EngineShutdown, UnreadableItem
from dynamo_trio.frontend.answers import GRANT_AT, UnaryAnswer
from dynamo_trio.frontend.metrics import FrontendMetrics, RequestRecord
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import LLMEngineOutput, encode_token
from dynamo_trio.wire.openai.request import parse_completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.plane import ClientStream
    from dynamo_trio.wire.llm import FinishReason


@attrs.define(eq=False)
class Granted:
    """The client's hold on a stream, of which only the credit matters here."""

    items: int = 0

    def grant(self, items: int) -> None:
        self.items += items

    def stop(self) -> None:
        raise AssertionError("nobody stops it")


def new_answer(body: bytes) -> UnaryAnswer:
    preprocessor = Preprocessor(ByteTokenizer(), context_length=512, model="m")
    output = preprocessor.output(preprocessor.completion(parse_completion(body)))
    record = RequestRecord(FrontendMetrics(), "m", "completions", "unary")
    # The record reads Trio's clock; no clock is needed for what is looked at here.
    return UnaryAnswer(output, record)


def outcome(answer: UnaryAnswer) -> tuple[object, ...]:
    output = answer.output
    return (
        *(answer.text, answer.complete, answer.error, output.finish_reason, output.usage),
        *(answer.record.token_count, output.ended_early),
    )


BODIES = (
    b'{"model":"m","prompt":"hi","max_tokens":12}',
    b'{"model":"m","prompt":"hi","max_tokens":400,"stop":["ab","ca"]}',
    b'{"model":"m","prompt":"hi","max_tokens":6,"stop":["b"],"min_tokens":3}',
)

ENDS: tuple[FinishReason | None, ...] = ("length", "stop", None)


def feed(answer: UnaryAnswer, steps: list[list[int]], *, bare: bool) -> int:
    """Feed these steps; returns the credit that was given back."""
    handle = Granted()
    answer.attach(as_stream(handle))
    for step in steps:
        give(answer, step, bare=bare)
    return handle.items


def as_stream(handle: Granted) -> ClientStream:
    stream: ClientStream = handle  # type: ignore[assignment]  # it has all that is used
    return stream


def give(answer: UnaryAnswer, step: Sequence[int], *, bare: bool) -> None:
    if bare:
        answer.feed_tokens(step)
    else:
        for token in step:
            answer.feed([encode_token(MSGPACK, token)])


@given(
    body=st.sampled_from(BODIES),
    steps=st.lists(st.lists(st.sampled_from(list(b"abc\xc3\xa9")), min_size=1, max_size=4)),
    last=st.sampled_from(ENDS),
)
async def test_bare_tokens_and_items_make_the_same_answer(
    body: bytes, steps: list[list[int]], last: FinishReason | None
) -> None:
    bare, items = new_answer(body), new_answer(body)
    granted = feed(bare, steps, bare=True)
    assert feed(items, steps, bare=False) == sum(map(len, steps))
    assert sum(map(len, steps)) - GRANT_AT < granted <= sum(map(len, steps))
    error: DynamoException | None = None if last else EngineShutdown("cut")
    for answer in (bare, items):
        if last is not None:
            end = LLMEngineOutput(token_ids=[97], finish_reason=last)
            answer.feed([MSGPACK.encode(end)])
        answer.finish(error)
    assert outcome(bare)[:2] == outcome(items)[:2]
    assert outcome(bare)[3:] == outcome(items)[3:]
    assert type(bare.error) is type(items.error)


async def test_nothing_comes_behind_an_item_that_cannot_be_read() -> None:
    answer = new_answer(BODIES[0])
    give(answer, b"ab", bare=False)
    answer.feed([b"\xc1"])
    for bare in (True, False):
        give(answer, b"cd", bare=bare)
    answer.finish(None)
    assert type(answer.error) is UnreadableItem
    assert (answer.text, answer.complete, answer.untouched) == ("ab", False, True)


async def test_an_answer_that_is_begun_anew_has_forgotten_everything() -> None:
    answer, fresh = new_answer(BODIES[0]), new_answer(BODIES[0])
    give(answer, b"ab\xc3", bare=True)
    answer.finish(EngineShutdown("cut"))
    answer.restart(new_answer(BODIES[0]).output)
    handle = Granted()
    answer.attach(as_stream(handle))
    assert handle.items == 0  # what it owed, it owed to another worker
    for each in (answer, fresh):
        give(each, b"hello", bare=True)
        each.feed([MSGPACK.encode(LLMEngineOutput(token_ids=[], finish_reason="stop"))])
        each.finish(None)
    assert outcome(answer) == outcome(fresh)
    assert (answer.text, answer.complete) == ("hello", True)
