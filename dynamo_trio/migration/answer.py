"""What has come of an answer, choice by choice, and the requests that ask for the rest of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import attrs
from msgspec import structs

from dynamo_trio.errors import UnreadableItem
from dynamo_trio.migration.replay import choices
from dynamo_trio.wire.llm import CompletionUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.llm import LLMEngineOutput, PreprocessedRequest


@attrs.frozen
class Part:
    """A request to send, and whose tokens it brings.

    ``index`` is the choice that all its items belong to, whatever index they carry; None: the
    items say it themselves.
    """

    index: int | None
    request: PreprocessedRequest


@attrs.define(eq=False)
class Choice:
    """One of a request's answers."""

    #: What its worker has sent, from the first token on, whoever sent it.
    tokens: array[int] = attrs.field(factory=lambda: array("q"))
    #: Invariant: set once; it needs no more.
    over: bool = False
    #: The sum of the log probabilities, as told last.
    log_probs: float = 0.0
    #: How many tokens there were, and their sum, when the present worker was asked.
    count_before: int = 0
    log_probs_before: float = 0.0


class AnswerSoFar:
    """The choices of one request. Tokens are counted from the beginning of the answer."""

    def __init__(self, request: PreprocessedRequest) -> None:
        self._request = request
        stop = request.stop_conditions
        self._max_tokens, self._min_tokens = stop.max_tokens, stop.min_tokens or 0
        self._hidden = frozenset(() if stop.ignore_eos else stop.stop_token_ids_hidden or ())
        self.forget()

    def forget(self) -> None:
        """All that has come was thrown away."""
        #: An engine has written text of its own; and some of it came without a token.
        self.has_text = self.has_bare_text = False
        self.choices = [Choice() for _ in range(choices(self._request.sampling_options))]

    @property
    def count(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer, of the longest choice."""
        return len(self._request.token_ids) + max(len(c.tokens) for c in self.choices)

    @property
    def is_whole(self) -> bool:
        """Is there nothing left to ask for?"""
        return all(self._is_full(choice) for choice in self.choices)

    def choice(self, index: int) -> Choice:
        """One of the choices.

        Raises:
            UnreadableItem: the request has not asked for so many.
        """
        if not 0 <= index < len(self.choices):
            raise UnreadableItem(f"an item of choice {index}, and there are {len(self.choices)}")
        return self.choices[index]

    def take(self, token_ids: Sequence[int], index: int) -> None:
        """New tokens of a choice. What is behind its end is no part of it."""
        choice = self.choice(index)
        if not choice.over:
            choice.tokens.extend(token_ids)

    def carried(self, item: LLMEngineOutput, index: int) -> LLMEngineOutput:
        """The item as if one worker had sent all of them: index, sums and counts go on."""
        choice = self.choice(index)
        self._note_text(item)
        changed: dict[str, object] = {}
        if item.index is not None or index:
            changed["index"] = index
        if item.cum_log_probs is not None:
            choice.log_probs = choice.log_probs_before + item.cum_log_probs
            changed["cum_log_probs"] = choice.log_probs
        if item.completion_usage is not None and choice.count_before:
            changed["completion_usage"] = self._usage(item.completion_usage, choice.count_before)
        return structs.replace(item, **changed) if changed else item

    def _note_text(self, item: LLMEngineOutput) -> None:
        if item.text is not None:
            self.has_text = True
            self.has_bare_text |= bool(item.text) and not item.token_ids

    def parts(self) -> tuple[Part, ...]:
        """What to ask the next worker for. To be called once for each worker."""
        if self.count == 0:
            return (Part(None, self._request),)
        for choice in self.choices:
            choice.count_before, choice.log_probs_before = len(choice.tokens), choice.log_probs
        return tuple(
            Part(index, self._rest(index))
            for index, choice in enumerate(self.choices)
            if not self._is_full(choice)
        )

    def _is_full(self, choice: Choice) -> bool:
        """Over, or all that was asked for is there, and only the word for it is missing.

        The last token may be one that ends the answer, if the worker sends such tokens.
        """
        count = len(choice.tokens)
        if choice.over or (self._max_tokens is not None and count >= self._max_tokens):
            return True
        return count > self._min_tokens and choice.tokens[-1] in self._hidden

    def _rest(self, index: int) -> PreprocessedRequest:
        """The request for what a choice lacks: as in Dynamo nothing marks it as such."""
        request, tokens = self._request, self.choices[index].tokens
        stop, sampling = request.stop_conditions, request.sampling_options
        rebased = structs.replace(
            stop,
            max_tokens=_less(stop.max_tokens, len(tokens)),
            min_tokens=_less(stop.min_tokens, len(tokens)),
        )
        if len(self.choices) > 1:
            seed = None if sampling.seed is None else sampling.seed + index
            sampling = structs.replace(sampling, n=1, best_of=None, seed=seed)
        return structs.replace(
            request,
            token_ids=[*request.token_ids, *tokens],
            stop_conditions=rebased,
            sampling_options=sampling,
        )

    def _usage(self, usage: CompletionUsage, before: int) -> CompletionUsage:
        """``before`` tokens of the answer were a part of the worker's prompt."""
        prompt, completion = len(self._request.token_ids), before + usage.completion_tokens
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            details = structs.replace(details, cached_tokens=min(details.cached_tokens, prompt))
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )


def _less(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(0, limit - count)
