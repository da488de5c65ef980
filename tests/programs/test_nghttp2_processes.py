"""nghttp2's clients against a frontend: whole streams, a crowd on few connections, and a drain."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.plane.tls_files import Authority
from tests.programs.conftest import MODEL, Fleet, close_fleet
from tests.programs.nghttp2 import Site, needs_nghttp2
from tests.standalone.harness import chat, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

asks = partial(chat, model=MODEL)
SHORT, ENDLESS = asks(8), asks(8000)
KINDS = ("model", "endpoint", "request_type")
STARTED, ENDED = "dynamo_frontend_requests_started_total", "dynamo_frontend_requests_total"
ALPN = pytest.param("https", (), "h2", id="h2 by ALPN")
#: Scheme, flags of h2load, and what it then agrees upon with the server.
OTHERS = [
    ("http", (), "h2c", "h2 by prior knowledge"),
    ("https", ("--h1",), "http/1.1", "http1 over TLS"),
    ("http", ("--h1",), "http/1.1", "http1"),
]
SOAKED = [ALPN, *(pytest.param(*way, id=name, marks=pytest.mark.soak) for *way, name in OTHERS)]
WAYS = [ALPN, *(pytest.param(*way, id=name) for *way, name in OTHERS[:2]), SOAKED[-1]]
SCHEMES = ["https", "http"]


def open_site(fleet: Fleet, scheme: str, limit: str = "120") -> Site:
    """A frontend with a worker whose tokens come every 10 ms; its drain's limit in seconds."""
    needs_nghttp2()
    room = ("--max-running", "400", "--kv-blocks", "1000000")
    fleet.worker("--itl-ms", "10", *room, ready=False)
    settings: dict[str, Any] = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": limit}
    frontend = fleet.frontend(*tls_flags(fleet, scheme), **settings)
    port = int(frontend.wait_log("listening on").rpartition(":")[2])
    site = Site(frontend, f"{scheme}://localhost:{port}", fleet.folder)
    wait_until(lambda: MODEL in site.get("/v1/models").text, "the model is offered")
    return site


def tls_flags(fleet: Fleet, scheme: str) -> tuple[str, ...]:
    if scheme == "http":
        return ()
    identity = Authority(fleet.folder).identity("localhost")
    return ("--tls-cert-path", str(identity.cert), "--tls-key-path", str(identity.key))


@pytest.fixture(scope="module", params=SCHEMES)
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[Site]:
    """One for the tests that do not stop it."""
    fleet = Fleet(tmp_path_factory.mktemp("kept"), model_folder)
    with open_site(fleet, request.param) as site:
        yield site
    close_fleet(fleet)


def left(site: Site) -> int:
    """Requests that were started and have not ended."""
    started, ended = site.counted(STARTED, *KINDS), site.counted(ENDED, *KINDS)
    assert all(ended[kind] <= started[kind] for kind in started | ended)
    return started.total() - ended.total()


def wait_left(site: Site, count: int) -> None:
    # A client has the end of its answer a moment before the request is over.
    wait_until(lambda: left(site) == count, f"{count} requests are left")


# --- while it serves ------------------------------------------------------------------------------


def test_a_stream_by_nghttp_is_whole(kept: Site) -> None:
    seen = kept.ask(asks(20, stream_options={"include_usage": True}))
    assert ("The negotiated protocol: h2" in seen.said) == kept.base.startswith("https")
    assert (seen.answer.status, seen.answer.is_done, seen.ends) == (200, True, 1)
    assert seen.answer.headers["content-type"].startswith("text/event-stream")
    assert seen.answer.chunks[-1]["usage"]["completion_tokens"] == 20
    assert kept.ask(asks(20)).answer.text == seen.answer.text
    refused = kept.ask({"model": "nobody", "messages": []})
    assert (refused.answer.status, refused.ends) == (400, 1)
    assert refused.answer.error["param"] == "messages"


def test_fifty_streams_on_one_connection_are_whole(kept: Site) -> None:
    seen = kept.ask(asks(20), "--multiply=50")
    assert (seen.dones, seen.ends) == (50, 50)


