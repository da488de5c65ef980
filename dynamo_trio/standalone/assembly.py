"""From the configuration to the parts of a process. Nothing here waits or starts anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dynamo_trio.engines import CoreSpec, Limits, StepCore, make_core
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.vocabulary import AnyOf
from dynamo_trio.errors import FileUnusable
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.lifecycle import DrainPolicy, GraceMode, Timetable
from dynamo_trio.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.config import Config
    from dynamo_trio.engines.vocabulary import Vocabulary
    from dynamo_trio.tokenizers import Tokenizer


def timetable(config: Config) -> Timetable:
    """The limits of a one-process stop. No grace: nobody else routes to it. No callbacks."""
    return Timetable(
        grace=0.0,
        grace_mode=GraceMode(config.grace_mode),
        http_drain=config.http_drain,
        drain=config.drain,
        drain_policy=DrainPolicy(config.drain_policy),
        hook=config.callback_limit,
        hooks=0,
        fatal=config.fatal_limit,
        total=config.standalone_budget,
        killed_after=config.termination_grace,
    )


def http_limits(config: Config) -> HttpLimits:
    """The limits of the HTTP server."""
    return HttpLimits(
        max_connections=config.http_max_connections,
        head_time=config.http_header_timeout,
        body_time=config.http_body_timeout,
        body_bytes=config.body_limit,
        idle_time=config.http_idle_timeout,
        write_time=config.http_write_timeout,
    )


def engine_limits(config: Config, close: float) -> Limits:
    """The limits of the engine's calls; ``close`` in seconds."""
    return Limits(step=config.step_limit or math.inf, load=config.load_limit, close=close)


def model_name(config: Config, model_path: Path | None) -> str:
    """What clients call the model: the setting, else the file's name up to its first dot."""
    if config.model_name is not None:
        return config.model_name
    return "sim" if model_path is None else model_path.name.split(".")[0] or model_path.name


def tokenizer(config: Config, path: Path | None) -> Tokenizer:
    """The tokenizer of the model; a byte is a token where there is none. Blocks for a second.

    Raises:
        StartupError: the model cannot be used.
    """
    if config.engine == "llama" and path is not None and path.is_dir():
        raise FileUnusable(f"{path} is a folder; the llama engine needs a .gguf file")
    return load_tokenizer(path)


def build_core(config: Config, path: Path | None, name: str, tokenizer: Tokenizer) -> StepCore:
    """The engine's core, not loaded yet. Blocks for up to half a second.

    Raises:
        ConfigError: a setting that the engine needs is missing.
    """
    spec = CoreSpec(
        kind=config.engine,
        model=name,
        model_path=path,
        threads=config.engine_threads,
        max_running=config.max_running,
        context_tokens=config.context_tokens,
        itl_ms=config.itl_ms,
        prefill_ms=config.prefill_ms,
        load_ms=config.load_ms,
        kv_blocks=config.kv_blocks,
        vocab_size=tokenizer.vocab_size,
        vocabulary=_vocabulary(config, path, tokenizer),
        faults=[] if config.sim_fault is None else [Fault(config.sim_fault)],
        faults_after=config.sim_fault_after,
    )
    return make_core(spec)


def _vocabulary(config: Config, path: Path | None, tokenizer: Tokenizer) -> Vocabulary | None:
    """What a simulation on a real tokeniser writes: tokens that are words or parts of words."""
    if config.engine != "sim" or path is None:
        return None
    words = [i for i in range(tokenizer.vocab_size) if _is_word(tokenizer.decoder().push((i,)))]
    return AnyOf(words or range(tokenizer.vocab_size))


def _is_word(text: str) -> bool:
    return text.isascii() and text.strip(" ").isalpha()
