"""A simulated core: no model, yet answers, load and faults like those of a real one.

Theory of operation
-------------------
Each token is a pure function of the tokens before it (:mod:`dynamo_trio.engines.vocabulary`),
so an answer that is cut anywhere and continued on another simulated core is the same
answer. Temperature and seed do not break that: with a temperature above 0 the seed enters
the function, and without a seed it counts as 0.

Scheduling is continuous batching: a step first lets waiting requests in, as long as there
are places and KV blocks, then advances every running one by a token. A request reserves
the blocks for its prompt and its whole ``max_tokens`` when it is let in, so nobody is ever
preempted. The core never sleeps: a step *owes* ``itl_ms`` if a request was past its first
token, plus ``prefill_ms`` for each prompt that it let in, and the host sleeps that. So n
tokens of a lone request take ``prefill_ms + (n - 1) * itl_ms``.

Full blocks stay when their request ends (:mod:`dynamo_trio.engines.prefix_cache`), in what
nobody has reserved: what is reserved, and what is kept beside it, are never more than
``kv_blocks``, and whoever comes in takes room from the blocks that have been idle longest.
So the cache changes neither answers nor who is let in. It changes the time of a prompt only
as far as that depends on its tokens: ``prefill_token_us`` is owed for each that was not in
the cache, ``prefill_ms`` in any case.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from dynamo_trio import errors
from dynamo_trio.engines.faults import Fault, FaultBox
from dynamo_trio.engines.prefix_cache import Prefix, PrefixCache
from dynamo_trio.engines.protocol import (
    CoreInfo,
    Delta,
    FinishReason,
    KvEvent,
    Request,
    Stats,
)
from dynamo_trio.engines.vocabulary import EMPTY, Syllables, Vocabulary, fold, mix
from dynamo_trio.engines.waiting import WaitingLine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@frozen(kw_only=True)
class SimSettings:
    """How the simulated core behaves. Times are milliseconds, as their flags have them."""

    model: str = "sim"
    #: Between two tokens of a running request.
    itl_ms: float = 0.0
    #: For each prompt, whatever its length.
    prefill_ms: float = 0.0
    #: Microseconds for each token of a prompt that is not in the cache.
    prefill_token_us: float = 0.0
    load_ms: float = 0.0
    max_running: int = 256
    context_tokens: int = 8192
    kv_block_tokens: int = 16
    kv_blocks: int = 131_072
    vocab_size: int | None = None
    vocabulary: Vocabulary = field(factory=Syllables)
    #: Mean length of an answer that ends by itself; 0: answers end at max_tokens only.
    eos_every: int = 256
    #: Stuck faults owe seconds instead of blocking; for an inline host.
    virtual: bool = False


@define(eq=False)
class _Running:
    request: Request
    blocks: int
    state: int
    previous: int
    salt: int
    prefix: Prefix
    #: Tokens of the prompt that were in the cache.
    cached: int
    generated: int = 0


class SimCore:
    """See the head of this module. ``faults`` strike in the first call of their kind."""

    def __init__(
        self, settings: SimSettings | None = None, *, faults: Sequence[Fault] = ()
    ) -> None:
        self.settings = settings or SimSettings()
        self.faults = FaultBox(virtual=self.settings.virtual)
        for fault in faults:
            self.faults.arm(fault)
        self._waiting = WaitingLine()
        self._running: dict[str, _Running] = {}
        # Invariant: the sum of `blocks` over _running. With the cache's idle blocks it is at
        # most settings.kv_blocks.
        self._blocks_used = 0
        self._cache = PrefixCache(self.settings.kv_block_tokens)
        self._owed = 0.0
        # Never set back: an engine that interrupts its core is about to end.
        self._interrupted = False

    def arm(self, fault: Fault, after: int | None = 0) -> None:
        """Let ``fault`` strike after ``after`` more calls of its kind; None: when set off."""
        self.faults.arm(fault, after)

    @property
    def info(self) -> CoreInfo:
        """What the settings say."""
        s = self.settings
        return CoreInfo(
            model=s.model,
            context_tokens=s.context_tokens,
            max_running=s.max_running,
            kv_block_tokens=s.kv_block_tokens,
            kv_blocks_total=s.kv_blocks,
            vocab_size=s.vocab_size,
            kv_events=True,
            health_check=True,
        )

    def load(self, progress: Callable[[float], None]) -> None:
        """Owe ``load_ms``, or commit a fault."""
        self._owed = self.settings.load_ms / 1000
        self.faults.strike("load")
        progress(1.0)

    def add(self, request: Request) -> None:
        """Let a request wait; one that could never be let in is rejected."""
        self._owed = 0.0
        if (needed := self._blocks(request)) > self.settings.kv_blocks:
            raise errors.RequestRejected(
                f"the request needs {needed} KV blocks; there are {self.settings.kv_blocks}"
            )
        self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Forget a request, waiting or running."""
        self._owed = 0.0  # of the step before; this turn may have none
        if not self._waiting.remove(request_id) and request_id in self._running:
            self._free(request_id)

    def step(self) -> list[Delta]:
        """One token for each running request, after letting in who fits."""
        self._owed = 0.0
        self.faults.strike("step")
        decoding = bool(self._running)
        self._owed = self._admit() + decoding * self.settings.itl_ms / 1000
        return [self._advance(entry) for entry in list(self._running.values())]

    def has_work(self) -> bool:
        """Whether anybody runs or waits."""
        return bool(self._running or self._waiting)

    def stats(self) -> Stats:
        """The load at this moment."""
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=self._blocks_used,
            kv_blocks_total=self.settings.kv_blocks,
        )

    def take_kv_events(self) -> list[KvEvent]:
        """Blocks that were filled, and blocks that had to make room."""
        return self._cache.take_events()

    def owed_seconds(self) -> float:
        """The pace of the last call; endless while a virtual fault holds it."""
        if self.faults.stuck is not None:
            return math.inf
        return 0.0 if self._interrupted else self._owed

    def interrupt(self) -> None:
        """End the pacing and what else can be interrupted."""
        self._interrupted = True
        self.faults.interrupt()

    def check_health(self) -> None:
        """Well, unless a fault was set off."""
        self._owed = 0.0
        self.faults.strike("check")

    def close(self) -> None:
        """Forget everything. Its children stay, if it was told to leak them."""
        self._owed = 0.0
        self.faults.strike("close")
        self._running.clear()

    # --- scheduling -----------------------------------------------------------------

    def _blocks(self, request: Request) -> int:
        return -(-(len(request.token_ids) + request.limit) // self.settings.kv_block_tokens)

    def _admit(self) -> float:
        """Let in who fits, in order; returns the seconds that their prompts take."""
        owed = 0.0
        while (request := self._waiting.peek()) is not None and self._fits(request):
            owed += self._prefill(self._start(self._waiting.pop()))
        return owed

    def _prefill(self, entry: _Running) -> float:
        computed = len(entry.request.token_ids) - entry.cached
        return self.settings.prefill_ms / 1e3 + computed * self.settings.prefill_token_us / 1e6

    def _fits(self, request: Request) -> bool:
        room = self.settings.kv_blocks - self._blocks_used
        return len(self._running) < self.settings.max_running and self._blocks(request) <= room

    def _start(self, request: Request) -> _Running:
        blocks = self._blocks(request)
        room = self.settings.kv_blocks - self._blocks_used - blocks
        prefix, cached = self._cache.enter(request.token_ids, room)
        entry = _Running(
            request=request,
            blocks=blocks,
            prefix=prefix,
            cached=cached,
            state=fold(EMPTY, request.token_ids),
            previous=request.token_ids[-1],
            salt=(request.seed or 0) if request.temperature > 0 else 0,
        )
        self._running[request.request_id] = entry
        self._blocks_used += entry.blocks
        return entry

    def _free(self, request_id: str) -> None:
        entry = self._running.pop(request_id)
        self._blocks_used -= entry.blocks
        self._cache.leave(entry.prefix)

    def _advance(self, entry: _Running) -> Delta:
        token_id, reason = self._next(entry)
        request_id = entry.request.request_id
        tokens = () if token_id is None else (token_id,)
        if reason is None:
            return Delta(request_id, tokens)
        self._free(request_id)
        return Delta(request_id, tokens, reason, cached_tokens=entry.cached)

    def _next(self, entry: _Running) -> tuple[int | None, FinishReason | None]:
        request = entry.request
        draw = mix(entry.state, entry.salt)
        may_stop = entry.generated >= request.min_tokens
        if may_stop and not request.ignore_eos and self._ends(draw):
            return None, "stop"
        token_id = self.settings.vocabulary.pick(draw, entry.previous)
        if may_stop and token_id in request.stop_token_ids:
            return None, "stop"
        entry.state = fold(entry.state, (token_id,))
        entry.previous = token_id
        entry.generated += 1
        self._cache.grow(entry.prefix, token_id)
        return token_id, "length" if entry.generated == request.limit else None

    def _ends(self, draw: int) -> bool:
        every = self.settings.eos_every
        return every > 0 and (draw >> 32) % every == 0
