"""Requests to token ids, and token ids to what a client reads. No I/O, nothing awaits.

Theory of operation
-------------------
:class:`Preprocessor` is one per model; :class:`OutputProcessor` one per request. The
latter stands on the token path: the link reader pushes each step's new ids and sends
what comes back, so it does no more than a table look-up, incremental UTF-8 and, only
if there are stop strings, a search. It is also the last guard of what the request asked
for: whatever a worker sends, no text after a stop string, no token after the end of
the answer, and no more than ``max_tokens`` get through.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import TYPE_CHECKING, Final

from dynamo_trio.errors import ContextLengthExceeded, InvalidArgument, RequestRejected
from dynamo_trio.wire.llm import (
    CompletionUsage,
    PreprocessedRequest,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
)
from dynamo_trio.wire.openai.meter import TooDear
from dynamo_trio.wire.openai.response import json_string, openai_finish
from dynamo_trio.wire.openai.stop import StopScanner
from dynamo_trio.wire.openai.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.tokenizers.abc import Tokenizer
    from dynamo_trio.wire.llm import FinishReason, LLMEngineOutput
    from dynamo_trio.wire.openai.request import ChatRequest, CompletionRequest, GenerationRequest
    from dynamo_trio.wire.openai.response import OpenAIFinish

#: Bytes of a request body up to which preprocessing may run in the event loop. llama.cpp
#: takes about 0.5 ms for so much text that it has not seen before; above it, a worker thread
#: is worth its price.
INLINE_BYTES = 1024
#: Characters of a prompt that the event loop may tokenise: a template can make a long one of
#: few messages.
INLINE_TEXT = 8 * 1024

#: Tokens of a model whose JSON is kept ready, and bytes of the longest that is; a table of all
#: takes about 60 bytes for each, and half a microsecond when the model is loaded.
MAX_READY: Final = 2**18
MAX_READY_SIZE: Final = 128


class Preprocessor:
    """Renders, encodes and checks the requests of one model. Safe from several threads.

    ``context_length`` is in tokens, prompt and answer together.

    Raises:
        LoadError: the tokenizer's chat template is no valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, *, context_length: int, model: str) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.model = model
        self._template = _template(tokenizer)
        self._eos = list(tokenizer.eos_token_ids)
        self._ready = _ready_strings(tokenizer)
        #: Its template has once taken longer than the event loop may stand still.
        self._is_dear = False

    def chat_at_once(self, request: ChatRequest) -> PreprocessedRequest | None:
        """:meth:`chat` for a short conversation, in the event loop, if that takes no time.

        None: it does, for this model; a thread is to do it.
        """
        if self._is_dear:
            return None
        try:
            return self.chat(request, inline=True)
        except TooDear:
            self._is_dear = True
            return None

    def chat(self, request: ChatRequest, *, inline: bool = False) -> PreprocessedRequest:
        """The tokens that ask the model for its turn.

        Raises:
            InvalidArgument: no chat template, or it refuses the messages.
            ContextLengthExceeded: prompt and ``max_tokens`` do not fit.
            TooDear: it takes longer than a few milliseconds, and is to be done ``inline``.
        """
        if self._template is None:
            raise InvalidArgument(
                f"The model '{self.model}' has no chat template; use /v1/completions.",
                param="model",
            )
        text = self._template.render(request.messages, inline=inline)
        if inline and len(text) > INLINE_TEXT:
            raise TooDear
        # The template has already written what the model wants around a text.
        return self._request(request, self._encode(text, "messages", add_special=False), "messages")

    def completion(self, request: CompletionRequest) -> PreprocessedRequest:
        """The tokens of a plain prompt.

        Raises:
            InvalidArgument: no token at all, or one that the model does not have.
            ContextLengthExceeded: prompt and ``max_tokens`` do not fit.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            ids = self._encode(prompt, "prompt", add_special=True)
        else:
            ids = self._known(prompt)
        return self._request(request, ids, "prompt")

    def output(self, request: PreprocessedRequest) -> OutputProcessor:
        """The state that turns this request's token ids into text."""
        return OutputProcessor(self.tokenizer, request, self._ready)

    def _encode(self, text: str, param: str, *, add_special: bool) -> list[int]:
        # Encoding a text that cannot fit may take seconds; see Tokenizer.least_tokens.
        least = self.tokenizer.least_tokens(text)
        if least >= self.context_length:
            raise self._too_long(f"at least {least}", None, param)
        try:
            ids = self.tokenizer.encode(text, add_special=add_special)
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"'{param}' gives text that is not valid Unicode.", param=param
            ) from None
        if ids or self.tokenizer.bos_token_id is None:
            return ids
        return [self.tokenizer.bos_token_id]  # an empty prompt: the model begins from nothing

    def _known(self, ids: tuple[int, ...]) -> list[int]:
        size = self.tokenizer.vocab_size
        if max(ids) >= size:
            raise RequestRejected(
                f"'prompt' has the token {max(ids)}, but the model has tokens 0 to {size - 1}.",
                param="prompt",
            )
        return list(ids)

    def _request(
        self, request: GenerationRequest, ids: list[int], param: str
    ) -> PreprocessedRequest:
        eos = [] if request.ignore_eos else self._eos
        stop = StopConditions(
            max_tokens=self._max_tokens(request, len(ids), param),
            stop=list(request.stop) or None,
            stop_token_ids_hidden=eos or None,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos or None,
        )
        sampling = SamplingOptions(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        )
        return PreprocessedRequest(
            model=self.model,
            token_ids=ids,
            stop_conditions=stop,
            sampling_options=sampling,
            eos_token_ids=eos,
        )

    def _max_tokens(self, request: GenerationRequest, prompt: int, param: str) -> int:
        if not prompt:
            raise InvalidArgument(f"'{param}' gives no tokens.", param=param)
        room = self.context_length - prompt
        wanted = max(request.max_tokens or 0, request.min_tokens or 0)
        if room < max(wanted, 1):
            raise self._too_long(str(prompt), wanted or None, param)
        return request.max_tokens or room

    def _too_long(self, prompt: str, wanted: int | None, param: str) -> ContextLengthExceeded:
        asked = f" and {wanted} more were asked for" if wanted else ""
        return ContextLengthExceeded(
            f"This model's maximum context length is {self.context_length} tokens, but"
            f" '{param}' takes {prompt} tokens{asked}.",
            param=param,
        )


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(
        tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        cpu_time=time.thread_time,
    )


