"""Settings of canary health checks."""

from __future__ import annotations

import attrs

from dynamo_trio.config.names import PayloadRule
from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Boolean, Seconds


@attrs.frozen(kw_only=True, slots=False)
class CanaryTable:
    """Whether an endpoint is asked now and then if it still answers."""

    health_check_enabled: bool = option(
        False,
        Boolean(),
        group=Group.CANARY,
        env="DYN_HEALTH_CHECK_ENABLED",
        help="Send an endpoint a request of our own after a silence; while it does not answer, it"
        " gets no other requests.",
    )
    canary_wait_time: float = option(
        10.0,
        Seconds(minimum=0.1),
        group=Group.CANARY,
        env="DYN_CANARY_WAIT_TIME",
        help="A silence so long asks for a health check. What is answered to others is proof"
        " enough.",
    )
    health_check_request_timeout: float = option(
        3.0,
        Seconds(minimum=0.01),
        group=Group.CANARY,
        env="DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        help="Limit for the answer to a health check.",
    )
    health_check_payload: str | None = optional(
        PayloadRule(),
        group=Group.CANARY,
        env="DYN_HEALTH_CHECK_PAYLOAD",
        help="The request of a health check; without it, one token of the worker's model.",
    )
