"""Settings of a stop: what may take how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Boolean, Choice, FilePath, Integer, Seconds

if TYPE_CHECKING:
    from pathlib import Path

#: What a pod's termination grace period must leave between our last act and SIGKILL, in seconds.
KILL_MARGIN = 3.0

DrainPolicy = Literal["auto", "finish", "migrate"]
GraceMode = Literal["auto", "fixed"]


@attrs.frozen(kw_only=True, slots=False)
class StopTable:
    """Of every process, then of a frontend, then of a worker."""

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

    # --- frontend ------------------------------------------------------------

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

    # --- worker --------------------------------------------------------------

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
        help="What happens to requests in flight: all finish, all that others have a place for are"
        " handed over, or those that cannot finish in time are.",
    )
    worker_total: float | None = optional(
        Seconds(),
        group=Group.STOP_WORKER,
        env="DYN_WORKER_SHUTDOWN_TOTAL_TIMEOUT_SECS",
        help="The whole stop of a worker, from the signal on.",
    )
    fast_exit: bool = option(
        False,
        Boolean(),
        group=Group.STOP_WORKER,
        env="DYN_GMS_FAILOVER_FAST_EXIT_ON_SIGTERM",
        help="On SIGTERM leave as soon as the registration is withdrawn, for a failover group"
        " whose next member waits for this process to be gone: requests in flight are lost to"
        " it. Other stops are as ever.",
    )
    fast_unregister: float = option(
        5.0,
        Seconds(),
        group=Group.STOP_WORKER,
        env="DYN_GMS_FAILOVER_UNREGISTER_TIMEOUT_SECS",
        help="Limit of the unregistering that such a fast exit waits for.",
    )
