"""The app under ASGI servers that are not ours: less is promised there, and that much holds."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anycorn
import anycorn.config
import attrs
import h11
import hypercorn.config
import hypercorn.trio
import pytest
import trio
import trio.testing
import trio_websocket

from dynamo_trio.frontend.app import App
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.wire.openai.sse import EventParser
from tests.http.harness import PATIENCE, Http1Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.frontend.conftest import Opener

CHAT = "/v1/chat/completions"


@attrs.frozen
class Foreign:
    """A server, and its configuration for any free port."""

    serve: Callable[..., Awaitable[None]]
    config: Any


@pytest.fixture(params=["hypercorn", "anycorn"])
def foreign(request: pytest.FixtureRequest) -> Foreign:
    if request.param == "hypercorn":
        serve: Any = hypercorn.trio.serve
        config: Any = hypercorn.config.Config()
    else:
        serve, config = anycorn.serve, anycorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = config.accesslog = None
    return Foreign(serve, config)


@asynccontextmanager
async def served(app: App, foreign: Foreign) -> AsyncIterator[int]:
    """The app on a port while the block runs."""
    async with trio.open_nursery() as nursery:
        start = partial(foreign.serve, app, foreign.config, shutdown_trigger=trio.sleep_forever)
        (bind,) = await nursery.start(start)
        yield int(bind.rpartition(":")[2])
        nursery.cancel_scope.cancel()


def request(tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    fields = {"model": "sim", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({**fields, "stream": stream}).encode()


async def connect(port: int) -> Http1Client:
    return Http1Client(await trio.open_tcp_stream("127.0.0.1", port))


async def ask(port: int, method: str, path: str, body: bytes = b"") -> Any:
    client = await connect(port)
    async with client.stream:
        with trio.fail_after(PATIENCE):
            return await client.ask(method, path, body)


async def the_rest(client: Http1Client) -> bytes:
    """The rest of a body; raises unless it ends as it should."""
    body = b""
    while not isinstance(event := await client.next_event(), h11.EndOfMessage):
        body += bytes(event.data) if isinstance(event, h11.Data) else b""
    return body


async def test_answers_whole_and_streamed(open_site: Opener, foreign: Foreign) -> None:
    async with open_site(itl_ms=1) as site, served(App(site.frontend), foreign) as port:
        models = json.loads((await ask(port, "GET", "/v1/models")).body)
        assert [model["id"] for model in models["data"]] == ["sim"]
        whole = await ask(port, "POST", CHAT, request(5, stream=False))
        assert whole.status == 200
        assert len(json.loads(whole.body)["choices"][0]["message"]["content"]) == 5
        streamed = await ask(port, "POST", CHAT, request(20, stream=True))
        events = list(EventParser().feed(streamed.body))
        assert events[-1].is_done
        assert len(events) > 20
        assert (await ask(port, "GET", "/live")).status == 200
        assert site.lifecycle.http.tally == {Outcome.FINISHED: 2}


async def test_a_client_that_leaves_is_noticed(open_site: Opener, foreign: Foreign) -> None:
    async with open_site(itl_ms=50) as site, served(App(site.frontend), foreign) as port:
        client = await connect(port)
        await client.send("POST", CHAT, request(400, stream=True))
        assert await client.stream.receive_some()
        await client.stream.aclose()
        with trio.fail_after(PATIENCE):
            await site.lifecycle.http.wait_empty()
        assert site.lifecycle.http.tally == {Outcome.CANCELLED: 1}


async def test_a_drain_refuses_what_is_new_and_tells_what_runs(
    open_site: Opener, foreign: Foreign
) -> None:
    async with open_site(itl_ms=50, http_drain=1.0) as site:
        async with served(App(site.frontend), foreign) as port:
            client = await connect(port)
            await client.send("POST", CHAT, request(400, stream=True))
            assert isinstance(await client.next_event(), h11.Response)
            site.lifecycle.request_stop("a test")
            await trio.testing.wait_all_tasks_blocked()
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/health")):
                answer = await ask(port, method, path, b"{}" if method == "POST" else b"")
                assert answer.status == 503
            assert (await ask(port, "GET", "/live")).status == 200
            with trio.fail_after(PATIENCE):
                rest = await the_rest(client)
            assert b'"error"' in rest
            assert b"[DONE]" not in rest
            await client.stream.aclose()
            await site.lifecycle.wait_stopped()


async def test_a_realtime_session(open_site: Opener, foreign: Foreign) -> None:
    async with open_site(itl_ms=1) as site, served(App(site.frontend), foreign) as port:
        url = f"ws://127.0.0.1:{port}/v1/realtime?model=sim"
        async with trio_websocket.open_websocket_url(url) as socket:
            with trio.fail_after(PATIENCE):
                assert json.loads(await socket.get_message())["type"] == "session.created"
