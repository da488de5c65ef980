"""Metrics that are read when Prometheus asks: of requests that run, of workers, and of models."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dynamo_trio.frontend.record import DISPATCH, PREPROCESS, ROUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from dynamo_trio.frontend.catalog import Catalog
    from dynamo_trio.frontend.keeper import ServedModel
    from dynamo_trio.frontend.record import RequestRecord

#: Stage -> Dynamo's label ``phase``. There is no worker here that only prefills, or only decodes.
_PHASES = {PREPROCESS: "", ROUTE: "aggregated", DISPATCH: "aggregated"}


class LiveMetrics(Collector):
    """What the requests that run add up to."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        #: Invariant: the records that were opened and are not closed.
        self._records: set[RequestRecord] = set()
        #: Tokens of those that are closed, by model. It names every model that was ever asked.
        self._tokens: Counter[str] = Counter()
        #: What was told of the tokens: of an answer that begins anew some are thrown away, and no
        #: counter may fall.
        self._told: Counter[str] = Counter()
        #: Asks how many requests run on although their client has left.
        self.count_left: Callable[[], int] = lambda: 0
        registry.register(self)

    def enter(self, record: RequestRecord) -> None:
        """The request runs from now on."""
        self._records.add(record)
        self._tokens[record.model] += 0

    def leave(self, record: RequestRecord) -> None:
        """It has ended."""
        self._records.discard(record)
        self._tokens[record.model] += record.token_count

    def collect(self) -> Iterator[Metric]:
        yield self._by_model(
            "active_requests", "Requests that run now", (r.model for r in self._records)
        )
        yield self._by_model(
            "inflight_requests",
            "The same as active_requests, under its old name",
            (r.model for r in self._records),
        )
        yield self._by_model(
            "queued_requests",
            "Requests that wait for the first token of their answer",
            (r.model for r in self._records if r.stage),
        )
        yield self._stages()
        yield GaugeMetricFamily(
            f"{self._prefix}_disconnected_clients",
            "Clients that have left, and whose requests have not ended yet",
            self.count_left(),
        )
        yield self._given()
        yield GaugeMetricFamily(
            "dynamo_request_plane_inflight_requests",
            "Requests that are with a worker now",
            sum(record.instance is not None for record in self._records),
        )

    def _by_model(self, name: str, text: str, models: Iterable[str]) -> Metric:
        counts = Counter(models)
        family = GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=("model",))
        for model in self._tokens:
            family.add_metric([model], counts[model])
        return family

    def _stages(self) -> Metric:
        counts = Counter(record.stage for record in self._records)
        text = "Requests that are in a stage now"
        name = f"{self._prefix}_stage_requests"
        family = GaugeMetricFamily(name, text, labels=("stage", "phase"))
        for stage, phase in _PHASES.items():
            family.add_metric([stage, phase], counts[stage])
        return family

    def _given(self) -> Metric:
        tokens = self._tokens.copy()
        for record in self._records:
            tokens[record.model] += record.token_count
        self._told |= tokens
        text = "Tokens of answers"
        family = CounterMetricFamily(f"{self._prefix}_output_tokens", text, labels=("model",))
        for model in self._tokens:
            family.add_metric([model], self._told[model])
        return family


@attrs.define(eq=False)
class _Last:
    """What was seen of one worker last. Times are seconds."""

    ttft: float
    prompt_tokens: int
    gap: float | None = None


class WorkerMetrics(Collector):
    """How each worker has answered last (``worker_last_*``)."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        self._last: dict[int, _Last] = {}
        #: The requests whose answers have begun and go on.
        self._records: set[RequestRecord] = set()
        #: Asks for the ids of the workers that are there; what is known of others is forgotten.
        self.known: Callable[[], Collection[int]] = tuple
        registry.register(self)

    def begun(self, record: RequestRecord) -> None:
        """The first token of an answer is there."""
        if record.instance is not None and record.ttft is not None:
            last = self._last.get(record.instance.instance_id)
            gap = None if last is None else last.gap
            found = _Last(record.ttft, record.prompt_tokens or 0, gap)
            self._last[record.instance.instance_id] = found
            self._records.add(record)

    def ended(self, record: RequestRecord) -> None:
        """The request has ended."""
        self._note_gap(record)
        self._records.discard(record)

    def _note_gap(self, record: RequestRecord) -> None:
        if record.instance is not None and record.gap:
            last = self._last.get(record.instance.instance_id)
            if last is not None:
                last.gap = record.gap

    def collect(self) -> Iterator[Metric]:
        known = self.known()
        self._last = {key: last for key, last in self._last.items() if key in known}
        for record in self._records:
            self._note_gap(record)
        found = self._last.items()
        yield self._gauge(
            "time_to_first_token_seconds",
            "Seconds to the first token of the worker's last answer",
            ((key, last.ttft) for key, last in found),
        )
        yield self._gauge(
            "inter_token_latency_seconds",
            "Seconds between the worker's last tokens",
            ((key, last.gap) for key, last in found if last.gap is not None),
        )
        yield self._gauge(
            "input_sequence_tokens",
            "Tokens of the prompt of the worker's last answer",
            ((key, last.prompt_tokens) for key, last in found),
        )

    def _gauge(self, name: str, text: str, values: Iterable[tuple[int, float]]) -> Metric:
        labels = ("worker_id", "dp_rank", "worker_type")
        family = GaugeMetricFamily(f"{self._prefix}_worker_last_{name}", text, labels=labels)
        for key, value in values:  # Dynamo calls a worker that does everything "decode", too
            family.add_metric([str(key), "none", "decode"], value)
        return family


#: Gauge -> what of a card it tells: of the card's own fields, or else of its runtime_config.
_OF_CARDS = {
    "migration_limit": "How often a request may move to another worker",
    "context_length": "Tokens of the longest prompt and answer together",
    "kv_cache_block_size": "Tokens of one block of the worker's cache",
    "max_num_seqs": "Requests that a worker computes at once",
    "max_num_batched_tokens": "Tokens that a worker computes at once",
    "total_kv_blocks": "Blocks of a worker's cache",
}


class ModelMetrics(Collector):
    """What the models' cards say (``model_*``). ``catalog`` gives the one that is used now."""

    def __init__(self, prefix: str, catalog: Callable[[], Catalog]) -> None:
        self._prefix = prefix
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        models = {model.name: model for model in self._catalog().models()}
        ready = self._gauge("ready", "Can the model be asked? 1 if it can, 0 if not")
        for name in self._catalog().known():
            ready.add_metric([name], float(name in models))
        yield ready
        for name, text in _OF_CARDS.items():
            family = self._gauge(name, text)
            for model in models.values():
                if (value := _of_card(model, name)) is not None:
                    family.add_metric([model.name], value)
            yield family

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_model_{name}", text, labels=("model",))


def _of_card(model: ServedModel, name: str) -> int | None:
    if name == "context_length":
        return model.context_length
    card: Any = model.card
    if card is None:
        return None
    runtime = getattr(card.card_json, "runtime_config", None)
    for place in (card, runtime):
        value = getattr(place, name, None)
        if isinstance(value, int):
            return value
    return None
