"""Sessions over real sockets, our server's and trio-websocket's: what a client may do to it."""

from __future__ import annotations

import json
import logging
import tracemalloc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing
import trio_websocket

from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.wire.openai.realtime.events import DRAINING
from tests.http.harness import PATIENCE, Running, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.conftest import Opener

UPGRADE = (
    b"GET /v1/realtime?model=sim HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\n"
    b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
)


@attrs.define(eq=False)
class Talk:
    """A session of trio-websocket's client."""

    socket: trio_websocket.WebSocketConnection
    types: list[str] = attrs.field(factory=list)

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send_message(json.dumps({"type": type, **fields}))

    async def read(self, type: str) -> Any:
        """The next event of this type, passing others."""
        while True:
            event = json.loads(await self.socket.get_message())
            self.types.append(event["type"])
            if event["type"] == type:
                return event

    async def ask(self, text: str = "hello", most: int = 8) -> Any:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.say("conversation.item.create", item=item)
        await self.say("response.create", response={"max_output_tokens": most})
        return (await self.read("response.done"))["response"]


@asynccontextmanager
async def talking(server: Running) -> AsyncIterator[Talk]:
    async with await server.connect() as stream:
        path = "/v1/realtime?model=sim"
        yield Talk(await trio_websocket.wrap_client_stream(server.nursery, stream, "test", path))


async def test_a_session(open_site: Opener) -> None:
    async with open_site(itl_ms=1) as site, running(site.client.app) as server:
        with trio.fail_after(PATIENCE):
            async with talking(server) as talk:
                response = await talk.ask(most=20)
                assert response["usage"]["output_tokens"] == 20
                await talk.socket.aclose(4000, "had enough")
            await server.wait_until(lambda: not site.lifecycle.http.count)
            await server.wait_until(lambda: not server.server.connections)


async def test_an_offer_to_compress_is_not_taken(open_site: Opener) -> None:
    async with open_site() as site, running(site.client.app) as server:
        async with await server.connect() as stream:
            await stream.send_all(UPGRADE)
            head = b""
            with trio.fail_after(PATIENCE):
                while b"session.created" not in head:
                    head += await stream.receive_some()
            assert head.startswith(b"HTTP/1.1 101")
            assert b"sec-websocket-extensions" not in head.lower()


@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_vanishes_ends_its_response(open_site: Opener, reset: bool) -> None:
    async with open_site(itl_ms=5, context_tokens=1_000_000) as site:
        async with running(site.client.app) as server, talking(server) as talk:
            with trio.fail_after(PATIENCE):
                await talk.say("session.update", session={"instructions": "Go on."})
                await talk.say("response.create", response={"input": [reference()]})
                await talk.read("response.output_text.delta")
                assert site.lifecycle.work.count == 1
                if reset:
                    server.server.abort_all("as a reset does")
                else:
                    await talk.socket._stream.aclose()
                await server.wait_until(lambda: not site.lifecycle.work.count)
                await server.wait_until(lambda: not site.lifecycle.http.count)


def reference() -> Any:
    content = [{"type": "input_text", "text": "hello"}]
    return {"type": "message", "role": "user", "content": content}


async def test_a_frame_that_is_too_long_ends_its_session_only(
    open_site: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    limits = HttpLimits(ws_message_bytes=100_000)
    async with open_site(itl_ms=1) as site, running(site.client.app, limits) as server:
        with trio.fail_after(PATIENCE):
            async with talking(server) as other, talking(server) as hostile:
                await hostile.read("session.created")
                await hostile.socket.send_message("x" * 200_000)
                with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                    await hostile.read("error")
                assert closed.value.reason is not None
                assert closed.value.reason.code == 1009
                assert (await other.ask())["usage"]["output_tokens"] == 8
            await server.wait_until(lambda: not site.lifecycle.http.count)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_who_only_talks_is_held_back_and_hurts_nobody(open_site: Opener) -> None:
    limits = HttpLimits(high_water=20_000, low_water=1000)
    async with open_site(itl_ms=1) as site:
        site.frontend.limits = limits
        async with running(site.client.app, limits, send_buffer=4096) as server:
            async with talking(server) as other, await server.connect(4096) as flood:
                await flood.send_all(UPGRADE)
                assert (await flood.receive_some()).startswith(b"HTTP/1.1 101")
                frames = _frame(b'{"type":"bogus","event_id":"' + b"x" * 99 + b'"}') * 50
                sent = 0
                with trio.move_on_after(1):
                    while sent < 100_000:
                        await flood.send_all(frames)
                        sent += 50
                with trio.fail_after(PATIENCE):
                    assert (await other.ask())["usage"]["output_tokens"] == 8
                assert 50 <= sent < 100_000  # the kernel's buffers are full, and no others


def _frame(text: bytes) -> bytes:
    assert 126 <= len(text) < 2**16
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text


async def test_a_stop_is_told_over_a_socket(open_site: Opener) -> None:
    async with open_site(itl_ms=1) as site, running(site.client.app) as server:
        with trio.fail_after(PATIENCE):
            async with talking(server) as talk:
                await talk.ask()
                site.lifecycle.request_stop("test")
                notice = await talk.read(DRAINING)
                assert [item["role"] for item in notice["items"]] == ["user", "assistant"]
                with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                    await talk.read("nothing")
                assert closed.value.reason is not None
                assert (closed.value.reason.code, closed.value.reason.reason) == (1012, "draining")
            await site.lifecycle.wait_stopped()


@pytest.mark.parametrize("query", ["?model=sim", ""])
async def test_what_was_refused_is_not_kept(open_site: Opener, query: str) -> None:
    size = 8 * 2**20
    async with open_site() as site, running(site.client.app) as server:
        with trio.fail_after(PATIENCE):
            async with await server.connect() as stream:
                path = f"/v1/realtime{query}"
                talk = Talk(
                    await trio_websocket.wrap_client_stream(server.nursery, stream, "t", path)
                )
                await talk.read("session.created")
                tracemalloc.start()
                try:
                    await talk.socket.send_message("y" * size)
                    await talk.read("error")
                    await trio.testing.wait_all_tasks_blocked()
                    held, most = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                assert most > size > 8 * held
