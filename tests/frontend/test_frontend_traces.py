"""The trace of an HTTP request: passed on to its worker, and recorded as spans."""

from __future__ import annotations

import importlib.util
import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynamo_trio.console.logs import JsonFormatter
from dynamo_trio.context import plain_cleanup
from dynamo_trio.errors import ConfigError
from dynamo_trio.testing import Fault
from dynamo_trio.tracing import OtelTracer, exporting, make_exporter, tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan
    from trio.testing import MockClock

    from tests.frontend.conftest import Opener

CHAT = "/v1/chat/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {
    "traceparent": f"00-{TRACE}-{SPAN}-01",
    "tracestate": "a=b",
    "x-request-id": "mine-1",
}


def chat(**fields: Any) -> dict[str, Any]:
    content = [{"role": "user", "content": "hi"}]
    return {"model": "sim", "messages": content, "max_tokens": 3, "ignore_eos": True, **fields}


class Lines(logging.Handler):
    """What a collector would be given, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.entries: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entries.append(json.loads(self.format(record)))

    def of(self, *targets: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["target"] in targets]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("dynamo_trio")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@contextmanager
def recorded() -> Iterator[InMemorySpanExporter]:
    """Spans of what the block starts."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    before = tracer.set(OtelTracer(provider))
    try:
        yield memory
    finally:
        tracer.reset(before)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_frontend_and_worker_log_the_same_ids(
    open_site: Opener, autojump_clock: MockClock, lines: Lines, stream: bool
) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", CHAT, chat(stream=stream), HEADERS)
        assert answer.headers["x-request-id"] == "mine-1"
    (front,) = [e for e in lines.of("dynamo_trio.frontend") if "complete" in e["message"]]
    (back,) = lines.of("dynamo_trio.endpoint")
    assert back["request_id"] == front["request_id"]
    given = answer.events()[0] if stream else answer.json()
    assert given["id"] == f"chatcmpl-{front['request_id']}"
    assert {e["trace_id"] for e in (front, back)} == {TRACE}
    assert {e["x_request_id"] for e in (front, back)} == {"mine-1"}
    assert front["parent_id"] == SPAN
    assert back["parent_id"] == front["span_id"] != back["span_id"]


async def test_a_client_without_a_trace_gets_one_and_a_request_id(
    open_site: Opener, autojump_clock: MockClock, lines: Lines
) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", CHAT, chat())
    (front,) = [e for e in lines.of("dynamo_trio.frontend") if "complete" in e["message"]]
    (back,) = lines.of("dynamo_trio.endpoint")
    assert front["trace_id"] == back["trace_id"]
    assert "parent_id" not in front
    assert {e["x_request_id"] for e in (front, back)} == {answer.headers["x-request-id"]}


async def test_what_belongs_to_no_request_carries_no_id(
    open_site: Opener, autojump_clock: MockClock, lines: Lines
) -> None:
    async with open_site() as site:
        await site.client.ask("POST", CHAT, chat(), HEADERS)
        logging.getLogger("dynamo_trio.test").info("beside it")
    (beside,) = lines.of("dynamo_trio.test")
    assert sorted(beside) == ["level", "message", "target", "time"]


async def test_a_request_is_two_spans_of_its_clients_trace(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    with recorded() as memory:
        async with open_site() as site:
            await site.client.ask("GET", "/live", headers=HEADERS)  # probes are not recorded
            await site.client.ask("POST", CHAT, chat(stream=True), HEADERS)
            worker = site.runtime.instance_id
    back, front = memory.get_finished_spans()
    assert (front.name, back.name) == ("http-request", "handle_payload")
    assert front.parent is not None
    assert back.parent is not None
    assert front.context is not None
    assert f"{front.context.trace_id:032x}" == TRACE
    assert f"{front.parent.span_id:016x}" == SPAN
    assert front.context.trace_state.to_header() == "a=b"
    assert (back.parent.trace_id, back.parent.span_id) == (
        front.context.trace_id,
        front.context.span_id,
    )
    told = attributes(front)
    assert told.pop("ttft_ms") >= 0
    assert told.pop("avg_itl_ms") == pytest.approx(100)
    assert told.pop("request_id") == attributes(back)["request_id"]
    assert told == {
        "method": "POST",
        "uri": CHAT,
        "version": "1.1",
        "endpoint": "chat_completions",
        "model": "sim",
        "request_type": "stream",
        "input_tokens": told["input_tokens"],
        "output_tokens": 3,
        "worker_id": str(worker),
        "request.outcome": "success",
    }
    assert front.status.is_ok
    assert attributes(back)["request.outcome"] == "finished"


async def test_every_span_ends_and_a_failed_one_says_why(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    with recorded() as memory:
        async with open_site() as site:
            await site.client.ask("POST", CHAT, b"{")
            leaver = site.client.start("POST", CHAT, chat(max_tokens=400))
            await trio.sleep(1)
            leaver.leave()
            await leaver.done.wait()
            broken = site.client.start("POST", CHAT, chat(stream=True, max_tokens=400))
            await trio.sleep(1)
            site.core.arm(Fault.DIE)
            await broken.done.wait()
            await site.stopped()
    fronts = [span for span in memory.get_finished_spans() if span.name == "http-request"]
    assert [span.status.description for span in fronts] == [
        "invalid_request",
        "cancelled",
        "unavailable",
    ]
    refused, left, _ = map(attributes, fronts)
    assert refused["request_type"] == "unary"
    assert (refused["request.outcome"], refused["error_type"]) == ("error", "validation")
    assert (left["request.outcome"], left["error_type"]) == ("error", "cancelled")
    assert len(memory.get_finished_spans()) == 5


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_without_the_sdk_the_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, missing: str, protocol: str
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return None if name.startswith(missing) else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORT_ENABLED: .*dynamo-trio\[otel\].*missing"):
        async with exporting("http://127.0.0.1:1", protocol, "dynamo", plain_cleanup):
            pass


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_each_protocol_has_its_exporter(protocol: str) -> None:
    exporter = make_exporter("http://127.0.0.1:1", protocol)
    assert protocol.partition("/")[0] in type(exporter).__module__
    exporter.shutdown()
