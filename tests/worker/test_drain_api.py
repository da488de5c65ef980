"""``/drain``, ``/resume`` and ``/debug/tasks`` of the status server."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import Draining, DynamoException
from dynamo_trio.http.server import open_listeners, serve_http
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.worker.callers import is_loopback
from dynamo_trio.worker.drain_api import DrainApi
from dynamo_trio.worker.status import WorkerStatus
from dynamo_trio.worker.status_app import StatusApp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from dynamo_trio.context import Context

GENERATE = "dynamo.backend.generate"


async def generate(request: float, context: Context) -> AsyncGenerator[object, None]:
    context.prospects.estimate = lambda: 2.5
    yield request
    await trio.sleep(request)


@attrs.define(eq=False)
class Site:
    status: WorkerStatus
    lifecycle: Lifecycle
    runtime: DistributedRuntime
    http: httpx.AsyncClient
    nursery: trio.Nursery

    async def ask(self, path: str, method: str = "GET", **more: Any) -> tuple[int, Any]:
        answer = await self.http.request(method, path, **more)
        return answer.status_code, answer.json()

    async def post(self, path: str, **more: Any) -> tuple[int, Any]:
        return await self.ask(path, "POST", **more)

    async def stage(self) -> str:
        """What /health says; /live must be 200 at the same time."""
        assert (await self.ask("/live"))[0] == 200
        code, body = await self.ask("/health")
        assert code == (200 if body["stage"] == "ready" else 503)
        return str(body["stage"])

    async def request(self, seconds: float) -> None:
        """A request that is in flight when this returns."""
        started = trio.Event()
        self.nursery.start_soon(self._request, seconds, started)
        await started.wait()

    async def _request(self, seconds: float, started: trio.Event) -> None:
        async with self.runtime.endpoint(GENERATE).client() as client:
            async with client.generate(seconds) as stream:
                with suppress(DynamoException):
                    async for _ in stream:
                        started.set()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - real sockets
        await trio.sleep(0.001)


def open_http(
    status: WorkerStatus, permission: dict[str, Any], *, host: str = "10.1.2.3"
) -> httpx.AsyncClient:
    app = StatusApp(status, drain=DrainApi(status, **permission))
    transport = httpx.ASGITransport(app, client=(host, 123))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9090")


@asynccontextmanager
async def open_site(
    *, permission: dict[str, Any] | None = None, **limits: float
) -> AsyncIterator[Site]:
    lifecycle = Lifecycle(Timetable(**limits))  # type: ignore[arg-type]  # all are seconds
    status = WorkerStatus(lifecycle)
    permission = {"is_local": True} if permission is None else permission
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            status.attach(runtime)
            async with runtime.endpoint(GENERATE).serving(generate):
                http = open_http(status, permission)
                yield Site(status, lifecycle, runtime, http, nursery)
                lifecycle.escalate("the test is over")
                await lifecycle.wait_stopped()
            nursery.cancel_scope.cancel("the test is over")


# --- what is told ------------------------------------------------------------------------------


async def test_a_process_that_serves(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        code, body = await site.ask("/drain")
        assert code == 200
        assert body == {
            "stage": "ready",
            "state": "serving",
            "phase": "serving",
            "cause": None,
            "remaining_seconds": None,
            "total_remaining_seconds": None,
            "in_flight": 0,
            "requests": [],
            "peers": {
                "known": 0,
                "unacknowledged": 0,
                "names": [],
                "cannot_acknowledge": False,
                "places": 0,
            },
            "last_outcome": None,
            "safe_to_delete": False,
            "report": None,
        }
        assert (await site.http.head("/drain")).status_code == 200


async def test_who_is_in_flight_and_until_when(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        await site.request(10.0)
        (admission,) = site.lifecycle.in_flight()
        admission.prospects.deadline = trio.current_time() + 3.0
        await trio.sleep(1.0)
        _, body = await site.ask("/drain")
        (one,) = body["requests"]
        assert one.pop("request") == admission.label
        assert one == {
            "age_seconds": 1.0,
            "estimate_seconds": 2.5,
            "deadline_seconds": 2.0,
            "expected_end_seconds": 2.0,
            "awaited": True,
            "movable": True,
            "cut": None,
        }


async def test_an_estimate_that_fails_is_none(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        await site.request(10.0)
        (admission,) = site.lifecycle.in_flight()
        admission.prospects.estimate = lambda: 1 / 0
        code, body = await site.ask("/drain")
        assert code == 200
        assert body["requests"][0]["estimate_seconds"] is None


async def test_many_requests_are_a_number(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        for _ in range(103):
            await site.request(10.0)
        _, body = await site.ask("/drain")
        assert body["in_flight"] == 103
        assert len(body["requests"]) == 100


async def test_a_stop_is_told_to_its_end(autojump_clock: MockClock) -> None:
    async with open_site(grace=2.0, drain=100.0, total=50.0) as site:
        await site.request(20.0)
        site.lifecycle.request_stop("SIGTERM")
        await trio.sleep(0.5)
        seen = []
        while (body := (await site.ask("/drain"))[1])["phase"] != "stopped":
            assert not body["safe_to_delete"] or not body["in_flight"]
            seen.append(body)
            await trio.sleep(1.0)
        assert {one["cause"] for one in seen} == {"SIGTERM"}
        phases = [one["phase"] for one in seen]
        assert phases == ["grace"] * 2 + ["draining"] * 18
        left = [one["remaining_seconds"] for one in seen if one["phase"] == "draining"]
        # The budget ends 5 s before the total.
        assert left == pytest.approx([42.5 - second for second in range(18)])
        assert [one["total_remaining_seconds"] for one in seen] == pytest.approx(
            [49.5 - second for second in range(20)]
        )
        last = seen[-1]["last_outcome"]
        assert (last["stage"], last["outcome"]) == ("grace", "timed_out")
        assert last["seconds"] == pytest.approx(2.0)
        assert seen[-1]["report"]["event"] == "shutdown_report"
        code, body = await site.ask("/drain")
        assert code == 200
        assert body["safe_to_delete"]
        assert body["last_outcome"]["outcome"] == "completed"
        assert body["report"]["requests"]["finished"] == 1


async def test_a_process_that_starts_has_nothing_to_drain() -> None:
    status = WorkerStatus(Lifecycle(Timetable()))
    http = open_http(status, {"is_local": True})
    answer = await http.get("/drain")
    assert answer.status_code == 200
    assert (answer.json()["stage"], answer.json()["safe_to_delete"]) == ("loading", False)
    answer = await http.post("/drain")
    assert answer.status_code == 409
    assert "still starting" in answer.json()["message"]


# --- what is asked for -------------------------------------------------------------------------


async def test_out_and_back(autojump_clock: MockClock) -> None:
    async with open_site(grace=1.0) as site:
        await site.request(5.0)
        code, body = await site.post("/drain")
        assert (code, body["state"], body["safe_to_delete"]) == (202, "draining", False)
        assert await site.stage() == "draining"
        assert site.runtime.endpoint_states() == {"generate": True}  # in a moment
        await trio.sleep(2.0)
        assert site.runtime.endpoint_states() == {"generate": False}
        assert await site.stage() == "draining"
        assert (await site.post("/drain"))[0] == 202  # again, to no effect
        code, body = await site.post("/drain?wait=true")
        assert (code, body["state"], body["safe_to_delete"]) == (200, "drained", True)
        assert body["last_outcome"] == {"stage": "drain", "outcome": "drained", "seconds": 5.0}
        assert await site.stage() == "drained"
        assert (await site.post("/drain"))[0] == 200
        code, body = await site.post("/resume?wait=1")
        assert (code, body["state"], body["safe_to_delete"]) == (200, "serving", False)
        assert await site.stage() == "ready"
        await site.request(1.0)
        assert (await site.post("/resume"))[0] == 200


async def test_a_request_to_a_drained_process_is_told_so(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        transports = site.runtime.served(site.runtime.endpoint(GENERATE).id).transports
        await site.post("/drain?wait=true")
        assert transports
        with pytest.raises(Draining, match="drained"), site.lifecycle.work.admit("late"):
            pass


async def test_whoever_waits_is_told_that_the_drain_was_taken_back(
    autojump_clock: MockClock,
) -> None:
    async with open_site(grace=0.0) as site:
        await site.request(100.0)
        answers: list[tuple[int, Any]] = []

        async def wait() -> None:
            answers.append(await site.post("/drain?wait=true"))

        site.nursery.start_soon(wait)
        await trio.sleep(1.0)
        assert answers == []
        assert (await site.post("/resume"))[0] in (200, 202)
        await wait_all_tasks_blocked()
        ((code, body),) = answers
        assert code == 409
        assert "taken back" in body["message"]
        assert await site.stage() == "ready"


async def test_what_registers_while_drained_is_found_afterwards(
    autojump_clock: MockClock,
) -> None:
    async with open_site(grace=0.0) as site:
        await site.post("/drain?wait=true")
        endpoint = site.runtime.endpoint("dynamo.backend.other")
        async with endpoint.serving(generate):
            assert site.runtime.endpoint_states() == {"generate": False, "other": False}
            await site.post("/resume?wait=true")
            assert site.runtime.endpoint_states() == {"generate": True, "other": True}


async def test_what_was_unregistered_on_purpose_stays_so(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        endpoint = site.runtime.endpoint(GENERATE)
        await site.post("/drain?wait=true")
        await endpoint.unregister_endpoint_instance()
        await site.post("/resume?wait=true")
        assert site.runtime.endpoint_states() == {"generate": False}
        await endpoint.register_endpoint_instance()
        assert site.runtime.endpoint_states() == {"generate": True}


async def test_there_is_no_way_back_from_a_stop(autojump_clock: MockClock) -> None:
    async with open_site(grace=5.0) as site:
        await site.request(2.0)
        await site.post("/drain")
        site.lifecycle.request_stop("SIGTERM")
        code, body = await site.post("/resume")
        assert code == 409
        assert "stopping" in body["message"]
        # The stop drains as well, and whoever waits is told of its end.
        code, body = await site.post("/drain?wait=true")
        assert (code, body["phase"], body["safe_to_delete"]) == (200, "stopped", True)


# --- who may ask -------------------------------------------------------------------------------

MAY: list[dict[str, bool]] = [{"allowed": True}, {"is_local": True}]
MAY_NOT: list[dict[str, bool]] = [{}, {"allowed": False, "is_local": True}]


@pytest.mark.parametrize("permission", MAY)
async def test_who_may(autojump_clock: MockClock, permission: dict[str, bool]) -> None:
    async with open_site(permission=permission, grace=0.0) as site:
        assert (await site.post("/drain?wait=true"))[0] == 200
        assert (await site.post("/resume?wait=true"))[0] == 200


@pytest.mark.parametrize("permission", MAY_NOT)
@pytest.mark.parametrize("path", ["/drain", "/resume"])
async def test_who_may_not(
    autojump_clock: MockClock, permission: dict[str, bool], path: str
) -> None:
    async with open_site(permission=permission, grace=0.0) as site:
        code, body = await site.post(path)
        assert code == 403
        assert "DYN_TRIO_DRAIN_API" in body["message"]
        assert await site.stage() == "ready"
        assert (await site.ask("/drain"))[0] == 200


async def test_a_web_page_may_not(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        code, body = await site.post("/drain", headers={"origin": "http://example.com"})
        assert code == 403
        assert "web pages" in body["message"]
        assert await site.stage() == "ready"


#: Host -> may it be the name of this machine that somebody's browser was told?
HOSTS = {
    "evil.example": False,
    "evil.example:9090": False,
    "127.0.0.1.evil.example": False,
    "localhost.evil.example": False,
    "[evil]:9090": False,
    "127.0.0.1": True,
    "10.1.2.3:9090": True,
    "[::1]:9090": True,
    "[fe80::1%25eth0]": True,
    "LOCALHOST:9090": True,
    "bound.example:9090": True,
    "": False,
}


@pytest.mark.parametrize(("name", "may"), HOSTS.items())
async def test_who_is_trusted_for_being_here_must_know_where_here_is(
    autojump_clock: MockClock, name: str, may: bool
) -> None:
    local = {"is_local": True, "host": "bound.example"}
    async with open_site(permission=local, grace=0.0) as site:
        headers = {"host": name}
        assert (await site.ask("/drain", headers=headers))[0] == 200
        for path in ("/drain", "/resume"):
            code, body = await site.post(path, headers=headers)
            assert code == 403 if not may else code in (200, 202)
            assert may or (repr(name) in body["message"] and "localhost" in body["message"])
        answer = await site.http.get("/debug/tasks", headers=headers)
        assert answer.status_code == (200 if may else 403)


async def test_who_has_a_permission_may_call_us_what_they_like(autojump_clock: MockClock) -> None:
    async with open_site(permission={"allowed": True}, grace=0.0) as site:
        headers = {"host": "worker-0.namespace.svc:9090"}
        assert (await site.post("/drain", headers=headers))[0] in (200, 202)
        assert (await site.post("/resume", headers=headers))[0] in (200, 202)


async def test_a_web_page_may_not_see_the_tasks(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        code, body = await site.ask("/debug/tasks", headers={"origin": "null"})
        assert code == 403
        assert "web pages" in body["message"]


async def test_so_many_may_wait(autojump_clock: MockClock) -> None:
    permission = {"is_local": True, "most_waiting": 2}
    async with open_site(permission=permission, grace=0.0) as site, trio.open_nursery() as nursery:
        await site.request(5.0)
        answers: list[int] = []

        async def wait() -> None:
            answers.append((await site.post("/drain?wait=true"))[0])

        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(1.0)
        code, body = await site.post("/drain?wait=true")
        assert code == 503
        assert "2 callers wait" in body["message"]
        assert (await site.post("/drain"))[0] == 202  # without waiting
        await trio.sleep(6.0)
        assert answers == [200, 200]
        assert (await site.post("/drain?wait=true"))[0] == 200  # they have gone


@pytest.mark.parametrize("value", ["", "maybe", "2"])
async def test_bad_words_change_nothing(autojump_clock: MockClock, value: str) -> None:
    async with open_site(grace=0.0) as site:
        code, body = await site.post(f"/drain?wait={value}")
        assert code == 400
        assert body["message"] == f"wait={value!r}: must be true or false"
        assert await site.stage() == "ready"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/drain", "GET, HEAD, POST"),
        ("GET", "/resume", "POST"),
        ("POST", "/debug/tasks", "GET, HEAD"),
    ],
)
async def test_other_methods(autojump_clock: MockClock, method: str, path: str, allow: str) -> None:
    async with open_site(grace=0.0) as site:
        answer = await site.http.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allow


@pytest.mark.parametrize(
    ("host", "is_local", "code"),
    [
        ("10.1.2.3", False, 403),
        ("10.1.2.3", True, 200),
        ("127.0.0.1", False, 200),
        ("::1", False, 200),
    ],
)
async def test_tasks_are_shown_on_this_machine(
    autojump_clock: MockClock, host: str, is_local: bool, code: int
) -> None:
    async with open_site(grace=0.0) as site:
        await site.request(10.0)
        answer = await open_http(site.status, {"is_local": is_local}, host=host).get("/debug/tasks")
        assert answer.status_code == code
        shown = code == 200
        assert ("generate" in answer.text and "test_drain_api" in answer.text) == shown
        assert answer.headers["content-type"].startswith("text/plain") == shown


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("::", False),
        ("somewhere", False),
    ],
)
def test_loopback(address: str, is_local: bool) -> None:
    assert is_loopback(address) == is_local


# --- on a socket -------------------------------------------------------------------------------


async def test_whoever_gives_up_waiting_leaves_nothing_behind() -> None:
    async with open_site(grace=0.0) as site, trio.open_nursery() as nursery:
        app = StatusApp(site.status, drain=DrainApi(site.status, is_local=True))
        listeners = await open_listeners("127.0.0.1", 0)
        port = listeners[0].socket.getsockname()[1]
        server = await nursery.start(partial(serve_http, app, listeners))
        await site.request(1000.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
            with trio.CancelScope() as waiting:

                async def give_up() -> None:
                    await until(lambda: server.statistics().busy > 0)
                    await until(lambda: site.status.stage == "draining")
                    waiting.cancel()

                nursery.start_soon(give_up)
                await http.post("/drain?wait=true")
            assert waiting.cancelled_caught
            with trio.fail_after(30):
                await until(lambda: not server.statistics().busy)
            assert (await http.post("/resume")).status_code in (200, 202)
            assert (await http.get("/live")).status_code == 200
        nursery.cancel_scope.cancel()
