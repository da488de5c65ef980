"""From the configuration to the parts of a worker. Nothing here waits or starts anything."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.engines import CoreSpec, Limits, StepCore, make_core
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.vocabulary import AnyOf
from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dynamo_trio.config import Config
    from dynamo_trio.engines.vocabulary import Vocabulary
    from dynamo_trio.tokenizers import Tokenizer


def engine_limits(config: Config, close: float) -> Limits:
    """The limits of the engine's calls; ``close`` in seconds."""
    return Limits(
        step=config.step_limit or math.inf,
        load=config.load_limit,
        check=_check_limit(config),
        close=close,
        close_failed=config.health_close_limit or math.inf,
    )


def _check_limit(config: Config) -> float:
    """A check waits for the step that runs: who gives steps longer gives it to checks too."""
    limit = config.health_limit or math.inf
    if "step_limit" in config.sources and "health_limit" not in config.sources:
        return max(limit, config.step_limit or math.inf)
    return limit


@attrs.frozen(eq=False)
class Model:
    """What an engine is made from, and what its text is made with."""

    name: str
    #: A GGUF file or a Hugging Face folder; None: the engine needs none.
    path: Path | None
    tokenizer: Tokenizer
    context_tokens: int

    @classmethod
    def read(cls, config: Config, path: Path | None) -> Model:
        """The model at ``path``, as the settings want it. Blocks for a second.

        Raises:
            StartupError: it cannot be used.
        """
        with naming_setting(config):
            tokenizer = _tokenizer(config, path)
        return cls(model_name(config, path), path, tokenizer, config.context_tokens)


@contextmanager
def naming_setting(config: Config) -> Iterator[None]:
    """Let the errors of a model's files begin with the setting that named the model."""
    try:
        yield
    except (FileUnusable, LoadError) as exc:
        if (setting := config.sources.get("model_path")) is None:
            raise
        raise type(exc)(f"{setting}: {exc}") from exc


def model_name(config: Config, model_path: Path | None) -> str:
    """What clients call the model: the setting, else the file's name up to its first dot."""
    if config.model_name is not None:
        return config.model_name
    return "sim" if model_path is None else model_path.name.split(".")[0] or model_path.name


def _tokenizer(config: Config, path: Path | None) -> Tokenizer:
    """The tokenizer of the model; a byte is a token where there is none."""
    if config.engine == "llama" and path is not None and path.is_dir():
        raise FileUnusable(f"{path} is a folder; the llama engine needs a .gguf file")
    return load_tokenizer(path)


def build_core(config: Config, model: Model) -> StepCore:
    """The engine's core, not loaded yet. Blocks for up to half a second.

    Raises:
        ConfigError: a setting that the engine needs is missing.
    """
    spec = CoreSpec(
        kind=config.engine,
        model=model.name,
        model_path=model.path,
        threads=config.engine_threads,
        max_running=config.max_running,
        context_tokens=model.context_tokens,
        itl_ms=config.itl_ms,
        prefill_ms=config.prefill_ms,
        prefill_token_us=config.prefill_token_us,
        load_ms=config.load_ms,
        kv_blocks=config.kv_blocks,
        vocab_size=model.tokenizer.vocab_size,
        vocabulary=_vocabulary(config, model),
        faults=[] if config.sim_fault is None else [Fault(config.sim_fault)],
        faults_after=config.sim_fault_after,
    )
    return make_core(spec)


def _vocabulary(config: Config, model: Model) -> Vocabulary | None:
    """What a simulation on a real tokeniser writes: tokens that are words or parts of words."""
    if config.engine != "sim" or model.path is None:
        return None
    tokenizer = model.tokenizer
    words = [i for i in range(tokenizer.vocab_size) if _is_word(tokenizer.decoder().push((i,)))]
    return AnyOf(words or range(tokenizer.vocab_size))


def _is_word(text: str) -> bool:
    return text.isascii() and text.strip(" ").isalpha()
