"""From the configuration to the parts of a frontend. Nothing here waits or starts anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.client import Client
from dynamo_trio.frontend.admission import Slots
from dynamo_trio.frontend.busy import BusyThresholds, BusyWorkers
from dynamo_trio.frontend.cors import Cors
from dynamo_trio.frontend.keys import ApiKeys
from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.frontend.paths import Paths
from dynamo_trio.frontend.stalls import Stalls
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.tls import server_context
from dynamo_trio.program.limits import common_timetable

if TYPE_CHECKING:
    import ssl

    from dynamo_trio.config import Config, RouterMode
    from dynamo_trio.frontend.placement import Route
    from dynamo_trio.lifecycle import Lifecycle, Timetable

#: How each router mode chooses among the instances that a client knows.
ROUTERS: dict[RouterMode, Route] = {
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


def make_frontend(config: Config, lifecycle: Lifecycle, *, alone: bool = False) -> Frontend:
    """The frontend that the settings describe, without its models. ``alone``: as its worker is
    in this process.

    Raises:
        FileUnusable: the file of API keys is missing, or wrong.
    """
    return Frontend(
        lifecycle,
        metrics=FrontendMetrics(config.metrics_prefix),
        limits=http_limits(config, alone=alone),
        tls=http_tls(config),
        overload_status=config.overload_status,
        paths=Paths.of(config),
        keys=None if config.api_keys_file is None else ApiKeys.read(config.api_keys_file),
        cors=Cors(config.cors_origins or ()),
        route=ROUTERS[config.router_mode],
        slots=Slots(
            config.max_concurrent_requests or math.inf,
            config.max_concurrent_requests_per_model or math.inf,
        ),
        busy=BusyWorkers(busy_thresholds(config)),
        stalls=Stalls(_silence(config)),
    )


def busy_thresholds(config: Config) -> BusyThresholds:
    """What makes a worker busy, of models for which nothing else is set at run time."""
    return BusyThresholds(
        config.active_decode_blocks_threshold,
        config.active_prefill_tokens_threshold,
        config.active_prefill_tokens_threshold_frac,
    )


def _silence(config: Config) -> float | None:
    """For how long a worker may be silent: 0 means any time, None that it depends."""
    return math.inf if config.backend_stream_timeout == 0 else config.backend_stream_timeout


def http_limits(config: Config, *, alone: bool = False) -> HttpLimits:
    """The limits of the HTTP server. ``alone``: the worker is in this process."""
    return HttpLimits(
        max_connections=config.http_max_connections,
        descriptors=1 if alone or config.mux == "only" else 2,
        head_time=config.http_header_timeout,
        handshake_time=config.http_header_timeout,
        body_time=config.http_body_timeout,
        body_bytes=config.body_limit,
        body_total=config.body_total,
        idle_time=config.http_idle_timeout,
        write_time=config.http_write_timeout,
    )


def http_tls(config: Config) -> ssl.SSLContext | None:
    """The TLS of the HTTP port; None: it speaks plainly.

    Raises:
        FileUnusable: a file is missing, or not what it should be.
    """
    cert, key = config.http_tls_cert, config.http_tls_key
    return None if cert is None or key is None else server_context(cert, key)
