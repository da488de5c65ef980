"""The part of the ``cyllama`` wheel that we use, typed, and its import.

The wheel ships neither stubs nor ``py.typed``. It is imported when a model is loaded and
not before: it takes time, and it is an optional dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from dynamo_trio.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INSTALL = "pip install 'dynamo-trio[llama]'"


class Handle(Protocol):
    """Memory of llama.cpp. A use after ``close`` kills the process."""

    def close(self) -> None: ...


class ModelParams(Protocol):
    """See ``llama_model_params``."""

    #: Told the fraction; False ends the load. What it raises is printed and ignored.
    progress_callback: Callable[[float], bool] | None


class ContextParams(Protocol):
    """See ``llama_context_params``."""

    n_ctx: int
    n_seq_max: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    kv_unified: bool
    flash_attn_type: int


class Vocab(Protocol):
    """The model's token ids."""

    n_vocab: int

    def is_eog(self, token_id: int) -> bool: ...


class Model(Handle, Protocol):
    """The weights."""

    n_ctx_train: int

    def get_vocab(self) -> Vocab: ...


class Batch(Handle, Protocol):
    """The tokens of one decode."""

    n_tokens: int

    def add(self, id: int, pos: int, seq_ids: Sequence[int], logits: bool) -> None: ...
    def reset(self) -> None: ...


class Context(Handle, Protocol):
    """The KV memory and the buffers of the computation."""

    n_ctx_seq: int
    #: True makes the running decode raise InterruptedError, and the next one until cleared.
    cancel: bool

    def install_cancel_callback(self) -> None: ...
    def decode(self, batch: Batch) -> None: ...
    def memory_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool: ...


class Sampler(Handle, Protocol):
    """A chain of filters that ends in a draw."""

    def add_greedy(self) -> None: ...
    def add_dist(self, seed: int) -> None: ...
    def add_temp(self, t: float) -> None: ...
    def add_top_k(self, k: int) -> None: ...
    def add_top_p(self, p: float, min_keep: int) -> None: ...
    def add_logit_bias(self, n_vocab: int, biases: list[tuple[int, float]]) -> None: ...

    #: ``idx`` counts within the batch, not among its outputs.
    def sample(self, ctx: Context, idx: int) -> int: ...


class Api(Protocol):
    """The module ``cyllama.llama.llama_cpp``."""

    def LlamaModelParams(self) -> ModelParams: ...
    def LlamaContextParams(self) -> ContextParams: ...
    def LlamaModel(self, path: str, params: ModelParams) -> Model: ...
    def LlamaContext(self, model: Model, params: ContextParams) -> Context: ...
    def LlamaBatch(self, *, n_tokens: int, embd: int, n_seq_max: int) -> Batch: ...
    def LlamaSamplerChainParams(self) -> object: ...
    def LlamaSampler(self, params: object) -> Sampler: ...
    def disable_logging(self) -> None: ...


def import_llama() -> Api:
    """Import it, and silence what llama.cpp would print on stderr.

    Raises:
        LoadError: it is not installed, or does not run on this machine.
    """
    try:
        module = importlib.import_module("cyllama.llama.llama_cpp")
    except ModuleNotFoundError as exc:
        raise LoadError(f"the llama engine needs cyllama: {INSTALL}") from exc
    except ImportError as exc:
        raise LoadError(f"cyllama is installed but cannot be used here: {exc}") from exc
    api = cast("Api", module)
    api.disable_logging()
    return api
