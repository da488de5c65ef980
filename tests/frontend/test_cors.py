"""Web pages of other origins: nobody's by default, some or all if the settings say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.config import Config
from dynamo_trio.config.programs import FRONTEND
from dynamo_trio.errors import ConfigError, OriginNotAllowed
from dynamo_trio.frontend.cors import Cors

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
PAGE = "https://chat.example.com"
FOREIGN = "https://evil.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}
BODY = {"model": "sim", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}


def cors_headers(headers: dict[str, str]) -> set[str]:
    return {name for name in headers if name.startswith("access-control-")}


async def test_by_default_no_answer_is_for_other_origins(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        asked = await site.client.ask("OPTIONS", CHAT, None, {"origin": PAGE, **PREFLIGHT})
        assert asked.status == 405
        answer = await site.client.ask("GET", MODELS, None, {"origin": PAGE})
        assert answer.status == 200
        assert cors_headers(asked.headers) | cors_headers(answer.headers) == set()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/busy_threshold", "/v1/nothing"])
async def test_a_foreign_page_starts_nothing(
    open_site: Opener, autojump_clock: MockClock, path: str
) -> None:
    """A browser asks nobody before it sends a POST of plain text."""
    plain = {"content-type": "text/plain", "host": "here:8000"}
    async with open_site() as site:
        for origin in (FOREIGN, "null", "http://here:9999"):
            answer = await site.client.ask("POST", path, BODY, {"origin": origin, **plain})
            assert (answer.status, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        own = {"origin": "http://here:8000", **plain}
        assert (await site.client.ask("POST", path, BODY, own)).status in (200, 400, 404)
        site.frontend.cors = Cors(("*",))
        foreign = {"origin": FOREIGN, **plain}
        assert (await site.client.ask("POST", path, BODY, foreign)).status in (200, 400, 404)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_that_may_ask(
    open_site: Opener, autojump_clock: MockClock, stream: bool
) -> None:
    async with open_site() as site:
        site.frontend.cors = Cors((PAGE, "http://localhost:3000"))
        asked = await site.client.ask("OPTIONS", CHAT, None, {"origin": PAGE, **PREFLIGHT})
        assert (asked.status, asked.body) == (204, b"")
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert (
            asked.headers["access-control-allow-headers"]
            == (PREFLIGHT["access-control-request-headers"])
        )
        assert asked.headers["vary"] == "origin"
        body = {**BODY, "stream": stream}
        answer = await site.client.ask("POST", CHAT, body, {"origin": PAGE})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        if stream:
            assert answer.events()[-1] == "[DONE]"


async def test_a_page_that_may_not(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.frontend.cors = Cors((PAGE,))
        for origin in (FOREIGN, PAGE + ":8443", "null", PAGE + ".evil.example.com"):
            asked = await site.client.ask("OPTIONS", CHAT, None, {"origin": origin, **PREFLIGHT})
            answer = await site.client.ask("POST", CHAT, BODY, {"origin": origin})
            assert (asked.status, answer.status) == (204, 403)
            assert cors_headers(asked.headers) | cors_headers(answer.headers) == set()
            assert asked.headers["vary"] == answer.headers["vary"] == "origin"
        # Whoever is no browser is not concerned.
        answer = await site.client.ask("POST", CHAT, BODY)
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_every_page_may_ask(open_site: Opener, autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.frontend.cors = Cors(("*",))
        asked = await site.client.ask("OPTIONS", CHAT, None, {"origin": "null", **PREFLIGHT})
        answer = await site.client.ask("POST", CHAT, BODY, {"origin": FOREIGN})
        for found in (asked, answer):
            assert found.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in found.headers


async def test_a_drain_answers_preflights_and_shows_pages_the_503(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site(http_drain=120.0) as site:
        site.frontend.cors = Cors((PAGE,))
        running = site.client.start("POST", CHAT, {**BODY, "max_tokens": 50}, {"origin": PAGE})
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        asked = await site.client.ask("OPTIONS", CHAT, None, {"origin": PAGE, **PREFLIGHT})
        assert asked.status == 204
        refused = await site.client.ask("POST", CHAT, BODY, {"origin": PAGE})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["access-control-allow-origin"] == PAGE
        await running.done.wait()
        assert running.status == 200


async def test_options_that_are_no_preflight_are_an_ordinary_request(
    open_site: Opener, autojump_clock: MockClock
) -> None:
    async with open_site() as site:
        site.frontend.cors = Cors((PAGE,))
        assert (await site.client.ask("OPTIONS", CHAT, None, {"origin": PAGE})).status == 405
        assert (await site.client.ask("OPTIONS", CHAT, None, PREFLIGHT)).status == 405


def scope(**headers: str) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "websocket", "method": "OPTIONS", "headers": pairs}


@pytest.mark.parametrize("wanted", ["", "a b", "x\x00", "a,,b", "a\r\nset-cookie: x", "ä"])
def test_headers_that_are_none_are_not_repeated(wanted: str) -> None:
    asked = scope(
        **{
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": wanted,
        }
    )
    answer = Cors((PAGE,)).preflight(asked, ["POST"])
    assert answer is not None
    assert b"access-control-allow-headers" not in dict(answer)
    assert dict(answer)[b"access-control-allow-origin"] == PAGE.encode()


@pytest.mark.parametrize(
    ("origins", "headers"),
    [
        ((), {}),  # no browser
        ((), {"origin": "https://here:8000", "host": "here:8000"}),
        ((), {"origin": "http://here", "host": "here"}),
        ((PAGE,), {"origin": PAGE, "host": "here"}),
        (("*",), {"origin": FOREIGN, "host": "here"}),
    ],
)
def test_a_websocket_from_here_or_from_an_allowed_page(
    origins: tuple[str, ...], headers: dict[str, str]
) -> None:
    Cors(origins).check(scope(**headers))


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://here:9999", "x" * 10_000])
def test_a_websocket_from_any_other_page_is_refused(origin: str) -> None:
    with pytest.raises(OriginNotAllowed, match="DYN_TRIO_CORS_ORIGINS") as caught:
        Cors((PAGE,)).check(scope(origin=origin, host="here"))
    assert len(str(caught.value)) < 400


def test_two_origins_are_none() -> None:
    asked = scope(host="here")
    asked["headers"] += [(b"origin", PAGE.encode()), (b"origin", FOREIGN.encode())]
    with pytest.raises(OriginNotAllowed):
        Cors((PAGE,)).check(asked)


# --- the setting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", None),
        ("*", ("*",)),
        ("https://Chat.example.com", (PAGE,)),
        (f"{PAGE}, http://localhost:3000 ,app://x", (PAGE, "http://localhost:3000", "app://x")),
        ("http://[::1]:3000", ("http://[::1]:3000",)),
    ],
)
def test_origins_as_browsers_write_them(text: str, origins: tuple[str, ...] | None) -> None:
    config = Config.from_args_and_env([], {"DYN_TRIO_CORS_ORIGINS": text}, groups=FRONTEND.groups)
    assert config.cors_origins == origins


@pytest.mark.parametrize(
    "text", ["example.com", f"{PAGE}/", f"{PAGE}/x", f"*,{PAGE}", ",", f"{PAGE},", "https://", "x"]
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DYN_TRIO_CORS_ORIGINS=.*must be \* or origins"):
        Config.from_args_and_env([], {"DYN_TRIO_CORS_ORIGINS": text}, groups=FRONTEND.groups)
