"""Who may open a realtime session: judged in HTTP, before there is a WebSocket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio_websocket

from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.cors import Cors
from dynamo_trio.frontend.keys import ApiKeys
from tests.frontend.realtime_peer import talking
from tests.frontend.test_realtime_sockets import UPGRADE
from tests.http.harness import PATIENCE, read_to_end, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

KEY = "sk-for-realtime"
PAGE = "https://chat.example.com"


@pytest.fixture
async def front(open_site: Opener, tmp_path: Path) -> AsyncIterator[tuple[Any, str]]:
    """A site that wants keys, and the URL of its realtime sessions."""
    path = tmp_path / "keys"
    path.write_text(KEY)
    async with open_site(itl_ms=1) as site, running(App(site.frontend)) as server:
        site.frontend.keys = ApiKeys.read(path)
        yield site, f"ws://127.0.0.1:{server.port}/v1/realtime"


async def refused(url: str, **how: Any) -> tuple[int, Any]:
    """Status and error of an upgrade that is refused."""
    answer = await refusal(url, **how)
    return answer.status_code, json.loads(answer.body or b"")["error"]


async def refusal(url: str, **how: Any) -> trio_websocket.ConnectionRejected:
    """The answer to an upgrade that is refused."""
    host, path = url.removeprefix("ws://").split("/", 1)
    name, port = host.split(":")
    rejected: list[trio_websocket.ConnectionRejected] = []
    # On a stream of our own: the library closes none that was refused.
    with trio.fail_after(PATIENCE):
        async with await trio.open_tcp_stream(name, int(port)) as stream:
            try:
                async with trio.open_nursery() as tasks:
                    await trio_websocket.wrap_client_stream(tasks, stream, host, f"/{path}", **how)
                    pytest.fail("it was let in")
            except* trio_websocket.ConnectionRejected as caught:
                rejected += [one for one in caught.exceptions if not hasattr(one, "exceptions")]
    (answer,) = rejected
    return answer


async def first_event(url: str, **how: Any) -> tuple[Any, str | None]:
    """The first event of a session that is let in, and the subprotocol that was chosen."""
    with trio.fail_after(PATIENCE):
        async with trio_websocket.open_websocket_url(url, **how) as socket:
            return json.loads(await socket.get_message()), socket.subprotocol


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


async def test_a_session_needs_a_key(front: tuple[Any, str]) -> None:
    _, url = front
    for how in ({}, {"extra_headers": bearer("sk-no")}, {"subprotocols": ["realtime"]}):
        answer = await refusal(url, **how)
        error = json.loads(answer.body or b"")["error"]
        assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
        assert error["message"]
        headers = dict(answer.headers or ())
        assert headers[b"www-authenticate"] == b"Bearer"
        assert headers[b"x-request-id"].startswith(b"sess_")
    event, _ = await first_event(url, extra_headers=bearer(KEY))
    assert event["type"] == "session.created"


async def test_a_browser_sends_its_key_as_a_subprotocol(front: tuple[Any, str]) -> None:
    _, url = front
    offered = ["realtime", f"openai-insecure-api-key.{KEY}", "openai-beta.realtime-v1"]
    event, chosen = await first_event(url, subprotocols=offered)
    assert event["type"] == "session.created"
    assert chosen == "realtime"  # and never the key, which would be seen in the answer
    status, error = await refused(url, subprotocols=["realtime", "openai-insecure-api-key.no"])
    assert (status, error["code"]) == (401, "invalid_api_key")


async def test_a_page_of_another_origin_is_refused(front: tuple[Any, str]) -> None:
    site, url = front
    page = [(b"origin", PAGE.encode()), *bearer(KEY)]
    status, error = await refused(url, extra_headers=page)
    assert (status, error["code"]) == (403, "origin_not_allowed")
    own = [(b"origin", url.replace("ws:", "http:").removesuffix("/v1/realtime").encode())]
    for headers, cors in ((page, Cors((PAGE,))), ([*own, *bearer(KEY)], Cors())):
        site.frontend.cors = cors
        event, _ = await first_event(url, extra_headers=headers)
        assert event["type"] == "session.created"


async def test_a_clients_request_id_is_answered(front: tuple[Any, str]) -> None:
    _, url = front
    mine = [(b"x-request-id", b"mine-1")]
    with trio.fail_after(PATIENCE):
        headers = [*mine, *bearer(KEY)]
        async with trio_websocket.open_websocket_url(url, extra_headers=headers) as socket:
            assert (b"x-request-id", b"mine-1") in socket.handshake_headers
    answer = await refusal(url, extra_headers=mine)
    assert (b"x-request-id", b"mine-1") in answer.headers
    bad = await refusal(url, extra_headers=[(b"x-request-id", b"a b")])
    assert dict(bad.headers)[b"x-request-id"].startswith(b"sess_")


async def test_a_drain_comes_before_the_key(front: tuple[Any, str]) -> None:
    site, url = front
    with site.lifecycle.http.admit("something that runs"):
        site.lifecycle.request_stop("SIGTERM")
        status, error = await refused(url)
        assert (status, error["code"]) == (503, "draining")


@pytest.mark.parametrize("why", [401, 404, 503])
async def test_a_refused_upgrade_closes_its_connection_and_says_so(
    front: tuple[Any, str], why: int
) -> None:
    site, url = front
    name, port = url.removeprefix("ws://").partition("/")[0].split(":")
    head = UPGRADE.replace(b"sim", b"other")
    if why != 401:
        head = head.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer " + KEY.encode() + b"\r\n\r\n")
    with site.lifecycle.http.admit("something that runs"):
        if why == 503:
            site.lifecycle.request_stop("SIGTERM")
        with trio.fail_after(PATIENCE):
            async with await trio.open_tcp_stream(name, int(port)) as stream:
                await stream.send_all(head)
                answer, was_reset = await read_to_end(stream)
    assert answer.startswith(f"HTTP/1.1 {why} ".encode())
    assert answer.lower().count(b"\r\nconnection: close\r\n") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert not was_reset


@pytest.mark.parametrize(("version", "said"), [("1.1", True), ("2", False)])
async def test_http2_knows_no_header_for_that(
    open_site: Opener, autojump_clock: MockClock, version: str, said: bool
) -> None:
    async with open_site() as site:
        async with talking(site.client.app, "model=other", http_version=version) as peer:
            await peer.over.wait()
    assert peer.status == 404
    assert ((b"connection", b"close") in peer.headers) is said
