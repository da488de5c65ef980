"""The frontend's metrics: Dynamo's names, and values that are right at every scrape."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from dynamo_trio.frontend.metrics import FrontendMetrics
from dynamo_trio.metrics.histograms import Distribution, HistogramFamily
from dynamo_trio.testing import Fault

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.discovery import Instance
    from tests.frontend.conftest import Answer, Opener, Site

CHAT = "/v1/chat/completions"

#: Of Dynamo 1.5.1: name -> (type, labels without ``le``).
OF_DYNAMO = {
    "dynamo_frontend_requests": ("counter", "endpoint error_type model request_type status"),
    "dynamo_frontend_requests_started": ("counter", "endpoint model request_type"),
    "dynamo_frontend_active_requests": ("gauge", "model"),
    "dynamo_frontend_inflight_requests": ("gauge", "model"),
    "dynamo_frontend_queued_requests": ("gauge", "model"),
    "dynamo_frontend_stage_requests": ("gauge", "phase stage"),
    "dynamo_frontend_stage_duration_seconds": ("histogram", "stage"),
    "dynamo_frontend_disconnected_clients": ("gauge", ""),
    "dynamo_frontend_model_cancellation": ("counter", "endpoint model request_type"),
    "dynamo_frontend_model_rejection": ("counter", "endpoint model"),
    "dynamo_frontend_model_migration": ("counter", "migration_type model"),
    "dynamo_frontend_model_migration_duration_seconds": (
        "histogram",
        "migration_type model outcome",
    ),
    "dynamo_frontend_model_migration_max_seq_len_exceeded": ("counter", "model"),
    "dynamo_frontend_model_migration_limit": ("gauge", "model"),
    "dynamo_frontend_model_ready": ("gauge", "model"),
    "dynamo_frontend_model_context_length": ("gauge", "model"),
    "dynamo_frontend_model_kv_cache_block_size": ("gauge", "model"),
    "dynamo_frontend_model_max_num_seqs": ("gauge", "model"),
    "dynamo_frontend_model_max_num_batched_tokens": ("gauge", "model"),
    "dynamo_frontend_model_total_kv_blocks": ("gauge", "model"),
    "dynamo_frontend_time_to_first_token_seconds": ("histogram", "model"),
    "dynamo_frontend_inter_token_latency_seconds": ("histogram", "model"),
    "dynamo_frontend_request_duration_seconds": ("histogram", "model"),
    "dynamo_frontend_input_sequence_tokens": ("histogram", "model"),
    "dynamo_frontend_output_sequence_tokens": ("histogram", "model"),
    "dynamo_frontend_cached_tokens": ("histogram", "model"),
    "dynamo_frontend_output_tokens": ("counter", "model"),
    "dynamo_frontend_worker_last_time_to_first_token_seconds": (
        "gauge",
        "dp_rank worker_id worker_type",
    ),
    "dynamo_frontend_worker_last_inter_token_latency_seconds": (
        "gauge",
        "dp_rank worker_id worker_type",
    ),
    "dynamo_frontend_worker_last_input_sequence_tokens": (
        "gauge",
        "dp_rank worker_id worker_type",
    ),
    "dynamo_request_plane_queue_seconds": ("histogram", ""),
    "dynamo_request_plane_send_seconds": ("histogram", ""),
    "dynamo_request_plane_roundtrip_ttft_seconds": ("histogram", ""),
    "dynamo_request_plane_inflight_requests": ("gauge", ""),
}
_ROUTER = "dynamo_component dynamo_namespace router_id worker_id"
for _name, _type in (
    *(("requests", "counter"), ("requests_started", "counter")),
    *(("time_to_first_token_seconds", "histogram"), ("inter_token_latency_seconds", "histogram")),
    *(("input_sequence_tokens", "histogram"), ("output_sequence_tokens", "histogram")),
):
    OF_DYNAMO[f"dynamo_component_router_{_name}"] = (_type, _ROUTER)


def chat(**fields: Any) -> dict[str, Any]:
    content = [{"role": "user", "content": "hi"}]
    return {"model": "sim", "messages": content, "max_tokens": 3, "ignore_eos": True, **fields}


def scrape(site: Site) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name of a sample -> its labels -> its value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    text = site.frontend.metrics.exposition().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def total(site: Site, name: str, **labels: str) -> float:
    """The sum of all samples that have these labels."""
    wanted = set(labels.items())
    return sum(v for k, v in scrape(site).get(f"dynamo_{name}", {}).items() if wanted <= set(k))


def check_books(site: Site, running: int = 0) -> None:
    """Whatever was started has ended, or runs."""
    ended = total(site, "frontend_requests_total")
    assert total(site, "frontend_requests_started_total") == ended + running
    assert total(site, "frontend_active_requests") == running
    assert total(site, "frontend_inflight_requests") == running
    cancelled = total(site, "frontend_requests_total", error_type="cancelled")
    assert total(site, "frontend_model_cancellation_total") == cancelled
    overload = total(site, "frontend_requests_total", error_type="overload")
    assert total(site, "frontend_model_rejection_total") == overload
    success = total(site, "frontend_requests_total", status="success")
    assert ended == success + total(site, "frontend_requests_total", status="error")


async def test_every_metric_of_dynamos_frontend_is_there_with_its_type_and_labels(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        await site.client.ask("POST", CHAT, chat())
        leaver = site.client.start("POST", CHAT, chat(max_tokens=400, stream=True))
        await trio.sleep(1)
        leaver.leave()
        await leaver.done.wait()
        text = site.frontend.metrics.exposition().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, (kind, labels) in OF_DYNAMO.items():
        assert families[name].type == kind, name
        for sample in families[name].samples:
            assert sorted(sample.labels.keys() - {"le"}) == labels.split(), name
    for name in OF_DYNAMO.keys() - NEVER_YET:
        assert families[name].samples, f"{name} has no value"


#: What takes a worker that fails, or is full, or a card that says so.
NEVER_YET = {
    "dynamo_frontend_model_migration",
    "dynamo_frontend_model_migration_duration_seconds",
    "dynamo_frontend_model_migration_max_seq_len_exceeded",
    "dynamo_frontend_model_rejection",
    "dynamo_frontend_model_max_num_seqs",
    "dynamo_frontend_model_max_num_batched_tokens",
    "dynamo_frontend_model_total_kv_blocks",
}


async def test_a_request_is_seen_in_each_of_its_stages(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(prefill_ms=1000.0) as site:
        answer = site.client.start("POST", CHAT, chat(stream=True, max_tokens=4))
        await trio.sleep(0.5)
        assert total(site, "frontend_queued_requests", model="sim") == 1
        assert total(site, "frontend_stage_requests", stage="dispatch", phase="aggregated") == 1
        assert total(site, "frontend_stage_requests") == 1
        assert total(site, "request_plane_inflight_requests") == 1
        check_books(site, running=1)
        await trio.sleep(0.75)
        assert total(site, "frontend_queued_requests") == 0
        assert total(site, "frontend_stage_requests") == 0
        assert 0 < total(site, "frontend_output_tokens_total") < 4  # it grows meanwhile
        await answer.done.wait()
        assert total(site, "frontend_output_tokens_total") == 4
        assert total(site, "request_plane_inflight_requests") == 0
        for stage in ("preprocess", "route", "transport_roundtrip"):
            name = "frontend_stage_duration_seconds_count"
            assert total(site, name, stage=stage) == 1
        spent = total(site, "frontend_stage_duration_seconds_sum", stage="transport_roundtrip")
        assert spent == pytest.approx(total(site, "frontend_time_to_first_token_seconds_sum"))
        assert spent >= 1.0
        assert total(site, "frontend_inter_token_latency_seconds_count") == 3
        assert total(site, "frontend_inter_token_latency_seconds_sum") == pytest.approx(0.3)
        check_books(site)


async def test_what_is_told_of_a_worker_goes_with_it(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        await site.client.ask("POST", CHAT, chat())
        labels = {"worker_id": str(site.runtime.instance_id), "dp_rank": "none"}
        last = "frontend_worker_last"
        assert total(site, f"{last}_inter_token_latency_seconds", **labels) == pytest.approx(0.1)
        prompt = total(site, f"{last}_input_sequence_tokens", **labels)
        assert prompt == total(site, "frontend_input_sequence_tokens_sum")
        assert total(site, "frontend_model_ready", model="sim") == 1
        assert total(site, "frontend_model_context_length", model="sim") == 512
        instance: Instance = site.frontend.catalog.find("sim").client.instances()[0]
        await site.runtime.unregister(instance)
        await trio.sleep(1)
        assert total(site, f"{last}_input_sequence_tokens") == 0
        assert scrape(site)["dynamo_frontend_model_ready"] == {(("model", "sim"),): 0.0}


async def test_disconnected_clients_fall_again(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        seen = []
        answers = [site.client.start("POST", CHAT, chat(max_tokens=400)) for _ in range(3)]
        await trio.sleep(1)
        for answer in answers:
            answer.leave()
        for _ in range(20):  # while they go
            seen.append(total(site, "frontend_disconnected_clients"))
            await trio.lowlevel.checkpoint()
        for answer in answers:
            await answer.done.wait()
        assert max(seen) == 3
        assert total(site, "frontend_disconnected_clients") == 0
        assert total(site, "frontend_model_cancellation_total", request_type="unary") == 3
        check_books(site)


async def test_the_names_may_begin_otherwise() -> None:
    metrics = FrontendMetrics("mine")
    text = metrics.exposition().decode()
    assert "dynamo_frontend" not in text
    assert "# TYPE mine_requests_total counter" in text
    assert "# TYPE dynamo_request_plane_send_seconds histogram" in text


def test_a_distribution_counts_as_prometheus_does() -> None:
    some = Distribution((0.0, 1.0, 2.0))
    for value in (0.0, 0.5, 1.0, 1.5, 7.0):
        some.observe(value)
    some.observe(2.0, times=3)
    assert some.counts == [1, 2, 4, 1]
    assert (some.count, some.total) == (8, 16.0)


def test_a_histogram_is_exposed_with_its_buckets_added_up() -> None:
    metrics = FrontendMetrics()
    family = HistogramFamily("h", "text", ("model",), (1.0, 2.0), metrics.registry)
    family.labels("m").observe(1.5, times=2)
    lines = [one for one in metrics.exposition().decode().splitlines() if one.startswith("h_")]
    assert lines == [
        'h_bucket{le="1",model="m"} 0.0',  # as Dynamo writes it
        'h_bucket{le="2",model="m"} 2.0',
        'h_bucket{le="+Inf",model="m"} 2.0',
        'h_count{model="m"} 2.0',
        'h_sum{model="m"} 3.0',
    ]


@pytest.mark.parametrize("kind", ["cancelled", "overload", "validation"])
def test_a_refusal_is_counted_under_all_its_names(kind: str) -> None:
    metrics = FrontendMetrics()
    metrics.refused("m", "completions", "unary", kind, 0.5)
    text = metrics.exposition().decode()
    assert f'error_type="{kind}"' in text
    assert 'request_duration_seconds_count{model="m"} 1' in text
    assert ("model_cancellation_total{" in text) is (kind == "cancelled")
    assert ("model_rejection_total{" in text) is (kind == "overload")


# --- the books, whatever happens -------------------------------------------------------------


async def _visitor(site: Site, rng: random.Random, answers: list[Answer]) -> None:
    """One client, who does something that clients do."""
    await trio.sleep(rng.uniform(0, 3))
    stream = rng.random() < 0.5
    body: Any = chat(stream=stream, max_tokens=rng.randint(1, 30))
    headers = {}
    match rng.randrange(8):
        case 0:
            body = b"{"
        case 1:
            body["model"] = "nobody"
        case 2:
            body["temperature"] = 9
        case 3:
            body["messages"][0]["content"] = "x" * 600
        case 4:
            headers["x-dynamo-trio-deadline-secs"] = "0.5"
    answer = site.client.start("POST", CHAT, body, headers)
    answers.append(answer)
    if rng.random() < 0.4:
        with trio.move_on_after(rng.uniform(0, 2)):
            await answer.done.wait()
        answer.leave()
    await answer.done.wait()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))]
)
@pytest.mark.parametrize("end", ["idle", "stop", "engine dies"])
async def test_whatever_was_started_has_ended_in_one_way(
    open_site: Opener, autojump_clock: MockClock, seed: int, end: str
) -> None:
    rng = random.Random(f"{end} {seed}")
    answers: list[Answer] = []
    async with open_site() as site:
        async with trio.open_nursery() as nursery:
            for _ in range(25):
                nursery.start_soon(_visitor, site, rng, answers)
            await trio.sleep(1.5)
            running = total(site, "frontend_active_requests")
            check_books(site, running=int(running))  # also in the middle of it
            if end == "stop":
                site.lifecycle.request_stop("SIGTERM")
            elif end == "engine dies":
                site.core.arm(Fault.DIE)
        assert len(answers) == 25
        assert total(site, "frontend_requests_started_total") == 25
        check_books(site)
        assert total(site, "frontend_disconnected_clients") == 0
        routed = total(site, "component_router_requests_started_total")
        assert total(site, "component_router_requests_total") == routed > 0
