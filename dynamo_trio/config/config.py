"""The configuration of a process: one frozen object, checked once, made from flags and variables.

This class is the only table of settings. Each field states its variable, its rule, its default
and its help text; the flag's name follows from the variable's (``DYN_HTTP_PORT`` is
``--http-port``, ``DYN_TRIO_GRACE_MODE`` is ``--grace-mode``). Names that begin with ``DYN_TRIO_``
are ours, every other one is NVIDIA Dynamo's and means what it means there. Nothing else in the
package reads the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self, get_args

import attrs

from dynamo_trio.config import load
from dynamo_trio.config.names import (
    EndpointRule,
    LogFilter,
    LogFilterRule,
    NamespaceRule,
)
from dynamo_trio.config.option import Group, option, optional, options_of
from dynamo_trio.config.rules import (
    Boolean,
    Choice,
    FilePath,
    Integer,
    Seconds,
    Text,
    milliseconds,
)
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: What a pod's termination grace period must leave between our last act and SIGKILL, in seconds.
KILL_MARGIN = 3.0

DrainPolicy = Literal["auto", "finish", "migrate"]
GraceMode = Literal["auto", "fixed"]
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


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where fetched models are kept: the XDG cache folder."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(environ.get("XDG_CACHE_HOME") or Path(home, ".cache"), "dynamo_trio")


def _no_color(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("NO_COLOR"))


@attrs.frozen(kw_only=True)
class Config:
    """All settings of a process. Times are seconds, floats; 0 means at once; None means not set.

    Raises ValueError when a field breaks its rule; :meth:`from_args_and_env` raises
    :exc:`~dynamo_trio.errors.ConfigError` instead and names the flag or variable.
    """

    # --- program ---------------------------------------------------------------
    print_config: bool = option(
        False,
        Boolean(),
        group=Group.PROGRAM,
        flag="--print-config",
        help="Print every setting with its value and where it came from, then exit.",
    )
    ask: str | None = optional(
        Text(),
        group=Group.PROGRAM,
        flag="--ask",
        help="Start, ask this one question, print the answer, and stop again. The exit code is 1"
        " if the answer did not complete.",
    )

    # --- the HTTP front ----------------------------------------------------------
    http_host: str = option(
        "127.0.0.1",
        Text(metavar="HOST"),
        group=Group.HTTP,
        env="DYN_HTTP_HOST",
        help="Address to listen on. 0.0.0.0 is every interface, which is Dynamo's default.",
    )
    http_port: int = option(
        8000,
        Integer(0, 65535, metavar="PORT"),
        group=Group.HTTP,
        env="DYN_HTTP_PORT",
        help="Port to listen on; 0 takes any free one.",
    )
    http_max_connections: int = option(
        4096,
        Integer(1, 1_000_000),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_MAX_CONNECTIONS",
        help="Connections open at once; further ones wait to be accepted.",
    )
    http_header_timeout: float = option(
        10.0,
        Seconds(),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_HEADER_TIMEOUT_SECS",
        help="Time for a request's headers to arrive, from its first byte.",
    )
    http_body_timeout: float = option(
        60.0,
        Seconds(),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_BODY_TIMEOUT_SECS",
        help="Time for a request's body to arrive, from the end of its headers.",
    )
    http_write_timeout: float = option(
        30.0,
        Seconds(),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_WRITE_TIMEOUT_SECS",
        help="Time that a client may leave sent data unread before its connection is cut.",
    )
    http_idle_timeout: float = option(
        75.0,
        Seconds(),
        group=Group.HTTP,
        env="DYN_TRIO_HTTP_IDLE_TIMEOUT_SECS",
        help="Time that a connection may stay open without a request.",
    )
    body_limit_mb: int = option(
        192,
        Integer(1, 1_000_000, unit="MiB", metavar="MIB"),
        group=Group.HTTP,
        env="DYN_HTTP_BODY_LIMIT_MB",
        help="Largest request body; a larger one is answered with 413.",
    )
    overload_status: int = option(
        529,
        Integer(200, 999, metavar="STATUS"),
        group=Group.HTTP,
        env="DYN_HTTP_OVERLOAD_STATUS_CODE",
        help="HTTP status that says that every worker is full.",
    )

    # --- stopping, every process ---------------------------------------------------
    termination_grace: float | None = optional(
        Seconds(minimum=5.0),
        group=Group.STOP,
        env="DYN_TRIO_TERMINATION_GRACE_PERIOD_SECS",
        help="The pod's terminationGracePeriodSeconds. Where no total is set, the whole stop"
        f" takes at most this less {KILL_MARGIN:.0f} s.",
    )
    graceful_total: float | None = optional(
        Seconds(),
        group=Group.STOP,
        env="DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
        help="Where no total is set, the whole stop takes at most this plus the grace period.",
    )
    callback_limit: float = option(
        30.0,
        Seconds(),
        group=Group.STOP,
        env="DYN_TRIO_SHUTDOWN_CALLBACK_TIMEOUT_SECS",
        help="Limit of each shutdown callback; one that takes longer is logged and passed.",
    )
    fatal_limit: float = option(
        30.0,
        Seconds(),
        group=Group.STOP,
        env="DYN_TRIO_FATAL_SHUTDOWN_TIMEOUT_SECS",
        help="Limit of a stop that a fatal error caused.",
    )
    exit_code_on_loss: int = option(
        0,
        Integer(0, 255, metavar="CODE"),
        group=Group.STOP,
        env="DYN_TRIO_EXIT_CODE_ON_LOSS",
        help="Exit code of an orderly stop, in place of 0, if a request was cut, lost or left"
        " over: admitted, but neither finished nor handed over.",
    )
    shutdown_report: Path | None = optional(
        FilePath(),
        group=Group.STOP,
        env="DYN_TRIO_SHUTDOWN_REPORT",
        help="File that gets the shutdown report too, one line of JSON.",
    )

    # --- stopping, frontend ----------------------------------------------------------
    http_drain: float = option(
        5.0,
        Seconds(),
        group=Group.STOP_FRONTEND,
        env="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        help="Time for admitted requests to complete before they are told to end.",
    )
    frontend_total: float | None = optional(
        Seconds(),
        group=Group.STOP_FRONTEND,
        env="DYN_TRIO_FRONTEND_SHUTDOWN_TOTAL_TIMEOUT_SECS",
        help="The whole stop of a frontend, from the signal on.",
    )

    # --- stopping, worker --------------------------------------------------------------
    grace: float = option(
        5.0,
        Seconds(),
        group=Group.STOP_WORKER,
        env="DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        help="Time that an unregistered worker goes on serving, so that no router is surprised.",
    )
    grace_mode: GraceMode = option(
        "auto",
        Choice[GraceMode](("auto", "fixed")),
        group=Group.STOP_WORKER,
        env="DYN_TRIO_GRACE_MODE",
        help="Whether the grace period may end early, once every router has said that it knows.",
    )
    drain: float = option(
        900.0,
        Seconds(),
        group=Group.STOP_WORKER,
        env="DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        help="Time for requests in flight to complete once endpoints are closed.",
    )
    drain_policy: DrainPolicy = option(
        "auto",
        Choice[DrainPolicy](("auto", "finish", "migrate")),
        group=Group.STOP_WORKER,
        env="DYN_TRIO_DRAIN_POLICY",
        help="What happens to requests in flight: all finish, all are handed over, or those"
        " that cannot finish in time are.",
    )
    worker_total: float | None = optional(
        Seconds(),
        group=Group.STOP_WORKER,
        env="DYN_WORKER_SHUTDOWN_TOTAL_TIMEOUT_SECS",
        help="The whole stop of a worker, from the signal on.",
    )

    # --- model and endpoint ----------------------------------------------------------------
    namespace: str = option(
        "dynamo",
        NamespaceRule(),
        group=Group.MODEL,
        env="DYN_NAMESPACE",
        help="Namespace of the worker's endpoint.",
    )
    endpoint: EndpointId | None = optional(
        EndpointRule(),
        group=Group.MODEL,
        env="DYN_ENDPOINT",
        help="Full name of the worker's endpoint; without it, dyn://NAMESPACE.backend.generate.",
    )
    model_name: str | None = optional(
        Text(metavar="NAME"),
        group=Group.MODEL,
        env="DYN_MODEL_NAME",
        help="Name that clients use for the model; without it, the model's own name.",
    )
    model_path: Path | None = optional(
        FilePath(metavar="FILE.gguf"),
        group=Group.MODEL,
        env="DYN_MODEL_PATH",
        help="The model's GGUF file; without it, the default model, fetched on first use.",
    )
    cache_dir: Path = option(
        default_cache_dir(os.environ),
        FilePath(metavar="FOLDER"),
        group=Group.MODEL,
        env="DYN_TRIO_CACHE_DIR",
        derive=default_cache_dir,
        derived_text="~/.cache/dynamo_trio, or XDG_CACHE_HOME/dynamo_trio",
        help="Folder that keeps fetched models.",
    )

    # --- engine ----------------------------------------------------------------------------
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

    # --- the simulated engine ------------------------------------------------------------------
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
        help="A fault that the simulated engine commits, once.",
    )
    sim_fault_after: int = option(
        0,
        Integer(0, 1_000_000_000, unit="calls"),
        group=Group.SIM,
        env="DYN_TRIO_SIM_FAULT_AFTER",
        help="Calls (steps, for most faults) that go well before the fault strikes.",
    )

    # --- logging ---------------------------------------------------------------------------------
    log: LogFilter = option(
        LogFilter("info"),
        LogFilterRule(),
        group=Group.LOG,
        env="DYN_LOG",
        help="How much is logged, as a whole and by single loggers.",
    )
    log_jsonl: bool = option(
        False,
        Boolean(),
        group=Group.LOG,
        env="DYN_LOGGING_JSONL",
        help="Log one JSON object a line in place of text.",
    )
    no_color: bool = option(
        False,
        Boolean(),
        group=Group.LOG,
        env="DYN_SDK_DISABLE_ANSI_LOGGING",
        derive=_no_color,
        derived_text="false, or true if NO_COLOR is set",
        help="No colour, on a terminal either.",
    )

    #: Field name -> the flag or variable that it came from; a field with its default is absent.
    sources: Mapping[str, str] = attrs.field(
        factory=lambda: MappingProxyType({}), eq=False, repr=False
    )
    #: What is odd but no error, to be logged once logging stands.
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)

    @classmethod
    def report_path(cls, environ: Mapping[str, str] | None = None) -> Path | None:
        """``DYN_TRIO_SHUTDOWN_REPORT`` alone: where to report that other settings are wrong."""
        environ = os.environ if environ is None else environ
        option = options_of(cls)["shutdown_report"]
        text = environ.get(option.env or "")
        return Path(text) if text else None

    @classmethod
    def from_args_and_env(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        groups: Collection[Group] = tuple(Group),
        prog: str = "python -m dynamo_trio",
        description: str = "",
    ) -> Self:
        """Read flags and variables of ``groups``; a flag wins over its variable.

        ``argv`` and ``environ`` are the process's own by default. Raises ConfigError that
        names all that is wrong: each flag or variable, its value and its rule. ``--help`` and
        ``--version`` print and raise SystemExit(0).
        """
        argv = sys.argv[1:] if argv is None else argv
        environ = os.environ if environ is None else environ
        options = options_of(cls)
        chosen = {name: o for name, o in options.items() if o.group in groups}
        reading = load.read(chosen, argv, environ, prog=prog, description=description)
        reading.raise_problems()
        rest = {n: o.initial(environ) for n, o in options.items() if n not in chosen}
        return cls(
            **reading.values,  # type: ignore[arg-type]  # the rules made and checked them
            **rest,  # type: ignore[arg-type]  # defaults of the table above
            sources=MappingProxyType(reading.sources),
            warnings=load.unknown_variables(environ, options),
        )

    @property
    def endpoint_name(self) -> EndpointId:
        """The worker's endpoint in full."""
        return self.endpoint or EndpointId(self.namespace, "backend", "generate")

    @property
    def body_limit(self) -> int:
        """Largest request body in bytes."""
        return self.body_limit_mb * 1024 * 1024

    @property
    def worker_budget(self) -> float | None:
        """All of a worker's stop, in seconds from the signal; None without a limit."""
        if self.worker_total is not None:
            return self.worker_total
        return self._common_budget(self.grace)

    @property
    def frontend_budget(self) -> float | None:
        """All of a frontend's stop, in seconds from the signal; None without a limit."""
        if self.frontend_total is not None:
            return self.frontend_total
        return self._common_budget(0.0)

    @property
    def standalone_budget(self) -> float | None:
        """All of the stop when frontend and worker are one process, which has no grace period."""
        totals = [t for t in (self.frontend_total, self.worker_total) if t is not None]
        return min(totals) if totals else self._common_budget(0.0)

    def _common_budget(self, grace: float) -> float | None:
        if self.graceful_total is not None:
            return self.graceful_total + grace
        if self.termination_grace is not None:
            return self.termination_grace - KILL_MARGIN
        return None
