"""The simulated core's answers: pure functions of the tokens before."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.engines import Request
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.engines.vocabulary import AnyOf, Syllables, Vocabulary

prompts = st.lists(st.integers(0, 2**17), min_size=1, max_size=30).map(tuple)
vocabularies = st.sampled_from([Syllables(), AnyOf(range(50_000)), AnyOf([3, 1, 4])])


def answer(request: Request, settings: SimSettings, beside: int = 0) -> tuple[list[int], str]:
    """The whole answer of one request, with ``beside`` others in the same steps."""
    core = SimCore(settings)
    for number in range(beside):
        core.add(attrs.evolve(request, request_id=f"other {number}", token_ids=(number,)))
    core.add(request)
    token_ids: list[int] = []
    while True:
        for delta in core.step():
            if delta.request_id == request.request_id:
                token_ids.extend(delta.token_ids)
                if delta.finish_reason is not None:
                    return token_ids, delta.finish_reason


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        request_id="r",
        token_ids=draw(prompts),
        max_tokens=draw(st.integers(1, 40)),
        temperature=draw(st.sampled_from([0.0, 0.7])),
        seed=draw(st.none() | st.integers(0, 2**64)),
        stop_token_ids=draw(st.sets(st.integers(97, 122), max_size=2)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 10)),
    )


@given(request=requests(), vocabulary=vocabularies, every=st.integers(0, 20))
def test_an_answer_continued_after_any_cut_is_the_undisturbed_answer(
    request: Request, vocabulary: Vocabulary, every: int
) -> None:
    settings = SimSettings(vocabulary=vocabulary, eos_every=every)
    whole, reason = answer(request, settings)
    for cut in range(len(whole)):
        rest = attrs.evolve(
            request,
            token_ids=request.token_ids + tuple(whole[:cut]),
            max_tokens=request.limit - cut,
            min_tokens=max(request.min_tokens - cut, 0),
        )
        assert answer(rest, settings) == (whole[cut:], reason)


@given(request=requests(), beside=st.integers(1, 5))
def test_an_answer_does_not_depend_on_who_runs_beside_it(request: Request, beside: int) -> None:
    settings = SimSettings(eos_every=10)
    assert answer(request, settings, beside) == answer(request, settings)


@given(request=requests())
def test_an_answer_ends_for_a_reason_that_was_asked_for(request: Request) -> None:
    token_ids, reason = answer(request, SimSettings(eos_every=5))
    if reason == "length":
        assert len(token_ids) == request.limit
    else:
        assert reason == "stop"
        assert min(request.min_tokens, request.limit) <= len(token_ids) < request.limit
        assert not (request.ignore_eos and not request.stop_token_ids)
    assert not set(token_ids[request.min_tokens :]) & request.stop_token_ids


def text(prompt: bytes, tokens: int = 200) -> str:
    request = Request(request_id="r", token_ids=prompt, max_tokens=tokens, ignore_eos=True)
    return bytes(answer(request, SimSettings())[0]).decode("ascii")


def test_bytes_are_words_that_can_be_read() -> None:
    words = text(b"Why is the sky blue?", 600).strip().split(" ")
    assert all(word.isalpha() and word.islower() for word in words)
    assert 3 < sum(map(len, words)) / len(words) < 8
    assert len(set(words)) > 50


def test_different_prompts_get_different_answers() -> None:
    assert len({text(b"prompt %d" % number, 30) for number in range(100)}) == 100


def test_the_order_of_the_prompt_matters() -> None:
    assert text(b"ab") != text(b"ba")


def test_the_seed_counts_only_with_a_temperature() -> None:
    def with_seed(seed: int, temperature: float) -> list[int]:
        return answer(
            Request(
                request_id="r",
                token_ids=(1,),
                max_tokens=20,
                ignore_eos=True,
                seed=seed,
                temperature=temperature,
            ),
            SimSettings(),
        )[0]

    assert with_seed(1, 0.0) == with_seed(2, 0.0)
    assert with_seed(1, 0.5) != with_seed(2, 0.5)
    assert with_seed(1, 0.5) == with_seed(1, 0.5)


def test_answers_end_by_themselves_as_often_as_asked() -> None:
    settings = SimSettings(eos_every=20)
    lengths = []
    for number in range(300):
        request = Request(request_id="r", token_ids=(number,), max_tokens=1000)
        token_ids, reason = answer(request, settings)
        assert reason == "stop"
        lengths.append(len(token_ids))
    assert 15 < sum(lengths) / len(lengths) < 25


def test_a_vocabulary_has_a_token() -> None:
    with pytest.raises(ValueError, match="at least one"):
        AnyOf([])


def test_any_of_uses_all_that_it_was_given_and_nothing_else() -> None:
    request = Request(request_id="r", token_ids=(1,), max_tokens=400, ignore_eos=True)
    token_ids, _ = answer(request, SimSettings(vocabulary=AnyOf(range(70, 90))))
    assert set(token_ids) == set(range(70, 90))
