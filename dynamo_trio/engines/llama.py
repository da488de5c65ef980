"""llama.cpp as an engine core, through the ``cyllama`` wheel's low-level interface.

Theory of operation
-------------------
Each running request owns one *slot*: a sequence of llama.cpp with its own part of the
KV memory (``kv_unified`` off), so what one request generates does not depend on who runs
beside it. A step builds one batch: first the last token of each request that is
generating, then as much of the waiting prompts as fits. It decodes the batch (the GIL is
released meanwhile) and draws one token for each request whose logits are ready.

``interrupt`` makes the running decode give up. llama.cpp has then done part of the batch,
so every request of that batch ends with an error.

One thread is the default: with more threads than free cores, those of llama.cpp wait for
each other by spinning and the whole slows down tenfold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from dynamo_trio import errors
from dynamo_trio.engines.llama_handles import LlamaHandles, LlamaSettings
from dynamo_trio.engines.protocol import CoreInfo, Delta, FinishReason, Request, Stats
from dynamo_trio.engines.sampling import Drawer
from dynamo_trio.engines.waiting import WaitingLine

if TYPE_CHECKING:
    from collections.abc import Callable

#: llama.cpp has no blocks; for the load reports its cells are counted in blocks of this many.
BLOCK = 16


@define(eq=False)
class _Slot:
    """A running request and its sequence."""

    request: Request
    seq: int
    drawer: Drawer
    #: Tokens of the prompt that are in the KV memory.
    prefilled: int = 0
    generated: int = 0
    #: The last token generated; it is not in the KV memory yet.
    last: int = -1

    @property
    def cells(self) -> int:
        """KV cells in use, which is also the position of ``last``."""
        return self.prefilled + max(self.generated - 1, 0)


class LlamaCore:
    """See the head of this module."""

    def __init__(self, settings: LlamaSettings) -> None:
        self.settings = settings
        self._handles = LlamaHandles(settings)
        self._info: CoreInfo | None = None
        self._vocab_size = 0
        self._eog: frozenset[int] = frozenset()
        self._waiting = WaitingLine()
        self._slots: dict[str, _Slot] = {}
        # Invariant: the sequences that no slot owns; the KV memory holds nothing of theirs.
        self._free_seqs = list(range(settings.max_running))

    @property
    def info(self) -> CoreInfo:
        """What the loaded model can do."""
        assert self._info is not None, "known only once the model is loaded"
        return self._info

    def load(self, progress: Callable[[float], None]) -> None:
        """Load the model; see :meth:`LlamaHandles.load`."""
        self._handles.load(progress)
        vocab = self._handles.model.get_vocab()
        self._vocab_size = vocab.n_vocab
        self._eog = frozenset(i for i in range(vocab.n_vocab) if vocab.is_eog(i))
        s, trained = self.settings, self._handles.model.n_ctx_train
        # llama.cpp rounds a sequence's part up; what was asked for is what is promised.
        context_tokens = min(s.context_tokens, trained, self._handles.context.n_ctx_seq)
        self._info = CoreInfo(
            model=s.model,
            context_tokens=context_tokens,
            max_running=s.max_running,
            kv_block_tokens=BLOCK,
            kv_blocks_total=_blocks(context_tokens) * s.max_running,
            step_tokens=s.step_tokens,
            vocab_size=vocab.n_vocab,
        )

    def add(self, request: Request) -> None:
        """Let a request wait for a slot."""
        self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its sequence."""
        if not self._waiting.remove(request_id) and request_id in self._slots:
            self._free(self._slots[request_id])

    def has_work(self) -> bool:
        """Whether anybody runs or waits."""
        return bool(self._slots or self._waiting)

    def stats(self) -> Stats:
        """The load at this moment."""
        return Stats(
            running=len(self._slots),
            waiting=len(self._waiting),
            kv_blocks_used=sum(_blocks(slot.cells) for slot in self._slots.values()),
            kv_blocks_total=self.info.kv_blocks_total,
        )

    def owed_seconds(self) -> float:
        """Nothing: this core really works."""
        return 0.0

    def interrupt(self) -> None:
        """Make the running decode or load give up."""
        self._handles.interrupt()

    def close(self) -> None:
        """Free everything, also after a load that failed half-way."""
        for slot in self._slots.values():
            slot.drawer.close()
        self._slots.clear()
        self._waiting = WaitingLine()
        self._handles.close()

    # --- a step ---------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Fill a batch, decode it, draw a token for each request that it completes."""
        while self._free_seqs and self._waiting:
            self._start(self._waiting.pop())
        self._handles.batch.reset()
        ready = self._fill_decode()
        decoding = [slot for slot, _ in ready]
        prefilling = self._fill_prefill(ready)
        try:
            self._handles.context.decode(self._handles.batch)
        except (InterruptedError, ValueError) as exc:
            return self._drop(decoding + prefilling, exc)
        return [self._draw(slot, index) for slot, index in ready]

    def _start(self, request: Request) -> None:
        drawer = Drawer(self._handles.api, request, self._vocab_size, self._eog)
        self._slots[request.request_id] = _Slot(request, self._free_seqs.pop(), drawer)

    def _fill_decode(self) -> list[tuple[_Slot, int]]:
        """Batch the last token of each generating request. Returns their batch indices."""
        generating = [slot for slot in self._slots.values() if slot.generated]
        for slot in generating:
            self._handles.batch.add(slot.last, slot.cells, [slot.seq], True)
        return [(slot, index) for index, slot in enumerate(generating)]

    def _fill_prefill(self, ready: list[tuple[_Slot, int]]) -> list[_Slot]:
        """Batch as much of the prompts as fits; prompts that are complete become ready."""
        batch = self._handles.batch
        touched: list[_Slot] = []
        for slot in self._slots.values():
            room = self.settings.step_tokens - batch.n_tokens
            if slot.generated or not room:
                continue
            touched.append(slot)
            if self._prefill(slot, room):
                ready.append((slot, batch.n_tokens - 1))
        return touched

    def _prefill(self, slot: _Slot, room: int) -> bool:
        """Batch the next part of a prompt; True if it was the last part."""
        prompt = slot.request.token_ids
        begin = slot.prefilled
        slot.prefilled = min(begin + room, len(prompt))
        for position in range(begin, slot.prefilled):
            is_last = position == len(prompt) - 1
            self._handles.batch.add(prompt[position], position, [slot.seq], is_last)
        return slot.prefilled == len(prompt)

    def _draw(self, slot: _Slot, index: int) -> Delta:
        request = slot.request
        token_id = slot.drawer.draw(self._handles.context, index, slot.generated)
        if self._ends(slot, token_id):
            return self._finish(slot, (), "stop")
        slot.generated += 1
        slot.last = token_id
        if slot.generated == request.limit:
            return self._finish(slot, (token_id,), "length")
        return Delta(request.request_id, (token_id,))

    def _ends(self, slot: _Slot, token_id: int) -> bool:
        request = slot.request
        is_end = token_id in self._eog and not request.ignore_eos
        may_end = slot.generated >= request.min_tokens
        return may_end and (is_end or token_id in request.stop_token_ids)

    def _finish(self, slot: _Slot, token_ids: tuple[int, ...], reason: FinishReason) -> Delta:
        self._free(slot)
        return Delta(slot.request.request_id, token_ids, reason)

    def _free(self, slot: _Slot) -> None:
        del self._slots[slot.request.request_id]
        slot.drawer.close()
        self._handles.context.memory_seq_rm(slot.seq, -1, -1)
        self._free_seqs.append(slot.seq)

    def _drop(self, slots: list[_Slot], cause: Exception) -> list[Delta]:
        """End every request of a batch that was decoded in part, or not at all."""
        self._handles.clear_interrupt()
        return [self._failed(slot, cause) for slot in slots]

    def _failed(self, slot: _Slot, cause: Exception) -> Delta:
        self._free(slot)
        error = errors.EngineShutdown("the step of this request was interrupted")
        error.__cause__ = cause
        return Delta(slot.request.request_id, (), "error", error)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
