"""Settings of a worker's status server."""

from __future__ import annotations

import attrs

from dynamo_trio.config.names import UrlPathRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Boolean, PortOrOff, Text


@attrs.frozen(kw_only=True, slots=False)
class StatusTable:
    """The port that probes, Prometheus and frontends ask."""

    system_host: str = option(
        "0.0.0.0",
        Text(metavar="HOST"),
        group=Group.STATUS,
        env="DYN_SYSTEM_HOST",
        help="Address to listen on; 0.0.0.0 is every interface.",
    )
    system_port: int = option(
        -1,
        PortOrOff(),
        group=Group.STATUS,
        env="DYN_SYSTEM_PORT",
        help="Port of the status server: 0 takes any free one, -1 is no status server. With one,"
        " the model's files are offered there, and frontends need no disk in common.",
    )
    system_health_path: str = option(
        "/health",
        UrlPathRule(),
        group=Group.STATUS,
        env="DYN_SYSTEM_HEALTH_PATH",
        help="Path that tells whether the worker wants requests.",
    )
    system_live_path: str = option(
        "/live",
        UrlPathRule(),
        group=Group.STATUS,
        env="DYN_SYSTEM_LIVE_PATH",
        help="Path that tells whether the process lives.",
    )
    drain_api: bool | None = optional(
        Boolean(),
        group=Group.STATUS,
        env="DYN_TRIO_DRAIN_API",
        help="Whether POST /drain and POST /resume take the worker out of routing and back. None:"
        " only if the status server listens on this machine alone.",
    )
