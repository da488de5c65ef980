"""The engine cores by name, made from plain settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dynamo_trio.engines.faults import Fault
    from dynamo_trio.engines.protocol import StepCore
    from dynamo_trio.engines.vocabulary import Vocabulary

#: The names that :func:`make_core` knows.
KINDS = ("llama", "sim")


@frozen(kw_only=True)
class CoreSpec:
    """What a core is made from. Settings that a kind does not have are ignored by it.

    ``model`` is the name shown; ``threads`` and ``model_path`` concern ``llama``, all
    below ``context_tokens`` concern ``sim``. ``vocabulary`` None writes readable bytes.
    """

    kind: str
    model: str = ""
    model_path: Path | None = None
    threads: int = 1
    max_running: int = 8
    #: Of one request, prompt and answer together.
    context_tokens: int = 2048
    itl_ms: float = 0.0
    prefill_ms: float = 0.0
    prefill_token_us: float = 0.0
    load_ms: float = 0.0
    kv_blocks: int = 4096
    vocab_size: int | None = None
    vocabulary: Vocabulary | None = None
    faults: Sequence[Fault] = ()
    #: Calls that go well before the faults strike; None: they wait to be set off.
    faults_after: int | None = 0
    #: The core will run on an inline host.
    virtual: bool = False


def make_core(spec: CoreSpec) -> StepCore:
    """A core that is not loaded yet.

    Raises:
        ConfigError: no such kind, or a setting that it needs is missing.
    """
    match spec.kind:
        case "sim":
            return _make_sim(spec)
        case "llama":
            return _make_llama(spec)
        case kind:
            raise ConfigError(f"there is no engine {kind!r}; choose one of {', '.join(KINDS)}")


def _make_sim(spec: CoreSpec) -> StepCore:
    from dynamo_trio.engines.sim import SimCore, SimSettings
    from dynamo_trio.engines.vocabulary import Syllables

    settings = SimSettings(
        model=spec.model or "sim",
        itl_ms=spec.itl_ms,
        prefill_ms=spec.prefill_ms,
        prefill_token_us=spec.prefill_token_us,
        load_ms=spec.load_ms,
        kv_blocks=spec.kv_blocks,
        max_running=spec.max_running,
        context_tokens=spec.context_tokens,
        vocab_size=spec.vocab_size,
        vocabulary=spec.vocabulary or Syllables(),
        virtual=spec.virtual,
    )
    core = SimCore(settings)
    for fault in spec.faults:
        core.arm(fault, spec.faults_after)
    return core


def _make_llama(spec: CoreSpec) -> StepCore:
    from dynamo_trio.engines.llama import LlamaCore
    from dynamo_trio.engines.llama_handles import LlamaSettings

    if spec.model_path is None:
        raise ConfigError("the llama engine needs a model file")
    return LlamaCore(
        LlamaSettings(
            model_path=spec.model_path,
            model=spec.model or spec.model_path.stem,
            threads=spec.threads,
            max_running=spec.max_running,
            context_tokens=spec.context_tokens,
        )
    )
