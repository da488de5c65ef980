"""Settings of a worker's model and of the engine that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import attrs

from dynamo_trio.config.names import EndpointRule, WordsRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Choice, FilePath, Integer, Seconds, Text, milliseconds

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.wire.names import EndpointId

#: Dynamo's words for what a model can be asked for, as far as it is served here.
ENDPOINT_TYPES = ("chat", "completions")

EngineKind = Literal["llama", "sim"]
SimFault = Literal[
    "die",
    "raise",
    "hang",
    "stall",
    "leak-child",
    "load-fail",
    "load-hang",
    "load-stall",
    "hang-close",
]


@attrs.frozen(kw_only=True, slots=False)
class ModelTable:
    """The model, its endpoint and its engine."""

    endpoint: EndpointId | None = optional(
        EndpointRule(),
        group=Group.ENDPOINT,
        env="DYN_ENDPOINT",
        help="Full name of the worker's endpoint; without it, dyn://NAMESPACE.backend.generate.",
    )
    model_name: str | None = optional(
        Text(metavar="NAME"),
        group=Group.ENDPOINT,
        env="DYN_MODEL_NAME",
        help="Name that clients use for the model; without it, the model's own name.",
    )
    model_path: Path | None = optional(
        FilePath(),
        group=Group.MODEL,
        env="DYN_MODEL_PATH",
        help="The model: a GGUF file for llama, a Hugging Face folder for the simulated engine."
        " Without it, llama takes the default model, fetched on first use. To a frontend: a local"
        " copy of the model's files, for those that it cannot have from the worker.",
    )
    endpoint_types: tuple[str, ...] = option(
        ENDPOINT_TYPES,
        WordsRule(ENDPOINT_TYPES),
        group=Group.SERVE,
        env="DYN_ENDPOINT_TYPES",
        help="What the model is offered for by frontends, separated by commas.",
    )
    engine_request_limit: int | None = optional(
        Integer(1, 1_000_000),
        group=Group.SERVE,
        env="DYN_ENGINE_REQUEST_LIMIT",
        help="Requests that an endpoint works on at once; further ones wait in a short queue, and"
        " beyond that are refused as overloaded, which lets their frontend try another worker.",
    )
    request_queue_limit: int = option(
        16,
        Integer(0, 1_000_000),
        group=Group.SERVE,
        env="DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        help="Requests that may wait for their turn at an endpoint with DYN_ENGINE_REQUEST_LIMIT.",
    )

    # --- engine --------------------------------------------------------------

    engine: EngineKind = option(
        "llama",
        Choice[EngineKind](("llama", "sim")),
        group=Group.ENGINE,
        env="DYN_TRIO_ENGINE",
        help="What generates: llama.cpp on a real model, or a simulation that needs none.",
    )
    max_running: int = option(
        8,
        Integer(1, 4096),
        group=Group.ENGINE,
        env="DYN_TRIO_MAX_RUNNING",
        help="Requests that the engine runs at once; further ones queue.",
    )
    context_tokens: int = option(
        2048,
        Integer(16, 10_000_000, unit="tokens"),
        group=Group.ENGINE,
        env="DYN_TRIO_CONTEXT_TOKENS",
        help="Room of one request, prompt and answer together.",
    )
    engine_threads: int = option(
        1,
        Integer(1, 1024),
        group=Group.ENGINE,
        env="DYN_TRIO_ENGINE_THREADS",
        help="CPU threads of the llama engine.",
    )
    load_limit: float = option(
        600.0,
        Seconds(),
        group=Group.ENGINE,
        env="DYN_TRIO_ENGINE_LOAD_TIMEOUT_SECS",
        help="Limit of loading the model.",
    )
    step_limit: float = option(
        30.0,
        Seconds(),
        group=Group.ENGINE,
        env="DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS",
        help="Limit of one engine step; an engine that exceeds it is hung, and the process ends."
        " 0: no limit.",
    )

    health_interval: float = option(
        2.0,
        Seconds(),
        group=Group.ENGINE,
        env="DYN_ENGINE_HEALTH_CHECK_INTERVAL",
        help="Time between two health checks of the engine. 0: it is not checked.",
    )
    health_limit: float = option(
        30.0,
        Seconds(),
        group=Group.ENGINE,
        env="DYN_ENGINE_HEALTH_CHECK_TIMEOUT",
        help="Limit of one health check, the wait for the step that runs included; an engine that"
        " exceeds it is hung, and the process ends. 0: no limit.",
    )
    health_close_limit: float = option(
        30.0,
        Seconds(),
        group=Group.ENGINE,
        env="DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT",
        help="Limit of closing an engine that has died or was hung, within that of the whole stop."
        " 0: none of its own.",
    )

    # --- the simulated engine ------------------------------------------------

    itl_ms: float = option(
        10.0,
        milliseconds(),
        group=Group.SIM,
        env="DYN_TRIO_ITL_MS",
        help="Time between two tokens of a request.",
    )
    prefill_ms: float = option(
        0.0,
        milliseconds(),
        group=Group.SIM,
        env="DYN_TRIO_PREFILL_MS",
        help="Time that a prompt takes before the first token.",
    )
    prefill_token_us: float = option(
        0.0,
        Seconds(unit="us", metavar="US", maximum=1_000_000),
        group=Group.SIM,
        env="DYN_TRIO_PREFILL_TOKEN_US",
        help="Time that each token of a prompt takes besides, in microseconds, unless it is in"
        " the simulated KV cache.",
    )
    kv_blocks: int = option(
        4096,
        Integer(1, 100_000_000, unit="blocks"),
        group=Group.SIM,
        env="DYN_TRIO_KV_BLOCKS",
        help="Size of the simulated KV cache, in blocks of 16 tokens.",
    )
    load_ms: float = option(
        0.0,
        milliseconds(),
        group=Group.SIM,
        env="DYN_TRIO_LOAD_MS",
        help="Time that loading the simulated model takes.",
    )
    sim_fault: SimFault | None = optional(
        Choice[SimFault](get_args(SimFault)),
        group=Group.SIM,
        env="DYN_TRIO_SIM_FAULT",
        help="A fault that the simulated engine commits, once: SIGUSR2 sets it off, in the next"
        " step or health check, or --sim-fault-after does. One of loading waits for neither.",
    )
    sim_fault_after: int | None = optional(
        Integer(0, 1_000_000_000, unit="calls"),
        group=Group.SIM,
        env="DYN_TRIO_SIM_FAULT_AFTER",
        help="Calls (steps, for most faults) that go well before the fault strikes; without it,"
        " the fault waits for SIGUSR2.",
    )
