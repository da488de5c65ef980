"""What must hold of an engine, so that it can go on with an answer that another one has begun.

Theory of operation
-------------------
To go on, an engine gets the tokens of the answer so far as a part of its prompt, and is told
nothing else. What an engine keeps beside the tokens begins anew there, and some requests show
that: a penalty on what was said before, a grammar, a generator of random numbers. Each such
thing has a name here (:class:`Replay`). A request *needs* some of them (:func:`needs`), and an
engine *declares* some; it may go on with a request if nothing of what that needs is missing.

To begin an answer anew needs nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_trio.wire.llm import PreprocessedRequest, SamplingOptions


class Replay(StrEnum):
    """What an engine may declare; each says what its answers do when they are continued."""

    #: It leaves stop strings to the frontend, or finds them in new tokens only.
    STOP_STRINGS = "stop_strings"
    #: Presence, frequency and repetition penalties count the answer's tokens in the prompt, too.
    PENALTIES = "penalties"
    #: The grammar is led through the answer's tokens in the prompt.
    GUIDED_DECODING = "guided_decoding"
    #: The log probabilities of tokens do not depend on where the prompt ends.
    LOGPROBS = "logprobs"
    #: Choice k of a request with n > 1 is what the request with n = 1 and seed + k gets.
    CHOICES = "choices"
    #: With a seed each token depends on the seed and the tokens before it, and on nothing else.
    SEED = "seed"
    #: The budget of thinking counts the answer's tokens in the prompt, too.
    THINKING = "thinking"
    #: What it writes as text itself goes on where it broke off, within a character, too.
    TEXT = "text"
    #: It chooses the best of several answers, or searches with beams, all over again.
    RANKING = "ranking"


#: What may be taken for granted of an engine that declares nothing: our frontend finds stop
#: strings itself.
UNDECLARED: Final = frozenset({Replay.STOP_STRINGS})

#: What our own engines can, by their names. llama.cpp draws from a generator that begins anew
#: with each request; the simulated engine's draw is a function of seed and tokens.
DECLARED: Final[Mapping[str, frozenset[Replay]]] = {
    "sim": UNDECLARED | {Replay.SEED},
    "llama": UNDECLARED,
}


def needs(request: PreprocessedRequest) -> frozenset[Replay]:
    """What an engine must declare to go on in the middle of this request's answer."""
    return frozenset((*_of_sampling(request.sampling_options), *_of_the_rest(request)))


def _of_the_rest(request: PreprocessedRequest) -> Iterator[Replay]:
    stop, output = request.stop_conditions, request.output_options
    if stop.stop:
        yield Replay.STOP_STRINGS
    if stop.max_thinking_tokens is not None:
        yield Replay.THINKING
    if output.logprobs is not None or output.prompt_logprobs is not None:
        yield Replay.LOGPROBS


def _of_sampling(sampling: SamplingOptions) -> Iterator[Replay]:
    repeats = sampling.repetition_penalty not in (None, 1.0)
    if sampling.presence_penalty or sampling.frequency_penalty or repeats:
        yield Replay.PENALTIES
    if sampling.guided_decoding is not None:
        yield Replay.GUIDED_DECODING
    if choices(sampling) > 1:
        yield Replay.CHOICES
    if sampling.use_beam_search or (sampling.best_of or 1) > choices(sampling):
        yield Replay.RANKING
    if sampling.seed is not None and sampling.temperature != 0:
        yield Replay.SEED


def choices(sampling: SamplingOptions) -> int:
    """How many answers a request has."""
    return max(sampling.n or 1, 1)
