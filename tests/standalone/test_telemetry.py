"""A whole process that logs JSON lines and exports spans."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import attrs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.standalone.harness import PATIENCE, ask, chat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.standalone.conftest import Start

CHAT = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine-1"}


@attrs.define(eq=False)
class Collector:
    """What an OpenTelemetry collector has received."""

    url: str
    posts: list[ExportTraceServiceRequest] = attrs.field(factory=list)

    def spans(self) -> list[tuple[str, str]]:
        """(name, trace id) of each span, in the order of their names."""
        return sorted(
            (span.name, span.trace_id.hex())
            for post in self.posts
            for resource in post.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        )

    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for post in self.posts
            for resource in post.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }


@contextmanager
def collecting(*, answers: bool = True) -> Iterator[Collector]:
    """A collector on a port of its own, which may never answer."""
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if not answers:
                released.wait(PATIENCE)
            collector.posts.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: it is not what is tested."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def exporting(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORT_ENABLED": "1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "tested",
    }


def test_each_line_is_an_object_and_spans_leave_before_the_end(start_sim: Start) -> None:
    more = {"DYN_LOGGING_JSONL": "1", "DYN_LOG": "debug"}
    with collecting() as collector:
        server = start_sim(**exporting(collector), **more)
        port = int(server.wait_log("listening on").rpartition(":")[2].split('"')[0])
        server.wait_ready()
        assert ask(port, "POST", CHAT, chat(3), **HEADERS).status == 200
        assert ask(port, "POST", CHAT, {"model": "sim"}, **HEADERS).status == 400
        assert server.stop() == 0
        names = ["handle_payload", "http-request", "http-request"]
        assert collector.spans() == [(name, TRACE) for name in names]
        assert collector.services() == {"tested"}
    entries = [json.loads(line) for line in server.lines]
    ours = [entry for entry in entries if entry.get("trace_id") == TRACE]
    assert {entry["x_request_id"] for entry in ours} == {"mine-1"}
    (front,) = [entry for entry in ours if "complete" in entry["message"]]
    (back,) = [entry for entry in ours if entry["target"] == "dynamo_trio.endpoint"]
    assert (front["target"], front["span_id"]) == ("dynamo_trio.frontend", back["parent_id"])
    assert back["request_id"] == front["request_id"]


def test_a_collector_that_does_not_answer_holds_no_exit(start_sim: Start) -> None:
    with collecting(answers=False) as collector:
        server = start_sim(**exporting(collector)).wait_ready()
        assert ask(server.port, "POST", CHAT, chat(3)).is_done
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 20  # two seconds, and ten times that
