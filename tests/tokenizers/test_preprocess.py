"""From a request to token ids, and from token ids to what a client reads."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from dynamo_trio.errors import (
    ContextLengthExceeded,
    InvalidArgument,
    LoadError,
    RequestRejected,
    Unknown,
)
from dynamo_trio.tokenizers import ByteTokenizer, OutputProcessor, Preprocessor
from dynamo_trio.tokenizers.bytes_ import END_OF_TEXT, IM_END
from dynamo_trio.wire.llm import (
    CompletionUsage,
    FinishError,
    LLMEngineOutput,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
)
from dynamo_trio.wire.openai.request import ChatRequest, CompletionRequest, Message

if TYPE_CHECKING:
    from dynamo_trio.wire.llm import PreprocessedRequest

MODEL = Preprocessor(ByteTokenizer(), context_length=100, model="m")
CHAT = ChatRequest(model="m", messages=(Message("user", "Hi"),))
TEXT = CompletionRequest(model="m", prompt="Hi")


class Other(ByteTokenizer):
    """A byte tokenizer with other traits, given by name."""

    def __init__(self, **traits: Any) -> None:
        for name, value in traits.items():
            setattr(self, name, value)


# --- requests ------------------------------------------------------------------------


def test_a_chat_becomes_the_rendered_prompt() -> None:
    request = MODEL.chat(CHAT)
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert request.token_ids == MODEL.tokenizer.encode(rendered, add_special=False)
    assert request.model == "m"
    assert request.eos_token_ids == [END_OF_TEXT, IM_END]
    assert request.stop_conditions == StopConditions(
        max_tokens=100 - len(request.token_ids), stop_token_ids_hidden=[END_OF_TEXT, IM_END]
    )
    assert request.sampling_options == SamplingOptions()


def test_everything_is_passed_on() -> None:
    request = MODEL.completion(
        attrs.evolve(
            TEXT,
            max_tokens=7,
            min_tokens=2,
            temperature=0.0,
            top_p=0.5,
            top_k=3,
            seed=-4,
            stop=("a", "b"),
        )
    )
    assert request.token_ids == [72, 105]
    assert request.stop_conditions == StopConditions(
        max_tokens=7, min_tokens=2, stop=["a", "b"], stop_token_ids_hidden=[END_OF_TEXT, IM_END]
    )
    assert request.sampling_options == SamplingOptions(temperature=0.0, top_p=0.5, top_k=3, seed=-4)


def test_ignore_eos_leaves_no_end_token() -> None:
    request = MODEL.chat(attrs.evolve(CHAT, ignore_eos=True))
    assert request.eos_token_ids == []
    assert request.stop_conditions.stop_token_ids_hidden is None
    assert request.stop_conditions.ignore_eos is True


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "x" * 100}, ["100 tokens", "'prompt' takes"]),
        ({"prompt": "x" * 10_000}, ["100 tokens", "at least"]),
        ({"prompt": "x" * 99, "max_tokens": 2}, ["takes 99", "2 more"]),
        ({"prompt": "x" * 99, "min_tokens": 2}, ["takes 99", "2 more"]),
        ({"prompt": tuple(range(101))}, ["takes 101"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    fields: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(ContextLengthExceeded) as exc:
        MODEL.completion(attrs.evolve(TEXT, **fields))
    assert all(words in exc.value.message for words in says)
    assert exc.value.param == "prompt"
    assert exc.value.reason == "context_length_exceeded"


def test_what_just_fits_is_taken() -> None:
    request = MODEL.completion(attrs.evolve(TEXT, prompt="x" * 99))
    assert request.stop_conditions.max_tokens == 1
    request = MODEL.completion(attrs.evolve(TEXT, prompt="x" * 90, max_tokens=10))
    assert request.stop_conditions.max_tokens == 10


def test_a_chat_that_does_not_fit() -> None:
    with pytest.raises(ContextLengthExceeded) as exc:
        MODEL.chat(attrs.evolve(CHAT, messages=(Message("user", "x" * 200),)))
    assert exc.value.param == "messages"


def test_token_ids_must_be_the_models() -> None:
    assert MODEL.completion(attrs.evolve(TEXT, prompt=(258,))).token_ids == [258]
    with pytest.raises(RequestRejected, match=r"token 259.*0 to 258"):
        MODEL.completion(attrs.evolve(TEXT, prompt=(1, 259)))


def test_an_empty_prompt_begins_from_nothing_if_the_model_can() -> None:
    empty = attrs.evolve(TEXT, prompt="")
    with pytest.raises(InvalidArgument, match="no tokens"):
        MODEL.completion(empty)
    model = Preprocessor(Other(bos_token_id=END_OF_TEXT), context_length=9, model="m")
    assert model.completion(empty).token_ids == [END_OF_TEXT]


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(InvalidArgument, match="Unicode"):
        MODEL.completion(attrs.evolve(TEXT, prompt="\ud800"))
    with pytest.raises(InvalidArgument, match="Unicode"):
        MODEL.chat(attrs.evolve(CHAT, messages=(Message("user", "\udfff"),)))


def test_without_a_template_there_is_no_chat() -> None:
    model = Preprocessor(Other(chat_template=None), context_length=100, model="m")
    with pytest.raises(InvalidArgument, match="no chat template"):
        model.chat(CHAT)
    assert model.completion(TEXT).token_ids


def test_a_bad_template_fails_at_the_start() -> None:
    with pytest.raises(LoadError):
        Preprocessor(Other(chat_template="{% if %}"), context_length=100, model="m")


def test_a_template_may_ask_for_the_date() -> None:
    tokenizer = Other(chat_template="{{ strftime_now('%Y') }}")
    ids = Preprocessor(tokenizer, context_length=100, model="m").chat(CHAT).token_ids
    assert tokenizer.decode(ids) == time.strftime("%Y")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{{ 'x' * 99999 }}",  # rendered in no time, but long to tokenise
    ],
)
def test_the_event_loop_does_not_wait_for_a_dear_template(source: str) -> None:
    model = Preprocessor(Other(chat_template=source), context_length=999999, model="m")
    assert model.chat_at_once(CHAT) is None
    assert model.chat_at_once(CHAT) is None  # not even begun


def test_most_templates_are_for_the_event_loop() -> None:
    assert MODEL.chat_at_once(CHAT) == MODEL.chat(CHAT)


# --- answers -------------------------------------------------------------------------


def request(text: str = "Hi", **fields: Any) -> PreprocessedRequest:
    return MODEL.completion(attrs.evolve(TEXT, prompt=text, **fields))


def output(**fields: Any) -> OutputProcessor:
    return MODEL.output(request(**fields))


def ids(text: str) -> list[int]:
    return list(text.encode())


def end(out: OutputProcessor) -> tuple[str | None, bool]:
    """How the answer ended, if it has, and whether the engine must be told."""
    return out.finish_reason, out.ended_early


def usage(completion: int) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=2, completion_tokens=completion, total_tokens=2 + completion
    )


def test_an_answer_that_the_engine_ends() -> None:
    out = output()
    assert out.push(LLMEngineOutput(token_ids=ids("He"))) == "He"
    assert end(out) == (None, False)
    assert not out.is_full
    last = LLMEngineOutput(token_ids=[IM_END], finish_reason="eos")
    assert out.push(last) == ""
    assert end(out) == ("stop", False)
    assert out.usage == usage(3)
    assert out.push_ids(ids("more"), "length") == ""
    assert (out.usage, out.flush(), end(out)) == (usage(3), "", ("stop", False))


def test_an_end_token_hides_what_follows_and_the_engine_must_be_told() -> None:
    out = output()
    assert out.push_ids([72, IM_END, 73]) == "H"
    assert end(out) == ("stop", True)
    assert out.usage == usage(2)


def test_an_end_token_may_have_text_of_its_own() -> None:
    model = Preprocessor(Other(eos_token_ids=(90,)), context_length=100, model="m")
    out = model.output(model.completion(TEXT))
    assert out.push_ids(ids("aZ")) == "a"
    assert out.is_full
    assert out.push_ids([], "eos") == ""
    assert end(out) == ("stop", False)


def test_with_ignore_eos_an_end_token_is_no_end() -> None:
    out = output(ignore_eos=True)
    assert out.push_ids([72, IM_END, 73]) == "HI"
    assert end(out) == (None, False)
    assert out.usage == usage(3)


def test_before_min_tokens_an_end_token_is_no_end() -> None:
    out = output(min_tokens=2)
    assert out.push_ids([IM_END, 72]) == "H"
    assert not out.is_full
    assert out.push_ids([IM_END]) == ""
    assert out.is_full


@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_more_than_max_tokens_get_through(one_by_one: bool) -> None:
    out = output(max_tokens=3)
    groups = [[token] for token in ids("abcdef")] if one_by_one else [ids("abcdef")]
    assert "".join([out.push_ids(group) for group in groups]) == "abc"
    assert end(out) == ("length", True)
    assert out.usage == usage(3)


def test_at_max_tokens_the_engine_still_has_its_say() -> None:
    out = output(max_tokens=3)
    assert out.push_ids(ids("abc")) == "abc"
    assert end(out) == (None, False)
    assert out.is_full
    assert out.push_ids([], "length") == ""
    assert end(out) == ("length", False)


def test_a_stream_without_an_end_is_whole_only_if_all_came() -> None:
    out = output(max_tokens=2)
    out.push_ids(ids("a"))
    assert out.flush() == ""
    assert end(out) == (None, False)
    out = output(max_tokens=2)
    out.push_ids([97, 0xC3])
    assert out.flush() == "\ufffd"
    assert end(out) == ("length", False)


def test_a_stop_string_ends_the_answer() -> None:
    out = output(stop=("END",))
    assert out.push_ids(ids("say E")) == "say "
    assert out.push_ids(ids("N")) == ""
    assert out.push_ids(ids("Dmore")) == ""
    assert end(out) == ("stop", True)
    # Counted up to the token that completed the stop string.
    assert out.usage == usage(len("say END"))
    assert out.push_ids(ids("more"), "length") == ""


def test_a_stop_string_in_the_last_item_counts() -> None:
    out = output(stop=("c",))
    assert out.push_ids(ids("abcd"), "length") == "ab"
    assert end(out) == ("stop", False)


def test_what_was_held_back_comes_at_the_end() -> None:
    out = output(stop=("END",))
    assert out.push_ids(ids("the EN")) == "the "
    assert out.push_ids([0xC3], "length") == "EN\ufffd"
    out = output(stop=("END",))
    out.push_ids(ids("EN"))
    assert out.flush() == "EN"


def test_before_min_tokens_stop_strings_are_not_searched() -> None:
    out = output(stop=("b",), min_tokens=2)
    assert out.push_ids(ids("abab")) == "aba"
    assert out.usage == usage(4)


def test_text_of_the_engine_wins_over_its_ids() -> None:
    out = output(stop=("!",))
    assert out.push(LLMEngineOutput(token_ids=[1], text="één")) == "één"
    assert out.push(LLMEngineOutput(token_ids=[], text="x!y", finish_reason="stop")) == "x"
    assert (out.finish_reason, out.ended_early, out.usage) == ("stop", False, usage(1))
    out = output(max_tokens=1)
    assert out.push(LLMEngineOutput(token_ids=[1], text="a")) == "a"
    assert out.push(LLMEngineOutput(token_ids=[1], text="b")) == ""
    assert end(out) == ("length", True)


def test_an_engine_error_is_raised() -> None:
    with pytest.raises(Unknown):
        output().push_ids([], FinishError("boom"))


@given(
    answer=st.text("abE😀\n", max_size=30),
    stops=st.lists(st.text("abE😀", min_size=1, max_size=3), max_size=3),
    max_tokens=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 120), max_size=10),
)
def test_any_grouping_gives_the_same_answer(
    answer: str, stops: list[str], max_tokens: int, cuts: list[int]
) -> None:
    tokens = ids(answer)

    def read(groups: list[list[int]]) -> tuple[object, ...]:
        out = output(stop=tuple(stops), max_tokens=max_tokens)
        text = "".join([out.push_ids(group) for group in groups])
        text += out.push_ids([], "stop")
        return text, out.finish_reason, out.completion_tokens

    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    groups = [tokens[begin:end] for begin, end in itertools.pairwise(edges)]
    assert read(groups) == read([[token] for token in tokens])


@given(st.lists(st.lists(st.integers(-1, 300), max_size=4), max_size=8), st.booleans())
def test_any_ids_give_text(groups: list[list[int]], stops: bool) -> None:
    out = output(stop=("a",) if stops else ())
    text = "".join([out.push_ids(group) for group in groups]) + out.flush()
    assert text.isascii() or text.encode()
    assert out.completion_tokens <= sum(map(len, groups))


@pytest.mark.parametrize(("said", "told"), [(1, 1), (10**6, 2)])
def test_what_the_engine_had_cached_is_told(said: int, told: int) -> None:
    """More than the prompt: to a worker that took it over, what was answered belongs to it."""
    out = output()
    out.push(LLMEngineOutput(token_ids=[65]))
    assert out.usage.prompt_tokens_details is None
    details = PromptTokensDetails(cached_tokens=said)
    counts = structs.replace(usage(1), prompt_tokens_details=details)
    out.push(LLMEngineOutput(token_ids=[], finish_reason="stop", completion_usage=counts))
    assert out.usage.prompt_tokens_details == PromptTokensDetails(cached_tokens=told)
