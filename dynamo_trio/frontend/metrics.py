"""The frontend's metrics, with Dynamo 1.5.1's names, labels and buckets.

One request has one terminal outcome, counted when its record is closed, or at once if it is
refused. So ``started = success + error + running`` holds for each model at every scrape; those
that were cancelled, or rejected because every worker was full, are among the errors, under
``error_type``, and are counted once more by themselves.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import attrs
from prometheus_client import CollectorRegistry, Gauge

from dynamo_trio.errors import (
    Cancelled,
    ConnectionTimeout,
    DeadlineExceeded,
    DynamoException,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
)
from dynamo_trio.frontend.live import LiveMetrics, ModelMetrics, WorkerMetrics
from dynamo_trio.frontend.record import PREPROCESS, ROUTE, RequestRecord
from dynamo_trio.frontend.router_metrics import RouterMetrics
from dynamo_trio.metrics import buckets
from dynamo_trio.metrics.counters import CounterFamily
from dynamo_trio.metrics.exposition import expose
from dynamo_trio.metrics.histograms import Distribution, HistogramFamily

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from dynamo_trio.frontend.catalog import Catalog

__all__ = ["CONTENT_TYPE", "PREFIX", "FrontendMetrics", "RequestRecord", "error_type"]

#: What the names begin with, unless ``DYN_METRICS_PREFIX`` says otherwise.
PREFIX = "dynamo_frontend"

_ERROR_TYPES: tuple[tuple[type[DynamoException], str], ...] = (
    (Cancelled, "cancelled"),
    (ModelNotFound, "not_found"),
    (InvalidArgument, "validation"),
    (Overloaded, "overload"),
    (ConnectionTimeout, "response_timeout"),
    (DeadlineExceeded, "response_timeout"),
)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def error_type(exc: DynamoException) -> str:
    """The value of Dynamo's metric label ``error_type`` for this error."""
    for kind, name in _ERROR_TYPES:
        if isinstance(exc, kind):
            return name
    return "unavailable" if exc.status == 503 else "internal"


@attrs.frozen(eq=False)
class ModelSeries:
    """What is measured of the requests of one model."""

    ttft: Distribution
    itl: Distribution
    duration: Distribution
    prompt_tokens: Distribution
    output_sequence: Distribution
    cached_tokens: Distribution


