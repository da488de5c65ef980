"""From the configuration to the parts of a frontend. Nothing here waits or starts anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.client import Client
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.program.limits import common_timetable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.config import Config, RouterMode
    from dynamo_trio.discovery import Instance
    from dynamo_trio.lifecycle import Lifecycle, Timetable

#: How each router mode chooses among the instances that a client knows.
ROUTERS: dict[RouterMode, Callable[[Client], Instance]] = {
    "round-robin": Client.pick,
    "random": Client.pick_random,
}


def timetable(config: Config) -> Timetable:
    """The limits of a frontend's stop: it has neither endpoints nor an engine."""
    return attrs.evolve(
        common_timetable(config),
        http_drain=config.http_drain,
        drain=0.0,
        engine_close=0.0,
        total=config.frontend_budget,
    )


def make_frontend(config: Config, lifecycle: Lifecycle) -> Frontend:
    """The frontend that the settings describe, without its models."""
    return Frontend(
        lifecycle,
        limits=http_limits(config),
        overload_status=config.overload_status,
        route=ROUTERS[config.router_mode],
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
