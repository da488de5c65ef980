"""What is measured of one request.

Theory of operation
-------------------
A request goes through stages, and each is entered by what happens anyway: it is *prepared* until
its prompt is known (:meth:`RequestRecord.prompt`), *routed* until a worker is asked
(:meth:`~RequestRecord.asks`), and *dispatched* until the first token is there
(:meth:`~RequestRecord.tokens`). If its answer is thrown away, and another worker asked, the last
two come again.

Nothing is added up that can be read from the records of the requests that run: how many are in
which stage, how many tokens there were. So a token costs the time of the clock, a subtraction,
and a place in a histogram; everything else is done once for each request.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.discovery import EndpointId, Instance
    from dynamo_trio.frontend.metrics import FrontendMetrics, ModelSeries
    from dynamo_trio.metrics.histograms import Distribution

#: Dynamo's values of the label ``stage`` for requests.
PREPROCESS, ROUTE, DISPATCH = STAGES = ("preprocess", "route", "dispatch")


@attrs.define(eq=False)
class RequestRecord:
    """Times are seconds on Trio's clock."""

    metrics: FrontendMetrics
    model: str
    endpoint: str
    request_type: str  # "stream" or "unary"
    error_type: str = "internal"  # "" once the answer is complete
    #: Tokens of the prompt, once that is known.
    prompt_tokens: int | None = None
    #: Those of them that the worker had at hand.
    cached_tokens: int = 0
    #: Who has it now, once somebody was asked.
    instance: Instance | None = None
    #: The endpoint of those who were asked.
    routed: EndpointId | None = None
    #: In seconds from the beginning: the first token of the answer; None until it is there.
    ttft: float | None = None
    #: Between the last tokens; 0 until there are two.
    gap: float = 0.0
    #: Looked up once, since each token asks for it.
    _now: Callable[[], float] = attrs.field(init=False, repr=False)
    _began: float = attrs.field(init=False)
    #: When the stage began that it is in.
    _stage_began: float = attrs.field(init=False)
    #: When the last tokens of the answer came; None: none is there.
    _last: float | None = None
    _first: float = 0.0
    _tokens: int = 0
    #: Since when it is on the way from a worker that failed it to another one.
    _moving_since: float | None = None
    #: Looked up once, too: what is measured of this model, and of its tokens.
    _series: ModelSeries = attrs.field(init=False, repr=False)
    _itl: Distribution = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._now = trio.lowlevel.current_clock().current_time
        self._began = self._stage_began = self._now()
        self._series = self.metrics.series(self.model)
        self._itl = self._series.itl

    @property
    def token_count(self) -> int:
        """Tokens of the answer that have arrived."""
        return self._tokens

    @property
    def stage(self) -> str:
        """Where it is; empty once its answer has begun."""
        if self._last is not None:
            return ""
        if self.prompt_tokens is None:
            return PREPROCESS
        return ROUTE if self.instance is None else DISPATCH

    @property
    def mean_gap(self) -> float | None:
        """Seconds between two tokens on average; None if there were not two."""
        if self._last is None or self._tokens < 2:
            return None
        return (self._last - self._first) / (self._tokens - 1)

    def age(self) -> float:
        """Seconds since the request was admitted."""
        return self._now() - self._began

    def prompt(self, count: int) -> None:
        """The prompt is there; its length in tokens."""
        self.prompt_tokens = count
        self._series.prompt_tokens.observe(count)
        self.metrics.preprocess_seconds.observe(self._lap())

    def asks(self, instance: Instance) -> None:
        """The request is about to be sent to this worker."""
        self.instance = instance
        spent = self._lap()
        self.metrics.route_seconds.observe(spent)
        self.metrics.plane_queue.observe(spent)
        if self.routed is None:
            self.routed = instance.endpoint
            self.metrics.router.started(instance.endpoint)

    def taken_on(self) -> None:
        """The worker has acknowledged it."""
        self.metrics.plane_send.observe(self._now() - self._stage_began)

    def tokens(self, count: int) -> None:
        """Note that ``count`` tokens have just arrived."""
        if not count:
            return
        now = self._now()
        if self._last is None:
            self._begin(now)
        else:
            self.gap = gap = (now - self._last) / count
            itl = self._itl  # as Distribution.observe does, without a call for each token
            itl.counts[bisect_left(itl.bounds, gap)] += count
            itl.total += gap * count
        self._last = now
        self._tokens += count

    def _begin(self, now: float) -> None:
        metrics = self.metrics
        self._first = now
        metrics.round_trip_seconds.observe(now - self._stage_began)
        metrics.plane_ttft.observe(now - self._stage_began)
        if self.ttft is None:  # else its client has waited for longer: that was told
            self.ttft = now - self._began
            self._series.ttft.observe(self.ttft)
        metrics.workers.begun(self)
        if self._moving_since is not None:
            self._moved(self._moving_since, "success")

    def restart(self) -> None:
        """What has arrived was thrown away: the answer begins anew, at another worker."""
        self._tokens, self._last, self.gap, self.instance = 0, None, 0.0, None
        self._lap()
        if self._moving_since is None:
            self._moving_since = self._stage_began
        self.metrics.migrated.labels(self.model, "new_request").inc()

    def _moved(self, since: float, outcome: str) -> None:
        spent = self._now() - since
        self.metrics.migration.labels(self.model, "new_request", outcome).observe(spent)
        self._moving_since = None

    def _lap(self) -> float:
        """Seconds of the stage that ends now."""
        began, self._stage_began = self._stage_began, self._now()
        return self._stage_began - began

    def close(self) -> None:
        """Count the outcome; called once, by the block that opened the record."""
        metrics, labels = self.metrics, (self.model, self.endpoint, self.request_type)
        status = "error" if self.error_type else "success"
        metrics.finished.labels(*labels, status, self.error_type).inc()
        if self.error_type == "cancelled":
            metrics.cancelled.labels(*labels).inc()
        if self.error_type == "overload":
            metrics.rejected.labels(self.model, self.endpoint).inc()
        if self._moving_since is not None:
            kinds = {"": "success", "cancelled": "cancelled"}
            self._moved(self._moving_since, kinds.get(self.error_type, "failure"))
        self._measure()

    def _measure(self) -> None:
        metrics, series = self.metrics, self._series
        series.duration.observe(self.age())
        if self._tokens or not self.error_type:
            series.output_sequence.observe(self._tokens)
        if not self.error_type:
            series.cached_tokens.observe(self.cached_tokens)
        metrics.workers.ended(self)
        metrics.router.ended(self)