@pytest.mark.parametrize("flags", [(), ("--h1",)], ids=["h2", "http1"])
def test_a_crowd_on_few_connections(kept: Site, flags: tuple[str, ...]) -> None:
    whole = asks(8, stream=False)  # all answers to it have the same length
    length = len(kept.ask(whole).answer.body)
    before = kept.counted(ENDED, "status")
    wait_left(kept, 0)
    crowd = ("--clients=3", "--max-concurrent-streams=80") if not flags else ("--clients=40",)
    for body in (SHORT, whole):
        load = kept.h2load(body, *flags, *crowd, "--requests=300").finish()
        assert load.statuses == {200: 300}
    assert load.body_bytes == 300 * length
    wait_left(kept, 0)
    assert kept.counted(ENDED, "status") - before == {("success",): 600}


# --- a stop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["https", pytest.param("http", marks=pytest.mark.soak)])
def test_at_the_limit_its_stream_is_told_and_has_a_proper_end(fleet: Fleet, scheme: str) -> None:
    with open_site(fleet, scheme, limit="0.5") as site:
        running = site.nghttp(ENDLESS)
        wait_left(site, 1)
        site.frontend.kill(signal.SIGTERM)
        seen = site.read(running)
        assert (seen.answer.status, seen.ends, seen.dones) == (200, 1, 0)
        assert seen.answer.error["code"] == "cut"
        assert site.frontend.end() == 0
        assert site.frontend.report["requests"]["cut"] == 1


def check_report(site: Site, served: int, **ended: int) -> None:
    """So many were answered to their end, some of them in the drain; the others ended so."""
    report = site.frontend.report
    assert report["served_before"] + report["requests"]["finished"] == served
    assert report["requests"]["finished"] > 0
    others = {how: count for how, count in report["requests"].items() if how != "finished"}
    assert others == dict.fromkeys(others, 0) | ended
    assert report["leftovers"] == report["errors"] == []
    assert report["seconds"] < 60  # of the 120 that it might wait


def crowd(flags: tuple[str, ...], requests: int) -> tuple[str, ...]:
    some = ("--clients=3", "--max-concurrent-streams=15") if not flags else ("--clients=40",)
    return (*flags, *some, f"--requests={requests}")


@pytest.mark.parametrize(("scheme", "flags", "protocol"), WAYS)
def test_a_crowd_that_goes_on_through_a_drain(
    fleet: Fleet, scheme: str, flags: tuple[str, ...], protocol: str
) -> None:
    with open_site(fleet, scheme) as site:
        held = site.nghttp(ENDLESS)  # without it, the drain would be over too soon
        streams = site.nghttp(asks(200), "--multiply=10")
        wait_left(site, 11)
        loading = site.h2load(SHORT, *crowd(flags, 500))
        site.frontend.wait_log(": complete, ", times=60)
        site.frontend.kill(signal.SIGTERM)
        load, seen = loading.finish(), site.read(streams)
        assert load.protocol == protocol
        assert (seen.dones, seen.ends) == (10, 10)
        good, refused = load.statuses[200], load.statuses[503]
        assert good + refused == 500
        wait_left(site, 1)
        assert site.counted(ENDED, "status", "error_type") == {
            ("success", ""): 10 + good,
            ("error", "unavailable"): refused,
        }
        held.kill()  # the client of the last one leaves
        assert site.frontend.end() == 0
        check_report(site, served=10 + good, cancelled=1)


@pytest.mark.parametrize(("scheme", "flags", "protocol"), SOAKED)
def test_a_crowd_that_asks_until_the_process_has_gone(
    fleet: Fleet, scheme: str, flags: tuple[str, ...], protocol: str
) -> None:
    with open_site(fleet, scheme) as site:
        loading = site.h2load(SHORT, *crowd(flags, 100_000))
        site.frontend.wait_log(": complete, ", times=60)
        assert site.frontend.stop() == 0
        load = loading.finish()
        assert load.protocol == protocol
        check_report(site, served=load.statuses[200])
