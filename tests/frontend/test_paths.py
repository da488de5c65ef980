"""Routes at other paths, and routes that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio.config import Config
from dynamo_trio.config.checks import BUSY_THRESHOLD, REALTIME
from dynamo_trio.config.programs import FRONTEND
from dynamo_trio.errors import ConfigError
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.paths import LATER, Paths

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

MOVED = Paths(
    chat="/api/chat",
    completions="/api/complete",
    models="/api/models",
    metrics="/internal/metrics",
    health="/v1/health",
    live="/internal/live",
)
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}


def read(**environ: str) -> Config:
    return Config.from_args_and_env([], environ, groups=FRONTEND.groups)


def moved(site: Any) -> Any:
    """The client of an app whose routes have moved."""
    site.frontend.paths = MOVED
    return attrs.evolve(site.client, app=App(site.frontend))


async def test_routes_are_where_they_were_put(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        client = moved(site)
        assert (await client.ask("POST", MOVED.chat, CHAT)).status == 200
        prompt = {"model": "sim", "prompt": "?", "max_tokens": 2}
        assert (await client.ask("POST", MOVED.completions, prompt)).status == 200
        for path in (MOVED.models, f"{MOVED.models}/sim", MOVED.health, MOVED.live, MOVED.metrics):
            assert (await client.ask("GET", path)).status == 200, path
        for path in attrs.astuple(Paths()):
            assert (await client.ask("GET", path)).status == 404, path
        text = (await client.ask("GET", MOVED.metrics)).body.decode()
        assert 'endpoint="chat_completions"' in text


async def test_a_drain_knows_them_there(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site(http_drain=120.0) as site:
        client = moved(site)
        running = client.start("POST", MOVED.chat, {**CHAT, "max_tokens": 50})
        await trio.sleep(0.3)
        site.lifecycle.request_stop("SIGTERM")
        api = (MOVED.chat, MOVED.models, f"{MOVED.models}/sim", "/v1/anything", "/v1")
        for path in api:
            refused = await client.ask("GET", path)
            assert (refused.status, refused.json()["error"]["code"]) == (503, "draining"), path
        assert (await client.ask("GET", MOVED.health)).json()["stage"] == "draining"
        assert (await client.ask("GET", MOVED.live)).status == 200
        assert (await client.ask("GET", MOVED.metrics)).status == 200
        assert (await client.ask("GET", "/elsewhere")).status == 404
        await running.done.wait()
        assert running.status == 200


@pytest.mark.parametrize("path", [*LATER, f"{LATER[0]}/deeper"])
async def test_a_route_that_is_not_there_yet_says_so(
    open_site: Opener, autojump_clock: MockClock, path: str
) -> None:
    async with open_site() as site:
        answer = await site.client.ask("POST", path, {"model": "sim", "input": "?"})
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (501, "not_implemented")
        assert path in error["message"]
        assert answer.headers["x-should-retry"] == "false"


async def test_what_a_path_takes_is_told(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        answer = await site.client.ask("DELETE", BUSY_THRESHOLD)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")
        answer = await site.client.ask("GET", REALTIME)
        assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
        answer = await site.client.ask("GET", "/" + "x" * 20_000)
        assert answer.status == 404
        assert len(answer.body) < 1000


async def test_too_many_headers_are_refused(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        headers = {f"x-{n}": "1" for n in range(201)}
        answer = await site.client.ask("POST", "/v1/chat/completions", CHAT, headers)
        assert (answer.status, answer.json()["error"]["code"]) == (431, "too_many_headers")
        del headers["x-0"]
        answer = await site.client.ask("POST", "/v1/chat/completions", CHAT, headers)
        assert answer.status == 200


# --- the settings -------------------------------------------------------------------------------


def test_the_settings_are_dynamos() -> None:
    config = read(DYN_HTTP_SVC_CHAT_PATH="/api/chat", DYN_HTTP_SVC_LIVE_PATH="/alive")
    assert Paths.of(config) == Paths(chat="/api/chat", live="/alive")
    assert Paths.of(read()) == Paths()
    assert not config.warnings


@pytest.mark.parametrize(
    "path", ["", "chat", "/a b", "/a?b", "/a#b", "/a%20b", "/{id}", "/a//b", "/a/"]
)
@pytest.mark.parametrize("name", ["CHAT", "CMP", "MODELS", "METRICS", "HEALTH", "LIVE"])
def test_a_bad_path_is_refused(name: str, path: str) -> None:
    variable = f"DYN_HTTP_SVC_{name}_PATH"
    with pytest.raises(ConfigError, match=f"{variable}=.*must be a path"):
        read(**{variable: path})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"CHAT": "/v1/completions"}, "that of DYN_HTTP_SVC_CHAT_PATH"),
        ({"LIVE": "/health"}, "that of DYN_HTTP_SVC_HEALTH_PATH"),
        ({"METRICS": BUSY_THRESHOLD}, "is there"),
        ({"CMP": REALTIME}, "is there"),
        ({"HEALTH": "/v1/models/health"}, "every path below it is a model's"),
        ({"MODELS": "/v1"}, "every path below it is a model's"),
    ],
)
def test_two_routes_cannot_be_at_one_path(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**{f"DYN_HTTP_SVC_{name}_PATH": path for name, path in environ.items()})


@pytest.mark.parametrize("status", ["200", "399", "600", "999"])
def test_overload_must_not_look_like_an_answer(status: str) -> None:
    with pytest.raises(ConfigError, match=r"OVERLOAD_STATUS_CODE=.*from 400 to 599"):
        read(DYN_HTTP_OVERLOAD_STATUS_CODE=status)
    assert read(DYN_HTTP_OVERLOAD_STATUS_CODE="503").overload_status == 503


def test_other_buckets_are_not_there_yet() -> None:
    config = read(DYN_METRICS_TTFT_MAX="60", DYN_METRICS_ITL_COUNT="9", DYN_METRICS_PREFIX="x")
    assert len(config.warnings) == 2
    assert all("not there yet" in one for one in config.warnings)


def test_routes_may_change_places() -> None:
    config = read(DYN_HTTP_SVC_HEALTH_PATH="/live", DYN_HTTP_SVC_LIVE_PATH="/health")
    assert (config.health_path, config.live_path) == ("/live", "/health")
