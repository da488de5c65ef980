"""A model of llama.cpp in memory: how it gets there, and that it is freed once and in order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from dynamo_trio import errors
from dynamo_trio.engines.cyllama import import_llama
from dynamo_trio.tokenizers.gguf_file import check_gguf_file
from dynamo_trio.wire.gguf import BrokenGguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dynamo_trio.engines.cyllama import Api, Batch, Context, Handle, Model


@frozen(kw_only=True)
class LlamaSettings:
    """How the model is run.

    The KV memory is ``max_running * context_tokens`` cells, 23 KB each for the default
    model. ``batch_tokens`` is the most that one step works on: it bounds how long a
    long prompt delays the tokens of others (8 to 12 ms for each, one thread, default model).
    """

    model_path: Path
    model: str
    threads: int = 1
    max_running: int = 8
    #: Of one request. Cut to what the model was trained for.
    context_tokens: int = 2048
    batch_tokens: int = 128

    @property
    def step_tokens(self) -> int:
        """Room of one batch: every running request always fits."""
        return max(self.batch_tokens, self.max_running)


@define(eq=False)
class LlamaHandles:
    """What llama.cpp holds for us. Usable after :meth:`load`, gone after :meth:`close`."""

    settings: LlamaSettings
    _flag: threading.Event = field(factory=threading.Event, init=False)
    # Invariant: None before load and after close. Freed memory is never reachable: a use
    # after close would kill the process, an AssertionError does not.
    _api: Api | None = field(default=None, init=False)
    _model: Model | None = field(default=None, init=False)
    _context: Context | None = field(default=None, init=False)
    _batch: Batch | None = field(default=None, init=False)

    @property
    def api(self) -> Api:
        """The library."""
        assert self._api is not None, "the model is not loaded, or closed"
        return self._api

    @property
    def model(self) -> Model:
        """The weights."""
        assert self._model is not None, "the model is not loaded, or closed"
        return self._model

    @property
    def context(self) -> Context:
        """The KV memory."""
        assert self._context is not None, "the model is not loaded, or closed"
        return self._context

    @property
    def batch(self) -> Batch:
        """The tokens of one step; room for ``settings.step_tokens``."""
        assert self._batch is not None, "the model is not loaded, or closed"
        return self._batch

    def load(self, progress: Callable[[float], None]) -> None:
        """Map the file and make a context.

        Raises:
            FileUnusable: the file is missing or cannot be read.
            LoadError: llama.cpp cannot load it, was interrupted, or is not installed.
        """
        _check_file(self.settings.model_path)
        self._api = import_llama()
        self._model = self._load_model(self._api, progress)
        self._context = self._make_context(self._api, self._model)
        self._batch = self._api.LlamaBatch(n_tokens=self.settings.step_tokens, embd=0, n_seq_max=1)

    def _load_model(self, api: Api, progress: Callable[[float], None]) -> Model:
        params = api.LlamaModelParams()
        params.progress_callback = self._reporter(progress)
        path = self.settings.model_path
        try:
            return api.LlamaModel(str(path), params)
        except (ValueError, RuntimeError) as exc:
            if self._flag.is_set():
                raise errors.LoadError(f"loading {path} was interrupted") from exc
            raise errors.LoadError(
                f"{path} is a GGUF file, but not a model that llama.cpp can load: "
                "damaged, cut short, or of an unknown kind"
            ) from exc

    def _reporter(self, progress: Callable[[float], None]) -> Callable[[float], bool]:
        """Reports each percent once; ends the load when interrupted."""
        shown = -1

        def report(fraction: float) -> bool:
            nonlocal shown
            if int(fraction * 100) > shown:
                shown = int(fraction * 100)
                progress(fraction)
            return not self._flag.is_set()

        return report

    def _make_context(self, api: Api, model: Model) -> Context:
        s = self.settings
        params = api.LlamaContextParams()
        params.n_ctx = min(s.context_tokens, model.n_ctx_train) * s.max_running
        params.n_seq_max = s.max_running
        params.n_batch = params.n_ubatch = s.step_tokens
        params.n_threads = params.n_threads_batch = s.threads
        params.kv_unified = False
        params.flash_attn_type = 1
        try:
            context = api.LlamaContext(model, params)
        except (ValueError, RuntimeError, MemoryError) as exc:
            raise errors.LoadError(
                f"no memory for a context of {params.n_ctx} tokens: "
                "lower the context or the number of running requests"
            ) from exc
        context.install_cancel_callback()
        return context

    def interrupt(self) -> None:
        """Make the running decode (or the next) or the load give up. Safe from any thread."""
        self._flag.set()
        if (context := self._context) is not None:
            context.cancel = True

    def clear_interrupt(self) -> None:
        """Allow further decodes."""
        self._flag.clear()
        self.context.cancel = False

    def close(self) -> None:
        """Free what there is: each needs the ones after it."""
        handles: list[Handle | None] = [self._batch, self._context, self._model]
        self._batch = self._context = self._model = self._api = None
        for handle in handles:
            if handle is not None:
                handle.close()


def _check_file(path: Path) -> None:
    """llama.cpp aborts on some broken files, and the wheel does not tell missing from denied."""
    try:
        check_gguf_file(path)
    except FileNotFoundError as exc:
        raise errors.FileUnusable(f"there is no model file {path}") from exc
    except OSError as exc:
        raise errors.FileUnusable(f"the model file {path} cannot be read: {exc.strerror}") from exc
    except BrokenGguf as exc:
        raise errors.LoadError(f"{path} is no GGUF model, or a damaged one: {exc}") from exc
