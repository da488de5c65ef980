"""Settings of what a frontend admits, and of how long it waits for a worker's word."""

from __future__ import annotations

import attrs

from dynamo_trio.config.numbers import Number, OrNone
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Integer, Seconds


@attrs.frozen(kw_only=True, slots=False)
class AdmissionTable:
    """What a frontend admits."""

    max_concurrent_requests: int = option(
        0,
        Integer(0, 1_000_000),
        group=Group.HTTP,
        env="DYN_TRIO_MAX_CONCURRENT_REQUESTS",
        help="Requests that run at once, of all models; a further one is refused as overloaded."
        " 0: any number.",
    )
    max_concurrent_requests_per_model: int = option(
        0,
        Integer(0, 1_000_000),
        group=Group.HTTP,
        env="DYN_TRIO_MAX_CONCURRENT_REQUESTS_PER_MODEL",
        help="Requests that run at once, of each model. 0: any number.",
    )
    backend_stream_timeout: float | None = optional(
        OrNone(Seconds()),
        group=Group.HTTP,
        env="DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
        help="Time for which a worker may send nothing of an answer, at its beginning or later, or"
        " may not say that it has the request,"
        " before the request is given up, or sent to another one if nothing was answered yet. 0:"
        " any time. Without it, 120 seconds over tcp; over mux heartbeats show whether a worker"
        " lives.",
    )

    # --- busy workers ------------------------------------------------------------

    active_decode_blocks_threshold: float | None = optional(
        OrNone(Number(0.0, 1.0)),
        group=Group.ROUTING,
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        help="Part of its KV cache's blocks above which a worker is busy, and left out; while all"
        " are, requests are refused as overloaded.",
    )
    active_prefill_tokens_threshold: int | None = optional(
        OrNone(Integer(0, 1_000_000_000, unit="tokens")),
        group=Group.ROUTING,
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        help="Tokens of prompts, still to be computed, above which a worker is busy.",
    )
    active_prefill_tokens_threshold_frac: float | None = optional(
        OrNone(Number(0.0, 1_000_000.0)),
        group=Group.ROUTING,
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        help="The same, as a multiple of the tokens that the worker's card says it takes in one"
        " step.",
    )
