"""A worker's status server: what it tells in each stage of the worker's life."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio

from dynamo_trio.config.programs import LIBRARY
from dynamo_trio.errors import CardUnusable, DynamoException
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.server import open_listeners, serve_http
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.models.card_loader import fetch_card
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.testing import make_model_folder
from dynamo_trio.wire.names import EndpointId
from dynamo_trio.worker.status import WorkerStatus
from dynamo_trio.worker.status_app import LIMITS, StatusApp
from dynamo_trio.worker.status_server import serve_status
from tests.http.harness import PATIENCE, client_of, running, shut_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from dynamo_trio.http.asgi import App

GENERATE = EndpointId("dynamo", "backend", "generate")


async def generate(request: object) -> AsyncGenerator[object, None]:
    yield request
    await trio.sleep_forever()


@attrs.define(eq=False)
class Site:
    status: WorkerStatus
    app: App
    lifecycle: Lifecycle
    http: httpx.AsyncClient
    runtime: DistributedRuntime | None = None

    async def ask(self, path: str, method: str = "GET", **more: Any) -> tuple[int, Any]:
        answer = await self.http.request(method, path, **more)
        return answer.status_code, answer.json()

    async def stage(self) -> str:
        """What /health says; /live must be 200 at the same time."""
        assert (await self.ask("/live"))[0] == 200
        code, body = await self.ask("/health")
        assert (code, body["status"]) == (
            (200, "ready") if body["stage"] == "ready" else (503, "notready")
        )
        return str(body["stage"])


def make_site(**limits: float) -> Site:
    lifecycle = Lifecycle(Timetable(**limits))  # type: ignore[arg-type]  # all are seconds
    status = WorkerStatus(lifecycle)
    app = StatusApp(status)
    transport = httpx.ASGITransport(app)
    return Site(status, app, lifecycle, httpx.AsyncClient(transport=transport, base_url="http://w"))


@asynccontextmanager
async def open_site(**limits: float) -> AsyncIterator[Site]:
    """A worker that is ready."""
    site = make_site(**limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.lifecycle.run)
        async with open_runtime(site.lifecycle) as runtime:
            site.runtime = runtime
            site.status.attach(runtime)
            async with runtime.endpoint(str(GENERATE)).serving(generate):
                yield site
                site.lifecycle.escalate("the test is over")
                await site.lifecycle.wait_stopped()


# --- probes ------------------------------------------------------------------------------------


async def test_live_is_200_and_health_503_before_there_is_a_runtime() -> None:
    site = make_site()
    assert await site.stage() == "loading"
    code, body = await site.ask("/live")
    assert (code, body["status"], body["endpoints"]) == (200, "live", {})
    assert (await site.http.get("/metrics")).status_code == 200


async def test_health_has_dynamos_fields() -> None:
    async with open_site() as site:
        answer = await site.http.get("/health")
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        uptime = body.pop("uptime")
        assert body == {"status": "ready", "stage": "ready", "endpoints": {"generate": "ready"}}
        assert set(uptime) == {"secs", "nanos"}
        assert 0 <= uptime["nanos"] < 10**9


async def test_an_endpoint_that_left_discovery_makes_the_worker_not_ready() -> None:
    async with open_site() as site:
        assert site.runtime is not None
        await site.runtime.unregister(site.runtime.served(GENERATE))
        code, body = await site.ask("/health")
        assert (code, body["status"]) == (503, "notready")
        assert body["endpoints"] == {"generate": "notready"}
        assert (await site.ask("/live"))[0] == 200


async def test_every_stage_of_a_stop_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async with open_site(grace=5.0, drain=10.0) as site:
        assert site.runtime is not None
        seen = [await site.stage()]
        async with (
            site.runtime.endpoint(str(GENERATE)).client() as client,
            trio.open_nursery() as nursery,
        ):

            async def hang() -> None:
                async with client.generate({}) as stream:
                    with suppress(DynamoException):
                        async for _ in stream:
                            pass

            nursery.start_soon(hang)
            await trio.testing.wait_all_tasks_blocked()
            site.lifecycle.request_stop("test")
            seen.append(await site.stage())  # from the first instant
            while (stage := await site.stage()) != "drained":
                if stage != seen[-1]:
                    seen.append(stage)
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        # STOPPING lasts only until the farewells are said.
        assert [s for s in seen if s != "stopping"] == ["ready", "grace", "draining"]
        assert trio.current_time() >= 15.0


async def test_the_operator_may_choose_the_paths() -> None:
    site = make_site()
    app = StatusApp(site.status, health_path="/readyz", live_path="/metrics")
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w")
    assert (await http.get("/readyz")).json()["stage"] == "loading"
    assert (await http.get("/metrics")).json()["status"] == "live"
    assert (await http.get("/health")).status_code == 404


async def test_head_is_answered_without_a_body_by_the_real_server() -> None:
    async with serving(make_site().app) as base, httpx.AsyncClient() as http:
        answer = await http.head(f"{base}/live")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


# --- metrics -----------------------------------------------------------------------------------


async def test_both_uptimes_are_that_of_the_process() -> None:
    site = make_site()
    site.status.began -= 1000.0  # as of a program that took its time to start
    async with open_runtime() as runtime:
        site.status.attach(runtime)
        lines = (await site.http.get("/metrics")).text.splitlines()
        (told,) = [line.split()[-1] for line in lines if "uptime_seconds{" in line]
        _, health = await site.ask("/health")
    assert 1000.0 <= float(told) < 2000.0
    assert 1000 <= health["uptime"]["secs"] < 2000


async def test_metrics_have_dynamos_names() -> None:
    async with open_site() as site:
        answer = await site.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
        assert lines["dynamo_work_handler_pool_active_tasks"] == "0.0"
        assert lines["dynamo_work_handler_pool_capacity"] == "+Inf"
        assert lines["dynamo_work_handler_queue_depth"] == "0.0"
        (uptime,) = [v for k, v in lines.items() if "component_uptime_seconds{worker_id=" in k]
        assert float(uptime) >= 0


# --- what is not there -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nosuch", "Route /nosuch not found"),
        ("/", "Route / not found"),
        ("/engine/", "Route /engine/ not found"),
        ("/v1/loras", "Route /v1/loras not found"),
        ("/engine/foo", "Route /engine/foo not found"),
        ("/engine/foo/", "Route /engine/foo/ not found"),
    ],
)
async def test_unknown_routes_are_404_in_json(path: str, message: str) -> None:
    async with open_site() as site:
        assert await site.ask(path) == (404, {"error": "Route not found", "message": message})


async def test_discovery_metadata_is_kubernetes_own() -> None:
    site = make_site()
    assert await site.ask("/metadata") == (
        404,
        {"error": "Not found", "message": "Discovery metadata not available"},
    )


@pytest.mark.parametrize("path", ["/health", "/live", "/metrics", "/v1/metadata/x"])
async def test_only_reading_is_allowed(path: str) -> None:
    answer = await make_site().http.post(path, content=b"{}")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.json()["error"] == "Method not allowed"


async def test_a_failure_inside_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    site = make_site()
    site.status.began = None  # type: ignore[assignment]  # makes the handler fail
    code, body = await site.ask("/live")
    assert (code, body["error"]) == (500, "Internal error")
    assert "GET /live failed" in caplog.text


async def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await make_site().app({"type": "websocket", "path": "/"}, receive, send)
    await make_site().app({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- engine routes -----------------------------------------------------------------------------


async def test_engine_routes_take_and_give_json() -> None:
    async with open_site() as site:
        assert site.runtime is not None
        seen = []

        async def echo(body: dict[str, object]) -> object:
            seen.append(body)
            return {"you": body}

        site.runtime.register_engine_route("control/echo", echo)
        path = "/engine/control/echo"
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert await site.ask(path, method, content=b'{"a": 1}') == (200, {"you": {"a": 1}})
        assert await site.ask(path, content=b"") == (200, {"you": {}})
        assert await site.ask(f"{path}?x=1", "POST") == (200, {"you": {}})
        assert seen[-1] == {}


@pytest.mark.parametrize("body", [b"not json", b"[1]", b"7", b"null", b"{", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_400(body: bytes) -> None:
    async with open_site() as site:
        assert site.runtime is not None
        site.runtime.register_engine_route("never", never_called)
        code, answer = await site.ask("/engine/never", "POST", content=body)
        assert (code, answer["error"]) == (400, "Invalid JSON")
        assert answer["message"]


async def never_called(_body: dict[str, object]) -> object:
    raise AssertionError


async def test_a_body_above_the_limit_is_413() -> None:
    async with open_site() as site:
        assert site.runtime is not None
        site.runtime.register_engine_route("never", never_called)
        app = StatusApp(site.status, limits=HttpLimits(body_bytes=10))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w")
        answer = await http.post("/engine/never", content=b'{"a": "0123456789"}')
        assert (answer.status_code, answer.json()["error"]) == (413, "Bad request")


async def test_a_callback_that_fails_is_a_500_with_the_reason() -> None:
    async with open_site() as site:
        assert site.runtime is not None

        async def fail(_body: dict[str, object]) -> object:
            raise ValueError("boom")

        async def strange(_body: dict[str, object]) -> object:
            return object()

        site.runtime.register_engine_route("fail", fail)
        site.runtime.register_engine_route("strange", strange)
        assert await site.ask("/engine/fail", "POST") == (
            500,
            {"error": "Handler error", "message": "Python callback failed: ValueError: boom"},
        )
        code, body = await site.ask("/engine/strange", "POST")
        assert (code, body["error"]) == (500, "Handler error")


# --- the files of the card ---------------------------------------------------------------------

BASE = "/v1/metadata/dynamo/backend/generate/tiny/_base"


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[str]:
    """The app on a real port; yields its base URL."""
    listeners = await open_listeners("127.0.0.1", 0)
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, app, listeners)
        yield f"http://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


def offer(site: Site, folder: Path, base_url: str = "http://w") -> Any:
    card = make_card(folder, name="tiny", endpoint=GENERATE, instance_id=7, base_url=base_url)
    site.status.cards.offer(card)
    return card


async def test_a_card_can_be_fetched_from_its_worker(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    site = make_site()
    async with serving(site.app) as base:
        card = offer(site, folder, base)
        fetched = await fetch_card(card.card_json, tmp_path / "cache")
    assert sorted(p.name for p in fetched.iterdir()) == sorted(p.name for p in folder.iterdir())
    for file in folder.iterdir():
        assert (fetched / file.name).read_bytes() == file.read_bytes()


async def test_the_files_of_a_card_that_is_served_are_offered(tmp_path: Path) -> None:
    site = make_site()
    site.status.url = "http://w"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.lifecycle.run)
        async with open_runtime(site.lifecycle) as runtime:
            site.status.attach(runtime)
            assert runtime.status_url == "http://w"
            folder = make_model_folder(tmp_path)
            card = make_card(
                folder, name="tiny", endpoint=GENERATE, instance_id=7, base_url=runtime.status_url
            )
            assert (await site.http.get(f"{BASE}/config.json")).status_code == 404
            async with runtime.endpoint(str(GENERATE)).serving(generate, card=card):
                answer = await site.http.get(f"{BASE}/config.json")
            nursery.cancel_scope.cancel()
    assert answer.content == (folder / "config.json").read_bytes()


async def test_files_are_octets(tmp_path: Path) -> None:
    site = make_site()
    offer(site, make_model_folder(tmp_path))
    answer = await site.http.get(f"{BASE}/config.json")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content == (tmp_path / "config.json").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        f"{BASE}/secret.txt",
        f"{BASE}/../_base/config.json",
        f"{BASE}/..%2f..%2fsecret.txt",
        f"{BASE}/%2e%2e/secret.txt",
        f"{BASE}/",
        f"{BASE}//config.json",
        f"{BASE}/config.json/",
        "/v1/metadata/other/backend/generate/tiny/_base/config.json",
        "/v1/metadata//etc/passwd",
    ],
)
async def test_no_other_file_is_given_out(tmp_path: Path, path: str) -> None:
    folder = make_model_folder(tmp_path / "model")
    for place in (folder, tmp_path):
        (place / "secret.txt").write_text("secret")
    site = make_site()
    offer(site, folder)
    async with serving(site.app) as base:
        answer = await raw_get(base, path)
    assert b"404" in answer.splitlines()[0]
    assert b'"Not found"' in answer
    assert b"secret" not in answer


async def raw_get(base: str, path: str) -> bytes:
    """A GET whose path no client library has tidied up."""
    port = int(base.rsplit(":", 1)[1])
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n"
    async with stream:
        await stream.send_all(head.encode())
        return b"".join([piece async for piece in stream])


async def test_a_file_that_vanished_is_a_404(tmp_path: Path) -> None:
    site = make_site()
    offer(site, make_model_folder(tmp_path))
    (tmp_path / "config.json").unlink()
    code, body = await site.ask(f"{BASE}/config.json")
    assert (code, body["error"]) == (404, "Not found")


async def test_a_file_that_changed_is_not_believed(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    site = make_site()
    async with serving(site.app) as base:
        card = offer(site, folder, base)
        (folder / "config.json").write_text(json.dumps({"x": 1}))
        with pytest.raises(CardUnusable, match=r"config\.json .* bytes; the card says"):
            await fetch_card(card.card_json, tmp_path / "cache")


async def test_many_who_ask_at_once_share_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()
    offer(site, make_model_folder(tmp_path))
    cards = site.status.cards
    path = cards.find(f"{BASE}/tokenizer.json")
    assert path is not None
    contents: list[bytes] = []

    async def use() -> None:
        async with cards.content(path) as content:
            contents.append(content)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(use)
    assert len({id(content) for content in contents}) == 1
    path.write_bytes(b"new")
    async with cards.content(path) as content:  # nothing is kept
        assert content == b"new"


async def test_a_crowd_that_takes_no_answers_does_not_keep_probes_out() -> None:
    limits = attrs.evolve(LIMITS, max_connections=4)
    app = StatusApp(WorkerStatus(Lifecycle(Timetable())), limits=limits)
    async with running(app, limits) as server, AsyncExitStack() as crowd:
        for _ in range(8):
            stream = await crowd.enter_async_context(await server.connect())
            await stream.send_all(shut_request("/live"))
        await server.wait_until(lambda: server.server.statistics().busy == 4)
        async with client_of(server) as probe:
            # Those before it give way to it, at the latest after a second.
            with trio.fail_after(PATIENCE):
                assert (await probe.ask("GET", "/live")).status == 200
        assert server.server.accepted == 9


def test_the_limits_are_below_those_of_a_frontend() -> None:
    ours, theirs = attrs.asdict(LIMITS), attrs.asdict(HttpLimits())
    assert ours["max_connections"] == 256
    assert all(ours[name] <= theirs[name] for name in theirs)


async def said(probe: trio.SocketStream, path: str) -> bytes:
    """What the server says to one more request on the connection."""
    await probe.send_all(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    text = await probe.receive_some()
    while text and not text.endswith(b"}"):
        text += await probe.receive_some()
    return text


async def test_who_must_be_aborted_does_not_take_the_port_along() -> None:
    """A stop that resets the connections of its clients goes on answering probes."""
    config = LIBRARY.read_config(["--system-host", "127.0.0.1", "--system-port", "0"])
    lifecycle = Lifecycle(Timetable(grace=0.0, drain=0.0, stop=0.2, farewell=0.1))
    status = WorkerStatus(lifecycle)
    async with trio.open_nursery() as services:
        await serve_status(status, services, config)
        services.start_soon(lifecycle.run)
        port = httpx.URL(status.url or "").port
        assert port is not None
        async with await trio.open_tcp_stream("127.0.0.1", port) as probe:
            with lifecycle.work.admit("generate stuck"), trio.fail_after(PATIENCE):
                assert (await said(probe, "/live")).startswith(b"HTTP/1.1 200 OK\r\n")
                lifecycle.request_stop("SIGTERM")
                await lifecycle.wait_stopped()
                assert (await said(probe, "/live")).startswith(b"HTTP/1.1 200 OK\r\n")
                assert (await said(probe, "/health")).startswith(
                    b"HTTP/1.1 503 Service Unavailable\r\n"
                )
        services.cancel_scope.cancel("the test is over")
