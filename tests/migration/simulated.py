"""A request, workers that answer it the same way, and a client that drives the machine.

The workers are simulated cores: each token is a function of the tokens before it. What a core does
not do (several choices, log probabilities, text of its own) is put around it here, as a function of
the tokens, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import attrs
from msgspec import structs

from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import DynamoException, NoWorker
from dynamo_trio.migration import Done, End, GoOn, Migration, MigrationLimits, Replay
from dynamo_trio.tokenizers import ByteTokenizer, OutputProcessor
from dynamo_trio.tokenizers.bytes_ import END_OF_TEXT
from dynamo_trio.wire.llm import (
    CompletionUsage,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo_trio.worker.serve import to_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dynamo_trio.engines import Delta
    from dynamo_trio.migration import Part
    from dynamo_trio.tokenizers.abc import TableDecoder

TOKENIZER: Final = ByteTokenizer()
EVERYTHING: Final = frozenset(Replay)
DEFAULTS: Final = MigrationLimits()
#: How long an undisturbed answer of most scenes is, in tokens.
LENGTH: Final = 24


class Letters:
    """Valid UTF-8 of one, two, three and four bytes, chosen by the byte before."""

    _BEGIN: Final[tuple[int, ...]] = (*b"abcdefgh ", 0xC3, 0xE2, 0xF0)
    _AFTER: Final = {0xC3: 0xA9, 0xE2: 0x82, 0x82: 0xAC, 0xF0: 0x9F, 0x9F: 0x98, 0x98: 0x80}

    def pick(self, draw: int, previous: int) -> int:
        following = self._AFTER.get(previous)
        if following is not None:
            return following
        return self._BEGIN[draw % len(self._BEGIN)]


@attrs.frozen
class Scene:
    """A request, and how its workers answer."""

    request: PreprocessedRequest
    #: One token in so many ends the answer; 0: none does.
    eos_every: int = 0
    #: The worker sends the token that ends the answer.
    sends_eos: bool = False
    #: The finish reason has an item of its own.
    apart: bool = False
    #: Tokens in an item.
    batch: int = 1
    #: The worker writes the text itself.
    text: bool = False

    @property
    def choices(self) -> int:
        return self.request.sampling_options.n or 1


def scene(
    prompt: bytes = b"Why is the sky blue?",
    *,
    max_tokens: int | None = LENGTH,
    min_tokens: int | None = None,
    stop: list[str] | None = None,
    n: int | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    **traits: Any,
) -> Scene:
    request = PreprocessedRequest(
        model="sim",
        token_ids=list(prompt),
        stop_conditions=StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids_hidden=[END_OF_TEXT],
        ),
        sampling_options=SamplingOptions(temperature=0.7 if seed else 0.0, n=n, seed=seed),
        output_options=OutputOptions(logprobs=logprobs),
    )
    return Scene(request, **traits)


# --- a worker ------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Running:
    """One choice at one worker."""

    part: int | None
    index: int | None
    seen: list[int]
    prompt: int
    decoder: TableDecoder
    sent: int = 0
    sum: float = 0.0
    ready: list[int] = attrs.field(factory=list)


def answer(scene: Scene, parts: Iterable[Part]) -> Iterator[tuple[int | None, LLMEngineOutput]]:
    """What a worker sends that nothing happens to: (index of the part, item)."""
    core = SimCore(SimSettings(vocabulary=Letters(), eos_every=scene.eos_every))
    running: dict[str, _Running] = {}
    for part in parts:
        sampling = part.request.sampling_options
        for k in range(sampling.n or 1):
            name = f"{part.index}.{k}"
            engine = to_engine(part.request, name)
            core.add(attrs.evolve(engine, seed=(engine.seed or 0) + k))
            index = k if (sampling.n or 1) > 1 else None
            seen = list(part.request.token_ids)
            running[name] = _Running(part.index, index, seen, len(seen), TOKENIZER.decoder())
    while core.has_work():
        for delta in core.step():
            entry = running[delta.request_id]
            for item in _items(scene, entry, delta):
                yield entry.part, item


def _items(scene: Scene, entry: _Running, delta: Delta) -> Iterator[LLMEngineOutput]:
    entry.ready += delta.token_ids
    if delta.finish_reason is None:
        if len(entry.ready) >= scene.batch:
            yield _item(scene, entry)
        return
    stopped = delta.finish_reason == "stop"
    if stopped and scene.sends_eos:
        entry.ready.append(END_OF_TEXT)
    reason = "eos" if stopped and scene.sends_eos else delta.finish_reason
    if scene.apart and entry.ready:
        yield _item(scene, entry)
    last = _item(scene, entry)
    usage = CompletionUsage(
        prompt_tokens=entry.prompt,
        completion_tokens=entry.sent,
        total_tokens=entry.prompt + entry.sent,
    )
    yield structs.replace(last, finish_reason=reason, completion_usage=usage)


def _item(scene: Scene, entry: _Running) -> LLMEngineOutput:
    tokens, entry.ready = entry.ready, []
    log_probs = [_log_prob(entry, token) for token in tokens]
    entry.sent += len(tokens)
    entry.sum += sum(log_probs)
    wanted = scene.request.output_options.logprobs is not None
    return LLMEngineOutput(
        token_ids=tokens,
        index=entry.index,
        log_probs=log_probs if wanted else None,
        cum_log_probs=entry.sum if wanted else None,
        text=entry.decoder.push(tokens) if scene.text else None,
    )


def _log_prob(entry: _Running, token: int) -> float:
    """A number that hangs on the token and its place in the whole."""
    entry.seen.append(token)
    return -((token * 31 + len(entry.seen) * 7) % 64) / 64


# --- what happens to it --------------------------------------------------------------------------


@attrs.frozen
class Cut:
    """The stream ends with ``error`` after so many items, or behind all of them.

    ``item``: it ends with this item in place of an error that the plane tells.
    """

    after: int
    error: DynamoException | None = None
    item: LLMEngineOutput | None = None


@attrs.define(eq=False)
class Client:
    """Drives the machine as the frontend is to. ``stream``: it shows each piece at once."""

    scene: Scene
    limits: MigrationLimits = DEFAULTS
    declared: frozenset[Replay] = EVERYTHING
    stream: bool = True
    #: How many instances there are.
    pool: int = 1000
    machine: Migration = attrs.field(init=False)
    outputs: list[OutputProcessor] = attrs.field(init=False)
    texts: list[str] = attrs.field(init=False)
    tokens: list[list[int]] = attrs.field(init=False)
    log_probs: list[list[float]] = attrs.field(init=False)
    sums: list[float | None] = attrs.field(init=False)
    told_usage: list[CompletionUsage | None] = attrs.field(init=False)
    decisions: list[GoOn | End | Done] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.machine = Migration(self.scene.request, self.limits, self.declared)
        self._begin()

    def _begin(self) -> None:
        n = self.scene.choices
        self.outputs = [OutputProcessor(TOKENIZER, self.scene.request) for _ in range(n)]
        self.texts, self.sums, self.told_usage = [""] * n, [None] * n, [None] * n
        self.tokens, self.log_probs = [[] for _ in range(n)], [[] for _ in range(n)]

    def run(self, *cuts: Cut) -> Client:
        """One cut for each attempt; whoever comes after them is not cut."""
        for instance, cut in enumerate(itertools.chain(cuts, itertools.repeat(None))):
            if instance >= self.pool:
                self.decisions.append(self.machine.nobody(NoWorker("no other worker")))
                return self
            assert self.machine.parts, "nobody is asked for nothing"
            self.machine.asks(instance)
            decision = self.machine.ended(self._attempt(cut))
            self.decisions.append(decision)
            if not isinstance(decision, GoOn):
                break
            if decision.afresh:
                self._begin()
        if isinstance(decision, Done):
            self._flush()
        return self

    @property
    def end(self) -> GoOn | End | Done:
        return self.decisions[-1]

    @property
    def seen(self) -> object:
        """All that the client can see, and what its bill says."""
        return (
            self.texts,
            [output.finish_reason for output in self.outputs],
            [output.usage for output in self.outputs],
            self.log_probs,
            self.sums,
        )

    def _attempt(self, cut: Cut | None) -> DynamoException | None:
        for count, (part, item) in enumerate(answer(self.scene, self.machine.parts)):
            if cut is not None and count >= cut.after:
                return self._cut(cut, part)
            error = self._feed(item, part)
            if error is not None or self._is_over:
                return error
        return None if cut is None else self._cut(cut, None)

    def _cut(self, cut: Cut, part: int | None) -> DynamoException | None:
        return cut.error if cut.item is None else self._feed(cut.item, part)

    @property
    def _is_over(self) -> bool:
        """A client that has found a stop string hangs up; others wait for the end."""
        over = all(output.finish_reason is not None for output in self.outputs)
        return over and any(output.ended_early for output in self.outputs)

    def _feed(self, item: LLMEngineOutput, part: int | None) -> DynamoException | None:
        item = self.machine.carry(item, part)
        at = item.index or 0
        output = self.outputs[at]
        was_over = output.finish_reason is not None
        try:
            text = output.push(item)
        except DynamoException as exc:
            return exc
        if not was_over:  # as long as the others run, it is read on
            self._note(item, at)
        self.texts[at] += text
        if text and self.stream:
            self.machine.touch()
        if output.finish_reason is not None:
            self.machine.finish(at)
        return None

    def _note(self, item: LLMEngineOutput, at: int) -> None:
        self.tokens[at] += item.token_ids
        self.log_probs[at] += item.log_probs or ()
        if item.cum_log_probs is not None:
            self.sums[at] = item.cum_log_probs
        if item.completion_usage is not None:
            self.told_usage[at] = item.completion_usage

    def _flush(self) -> None:
        for at, output in enumerate(self.outputs):
            self.texts[at] += output.flush()
