"""Settings of what a process tells of itself: names of metrics, and spans."""

from __future__ import annotations

from typing import Literal

import attrs

from dynamo_trio.config.names import MetricsPrefixRule
from dynamo_trio.config.option import Group, option
from dynamo_trio.config.rules import Boolean, Choice, Text

OtlpProtocol = Literal["grpc", "http/protobuf"]


@attrs.frozen(kw_only=True, slots=False)
class ObserveTable:
    """Metrics and spans."""

    metrics_prefix: str = option(
        "dynamo_frontend",
        MetricsPrefixRule(),
        group=Group.HTTP,
        env="DYN_METRICS_PREFIX",
        help="What the names of the frontend's own metrics begin with.",
    )
    otel_export: bool = option(
        False,
        Boolean(),
        group=Group.LOG,
        env="OTEL_EXPORT_ENABLED",
        help="Export spans of requests to an OpenTelemetry collector; needs dynamo-trio[otel].",
    )
    otel_endpoint: str = option(
        "http://localhost:4317",
        Text(metavar="URL"),
        group=Group.LOG,
        env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="Where that collector takes spans: as http/protobuf, the whole URL.",
    )
    otel_protocol: OtlpProtocol = option(
        "grpc",
        Choice[OtlpProtocol](("grpc", "http/protobuf")),
        group=Group.LOG,
        env="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        help="How spans are sent to it.",
    )
    otel_service: str = option(
        "dynamo",
        Text(metavar="NAME"),
        group=Group.LOG,
        env="OTEL_SERVICE_NAME",
        help="The name of this process among the spans.",
    )