@attrs.define(eq=False)
class FrontendMetrics:
    """All collectors of one frontend, in a registry of their own."""

    prefix: str = PREFIX
    registry: CollectorRegistry = attrs.field(factory=CollectorRegistry)
    # Counters.
    started: CounterFamily = attrs.field(init=False)
    finished: CounterFamily = attrs.field(init=False)
    cancelled: CounterFamily = attrs.field(init=False)
    rejected: CounterFamily = attrs.field(init=False)
    migrated: CounterFamily = attrs.field(init=False)
    # Histograms by model.
    ttft: HistogramFamily = attrs.field(init=False)
    itl: HistogramFamily = attrs.field(init=False)
    duration: HistogramFamily = attrs.field(init=False)
    prompt_tokens: HistogramFamily = attrs.field(init=False)
    output_sequence: HistogramFamily = attrs.field(init=False)
    cached_tokens: HistogramFamily = attrs.field(init=False)
    migration: HistogramFamily = attrs.field(init=False)
    # Others.
    stage_seconds: HistogramFamily = attrs.field(init=False)
    preprocess_seconds: Distribution = attrs.field(init=False)
    route_seconds: Distribution = attrs.field(init=False)
    round_trip_seconds: Distribution = attrs.field(init=False)
    plane_queue: Distribution = attrs.field(init=False)
    plane_send: Distribution = attrs.field(init=False)
    plane_ttft: Distribution = attrs.field(init=False)
    live: LiveMetrics = attrs.field(init=False)
    workers: WorkerMetrics = attrs.field(init=False)
    router: RouterMetrics = attrs.field(init=False)
    #: Invariant: only of models that were served; so many as the families have series.
    _series: dict[str, ModelSeries] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._count()
        self._measure_requests()
        self._measure_planes()
        self.live = LiveMetrics(self.prefix, self.registry)
        self.workers = WorkerMetrics(self.prefix, self.registry)
        self.router = RouterMetrics(self.registry)
        self._tell_uptime()

    def _tell_uptime(self) -> None:
        began = time.monotonic()
        uptime = Gauge(
            "dynamo_component_uptime_seconds",
            "Seconds since the process began",
            ["worker_id"],
            registry=self.registry,
        )
        # A frontend is no instance of anything: Dynamo's has a random number here, too.
        uptime.labels(f"{secrets.randbits(63):x}").set_function(lambda: time.monotonic() - began)

    def _count(self) -> None:
        kind = ("model", "endpoint", "request_type")
        self.started = self._counter(
            "requests_started", "Requests that were received, refused ones included", *kind
        )
        self.finished = self._counter(
            "requests",
            "Requests that have ended, refused ones included",
            *(*kind, "status", "error_type"),
        )
        self.cancelled = self._counter(
            "model_cancellation", "Requests whose client left before the end", *kind
        )
        self.rejected = self._counter(
            "model_rejection", "Requests refused for want of room", "model", "endpoint"
        )
        self.migrated = self._counter(
            "model_migration",
            "Requests that went on to another worker because one had failed them",
            *("model", "migration_type"),
        )
        self._counter(
            "model_migration_max_seq_len_exceeded",
            "Requests that were too long to go on at another worker",
            "model",
        )

    def _measure_requests(self) -> None:
        ttft, itl = buckets.TIME_TO_FIRST_TOKEN, buckets.INTER_TOKEN_LATENCY
        self.ttft = self._by_model(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token",
            ttft)  # fmt: skip
        self.itl = self._by_model(
            "inter_token_latency_seconds", "Seconds between two tokens of an answer", itl
        )
        self.duration = self._by_model(
            "request_duration_seconds", "Seconds from a request's arrival to its end",
            buckets.REQUEST_DURATION)  # fmt: skip
        prompt, answer = buckets.INPUT_TOKENS, buckets.OUTPUT_TOKENS
        self.prompt_tokens = self._by_model("input_sequence_tokens", "Tokens of a prompt", prompt)
        self.output_sequence = self._by_model(
            "output_sequence_tokens", "Tokens of an answer", answer
        )
        self.cached_tokens = self._by_model(
            "cached_tokens", "Tokens of a prompt that the worker had at hand", prompt
        )
        self.migration = self._histogram(
            f"{self.prefix}_model_migration_duration_seconds",
            "Seconds from a worker's failure to the first token from another one, or to the end",
            buckets.MIGRATION,
            *("model", "migration_type", "outcome"),
        )

    def _measure_planes(self) -> None:
        self.stage_seconds = self._histogram(
            f"{self.prefix}_stage_duration_seconds", "Seconds of a stage of a request",
            buckets.STAGE, "stage")  # fmt: skip
        stage = self.stage_seconds.labels
        self.preprocess_seconds, self.route_seconds = stage(PREPROCESS), stage(ROUTE)
        self.round_trip_seconds = stage("transport_roundtrip")
        plane, some = "dynamo_request_plane", buckets.SOME_SECONDS
        self.plane_queue = self._histogram(
            f"{plane}_queue_seconds", "Seconds from a prompt's end to the sending of its request",
            some).labels()  # fmt: skip
        self.plane_send = self._histogram(
            f"{plane}_send_seconds", "Seconds from a request's sending to its acknowledgement", some
        ).labels()
        self.plane_ttft = self._histogram(
            f"{plane}_roundtrip_ttft_seconds",
            "Seconds from a request's sending to the first token",
            buckets.ROUND_TRIP).labels()  # fmt: skip

    def _counter(self, name: str, text: str, *labels: str) -> CounterFamily:
        return CounterFamily(f"{self.prefix}_{name}", text, labels, self.registry)

    def _by_model(self, name: str, text: str, bounds: tuple[float, ...]) -> HistogramFamily:
        return self._histogram(f"{self.prefix}_{name}", text, bounds, "model")

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *labels: str
    ) -> HistogramFamily:
        return HistogramFamily(name, text, labels, bounds, self.registry)

    def show(self, catalog: Callable[[], Catalog], count_left: Callable[[], int]) -> None:
        """Tell of models and workers, too, and of clients that have left."""
        self.live.count_left = count_left
        self.workers.known = lambda: _workers(catalog())
        self.registry.register(ModelMetrics(self.prefix, catalog))

    def series(self, model: str) -> ModelSeries:
        """What is measured of this model, which is served."""
        found = self._series.get(model)
        if found is None:
            parts = (self.ttft, self.itl, self.duration, self.prompt_tokens)
            more = (self.output_sequence, self.cached_tokens)
            found = ModelSeries(*[family.labels(model) for family in (*parts, *more)])
            self._series[model] = found
        return found

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return expose(self.registry)

    def refused(
        self, model: str, endpoint: str, request_type: str, error_type: str, seconds: float
    ) -> None:
        """Count a request that was never admitted, ``seconds`` after it came."""
        labels = (model, endpoint, request_type)
        self.started.labels(*labels).inc()
        self.finished.labels(*labels, "error", error_type).inc()
        if error_type == "overload":
            self.rejected.labels(model, endpoint).inc()
        if error_type == "cancelled":
            self.cancelled.labels(*labels).inc()
        self.duration.labels(model).observe(seconds)

    def request(self, model: str, endpoint: str, request_type: str) -> Counted:
        """Count one request from its admission to its one outcome: for a ``with`` block."""
        return Counted(RequestRecord(self, model, endpoint, request_type))


@attrs.define(eq=False)
class Counted:
    """Counts a request in, and out. A class, and no generator, since it is for every request."""

    _record: RequestRecord

    def __enter__(self) -> RequestRecord:
        record = self._record
        metrics = record.metrics
        metrics.started.labels(record.model, record.endpoint, record.request_type).inc()
        metrics.live.enter(record)
        return record

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._record.metrics.live.leave(self._record)
        self._record.close()


def _workers(catalog: Catalog) -> set[int]:
    return {key for model in catalog.models() for key in model.client.instance_ids()}