def _ready_strings(tokenizer: Tokenizer) -> Sequence[bytes | None]:
    """By id: what a token reads as where no character is cut before or in it, in JSON; None for
    those that show nothing, or are half of a character."""
    decoder = tokenizer.decoder()
    strings: list[bytes | None] = []
    for token in range(min(tokenizer.vocab_size, MAX_READY) if decoder.is_fresh else 0):
        text = decoder.push((token,))
        if decoder.is_fresh:
            string = json_string(text)
            strings.append(string if text and len(string) <= MAX_READY_SIZE else None)
        else:
            strings.append(None)
            decoder = tokenizer.decoder()
    return tuple(strings)


class OutputProcessor:
    """One answer's text, end and counts.

    After each push, ``finish_reason`` says whether the answer is over; pushing more is
    allowed and gives nothing. ``ended_early`` is then true when the engine has not said
    so itself (a stop string, or tokens beyond the end): it must be told to stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: PreprocessedRequest,
        ready: Sequence[bytes | None] = (),
    ) -> None:
        stop = request.stop_conditions
        #: By id, of the first ones: see :func:`_ready_strings`.
        self._ready = ready
        self._decoder = tokenizer.decoder()
        #: As the decoder says it; kept here, since each token asks for it.
        self._fresh = self._decoder.is_fresh
        self._scanner = StopScanner(stop.stop) if stop.stop else None
        self._hidden = frozenset(() if stop.ignore_eos else stop.stop_token_ids_hidden or ())
        self._min_tokens = stop.min_tokens or 0
        self._max_tokens = stop.max_tokens
        # Tokens up to which none can end the answer, or be hidden, but by its own number.
        self._plain_until = 0 if self._scanner else (stop.max_tokens or sys.maxsize) - 1
        # Set by the last token that the request allows. The engine usually says so too,
        # in the same item or the next, so the answer ends only then, or with a token more.
        self._full: OpenAIFinish | None = None
        self.prompt_tokens = len(request.token_ids)
        self.completion_tokens = 0
        #: Tokens of the prompt that the engine had in its cache; None: it has not said.
        self.cached_tokens: int | None = None
        self.finish_reason: OpenAIFinish | None = None
        self.ended_early = False

    @property
    def is_full(self) -> bool:
        """True when no token can come any more, whether or not the engine has said so."""
        return self._full is not None or self.finish_reason is not None

    @property
    def usage(self) -> CompletionUsage:
        """The counts so far. A token that ends the answer counts, though it is not shown."""
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=self._details,
        )

    @property
    def _details(self) -> PromptTokensDetails | None:
        if self.cached_tokens is None:
            return None
        # To a worker that took a request over, what was answered before is a part of the prompt.
        return PromptTokensDetails(cached_tokens=min(self.cached_tokens, self.prompt_tokens))

    def push(self, item: LLMEngineOutput) -> str:
        """The text that this item completes.

        Raises:
            Unknown: the item's finish reason is "error".
        """
        if item.completion_usage is not None:
            self._note_cached(item.completion_usage)
        if item.text is None:
            return self.push_ids(item.token_ids, item.finish_reason)
        # An engine that sends text with its ids has the last word on the text.
        return self._push(item.token_ids, item.finish_reason, item.text)

    def _note_cached(self, usage: CompletionUsage) -> None:
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def push_ids(self, ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """The text that these new ids complete; ``finish``: the engine's word that it is over.

        Raises:
            Unknown: ``finish`` is "error".
        """
        return self._push(ids, finish, None)

    def ready(self, token: int) -> bytes | None:
        """The next token as a JSON string, where that is known without a look at the others.

        None: nothing has happened; :meth:`push_ids` must be asked.
        """
        if self.completion_tokens >= self._plain_until or token in self._hidden:
            return None
        if not self._fresh or token < 0:
            return None
        try:
            text = self._ready[token]
        except IndexError:  # of a token behind the table
            return None
        if text is not None:
            self.completion_tokens += 1
        return text

    def flush(self) -> str:
        """What was held back, when the stream has ended without a finish reason.

        If all that was asked for had come, this sets ``finish_reason``; else it stays
        None, and the answer is incomplete.
        """
        if self.finish_reason is not None:
            return ""
        self.finish_reason, self._plain_until = self._full, 0
        return self._rest()

    def _push(self, ids: Sequence[int], finish: FinishReason | None, text: str | None) -> str:
        if self._ended():
            return ""
        reason = None if finish is None else openai_finish(finish)
        shown = self._show(ids) if text is None else self._show_text(ids, text)
        if reason is not None:
            self._end_told(reason)
        return shown + self._rest() if self._ended() else shown

    def _show(self, ids: Sequence[int]) -> str:
        if self._scanner is None:
            text = self._decoder.push(self._admit(ids))
            self._fresh = self._decoder.is_fresh
            return text
        # One at a time, so that the token that completes a stop string is the last one.
        return "".join([self._scan(self._scanner, token) for token in ids])

    def _scan(self, scanner: StopScanner, token: int) -> str:
        if self.finish_reason is not None:
            return ""
        text = self._decoder.push(self._admit((token,)))
        if self.completion_tokens <= self._min_tokens:
            return text  # too early to stop: not searched
        return self._search(scanner, text)

    def _show_text(self, ids: Sequence[int], text: str) -> str:
        if ids and self._full is not None:
            text = ""
        self._admit(ids)
        return text if self._scanner is None else self._search(self._scanner, text)

    def _search(self, scanner: StopScanner, text: str) -> str:
        text = scanner.push(text)
        if scanner.matched is not None:
            self._end_early("stop")
        return text

    def _admit(self, ids: Sequence[int]) -> Sequence[int]:
        """Count these ids; the ones of them that are to be shown."""
        if len(ids) == 1 and self._full is None and ids[0] not in self._hidden:
            self.completion_tokens += 1  # the common case, kept short
            if self.completion_tokens == self._max_tokens:
                self._full = "length"
            return ids
        return [token for token in ids if self._admit_one(token)]

    def _admit_one(self, token: int) -> bool:
        if self._full is not None:
            self._end_early(self._full)
            return False
        self.completion_tokens += 1
        if token in self._hidden and self.completion_tokens > self._min_tokens:
            self._full, self._plain_until = "stop", 0
            return False
        if self.completion_tokens == self._max_tokens:
            self._full = "length"
        return True

    def _end_early(self, reason: OpenAIFinish) -> None:
        if self.finish_reason is None:
            self.finish_reason, self.ended_early = reason, True
            self._plain_until = 0

    def _end_told(self, reason: OpenAIFinish) -> None:
        # A stop string in the engine's last item counts; so does a limit that was reached.
        self.finish_reason = self.finish_reason or self._full or reason
        self._plain_until = 0
        self.ended_early = False

    def _ended(self) -> bool:
        return self.finish_reason is not None

    def _rest(self) -> str:
        """What is held back, once nothing more comes. Nothing behind a stop string."""
        rest = self._decoder.flush()
        return rest if self._scanner is None else self._scanner.push(rest) + self._scanner.flush()
