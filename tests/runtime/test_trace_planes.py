"""The trace of a request: over every plane, from one handler to the next, and in the log."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio import Context, Timetable
from dynamo_trio.console.logs import JsonFormatter, TextFormatter, request_id, trace
from dynamo_trio.lifecycle import Lifecycle
from dynamo_trio.runtime import open_runtime
from dynamo_trio.wire.trace import TraceContext
from tests.runtime.real_planes import plane_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dynamo_trio.client import Client
    from dynamo_trio.runtime import DistributedRuntime

    Items = AsyncGenerator[Any, None]

PLANES = ("mem", "tcp", "mux")
HEADERS = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=b",
    "x-request-id": "mine",
}
OUTSIDE = TraceContext.following(HEADERS)


async def tell(request: Any, context: Context) -> Items:
    """What a handler sees of its request's trace."""
    del request
    yield {
        "trace": context.trace_id,
        "span": context.span_id,
        "parent": context.parent_span_id,
        "headers": context.trace_headers(),
        "metadata": dict(context.metadata),
        "log": json.loads(JsonFormatter().format(_record())),
        "text": TextFormatter(color=False, date=False).format(_record()),
    }


def _record() -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "", 0, "in the handler", (), None)


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[DistributedRuntime]:
    lifecycle = Lifecycle(Timetable(grace=0.0))
    async with plane_of(kind) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle, planes=[plane]) as runtime:
            yield runtime
            lifecycle.request_stop("the test is over")
            await lifecycle.wait_stopped()


async def ask(client: Client, context: Context | None = None) -> Any:
    await client.wait_for_instances()
    async with client.round_robin({}, context) as stream:
        (item,) = [item async for item in stream]
    return item


@pytest.mark.parametrize("kind", PLANES)
async def test_a_handler_and_its_log_lines_know_the_trace(kind: str) -> None:
    async with opened(kind) as runtime:
        endpoint = runtime.endpoint("test.backend.tell")
        async with endpoint.client() as client, endpoint.serving(tell):
            seen = await ask(client, Context("r-1", {"a": "b"}, trace=OUTSIDE))
    assert (seen["trace"], seen["parent"]) == (OUTSIDE.trace_id, OUTSIDE.span_id)
    assert seen["span"] not in (OUTSIDE.span_id, OUTSIDE.parent_id)
    assert seen["headers"] == {
        "traceparent": f"00-{OUTSIDE.trace_id}-{seen['span']}-01",
        "tracestate": "a=b",
        "x-request-id": "mine",
        "request-id": "r-1",
    }
    assert seen["metadata"] == {"a": "b"}
    log = seen["log"]
    assert {k: log[k] for k in log if k not in ("time", "level", "target", "message")} == {
        "request_id": "r-1",
        "trace_id": OUTSIDE.trace_id,
        "span_id": seen["span"],
        "parent_id": OUTSIDE.span_id,
        "trace_flags": "01",
        "x_request_id": "mine",
    }
    assert seen["text"].endswith("in the handler [mine]")


@pytest.mark.parametrize("kind", PLANES)
async def test_whoever_says_nothing_begins_a_trace_at_the_worker(kind: str) -> None:
    async with opened(kind) as runtime:
        endpoint = runtime.endpoint("test.backend.tell")
        async with endpoint.client() as client, endpoint.serving(tell):
            one, two = await ask(client), await ask(client)
    assert one["parent"] is None
    assert one["trace"] != two["trace"]
    assert one["log"].keys() & {"parent_id", "x_request_id", "trace_flags"} == set()
    assert one["log"]["trace_id"] == one["trace"]


async def test_a_handler_that_asks_another_passes_its_trace_on(autojump_clock: object) -> None:
    async with opened("mem") as runtime:
        back, front = runtime.endpoint("test.backend.tell"), runtime.endpoint("test.front.pass")
        async with back.client() as inner, back.serving(tell):

            async def pass_on(request: Any, context: Context) -> Items:
                await inner.wait_for_instances()
                # With its own context, with a new one, and with none.
                for given in (context, Context("another"), None):
                    async with inner.round_robin(request, given) as stream:
                        async for item in stream:
                            yield {"outer": context.span_id, **item}

            async with front.client() as client, front.serving(pass_on):
                await client.wait_for_instances()
                async with client.round_robin({}, Context("r", trace=OUTSIDE)) as stream:
                    seen = [item async for item in stream]
    assert len(seen) == 3
    for item in seen:
        assert item["trace"] == OUTSIDE.trace_id
        assert item["parent"] == item["outer"]
        assert item["headers"]["x-request-id"] == "mine"


def test_a_context_without_a_trace_has_none() -> None:
    context = Context("r")
    assert (context.trace_id, context.span_id, context.parent_span_id) == (None, None, None)
    assert context.trace_headers() is None
    child = Context("r", trace=OUTSIDE).child("s")
    assert child.span_id == OUTSIDE.span_id


async def test_a_line_outside_of_any_request_carries_nothing() -> None:
    assert (request_id.get(), trace.get()) == (None, None)
    found = json.loads(JsonFormatter().format(_record()))
    assert sorted(found) == ["level", "message", "target", "time"]
