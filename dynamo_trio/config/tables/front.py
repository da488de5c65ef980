"""Settings of the HTTP front, and of the routing behind it."""

from __future__ import annotations

from typing import Literal

import attrs

from dynamo_trio.config.option import Group, option
from dynamo_trio.config.rules import Choice, Integer, Seconds, Text

RouterMode = Literal["round-robin", "random"]
_LATER = "is not there yet; round-robin and random are"


@attrs.frozen(kw_only=True, slots=False)
class FrontTable:
    """The HTTP front."""

    http_host: str = option(
        "127.0.0.1",
        Text(metavar="HOST"),
        group=Group.HTTP,
        env="DYN_HTTP_HOST",
        help="Address to listen on; 0.0.0.0 is every interface.",
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
        Integer(400, 599, metavar="STATUS"),
        group=Group.HTTP,
        env="DYN_HTTP_OVERLOAD_STATUS_CODE",
        help="HTTP status that says that every worker is full. It must be an error's, or clients"
        " would take the refusal for an answer (Dynamo takes 200 to 999).",
    )

    # --- routing -----------------------------------------------------------------

    router_mode: RouterMode = option(
        "round-robin",
        Choice[RouterMode](
            ("round-robin", "random"),
            refused={
                "power-of-two": f"routing by power of two {_LATER}",
                "kv": f"KV routing {_LATER}",
                "direct": f"direct routing {_LATER}",
                "least-loaded": f"routing by load {_LATER}",
                "device-aware-weighted": f"routing by device {_LATER}",
            },
        ),
        group=Group.ROUTING,
        env="DYN_ROUTER_MODE",
        help="How the worker of a request is chosen.",
    )
    migration_limit: int = option(
        0,
        Integer(0, 1_000),
        group=Group.ROUTING,
        env="DYN_MIGRATION_LIMIT",
        help="How often a request that its worker failed may move to another one. Only 0 has an"
        " effect so far: a broken stream is told to its client.",
    )
