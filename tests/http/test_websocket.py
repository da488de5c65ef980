"""WebSockets pass through our server as hypercorn speaks them; one of them hurts nobody else."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio_websocket

from dynamo_trio.http.limits import HttpLimits
from tests.http.harness import PATIENCE, running

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send

LIMITS = HttpLimits(idle_time=0.3, head_time=0.2, write_time=5)


@attrs.define(eq=False)
class Echo:
    """Sends back each text; ``bye`` closes."""

    left: list[int] = attrs.field(factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            if message["text"] == "bye":
                await send({"type": "websocket.close", "code": 1012, "reason": "bye"})
            else:
                await send({"type": "websocket.send", "text": message["text"]})
        self.left.append(message["code"])


async def test_a_websocket_is_no_idle_connection_however_quiet_it_is() -> None:
    app = Echo()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            client = await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            with trio.fail_after(PATIENCE):
                for pause in (0, 0.5, 0):
                    await trio.sleep(pause)
                    await client.send_message("x" * 100_000)
                    assert await client.get_message() == "x" * 100_000
                assert server.server.close_idle() == 0
                await client.send_message("bye")
                with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                    await client.get_message()
            assert closed.value.reason is not None
            assert closed.value.reason.code == 1012
        await server.wait_until(lambda: not server.server.connections)
    assert app.left == [1000]


async def test_a_websocket_client_that_vanishes_is_noticed() -> None:
    app = Echo()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            await server.wait_until(lambda: server.server.statistics().busy == 1)
        await server.wait_until(lambda: app.left == [1006])
        await server.wait_until(lambda: not server.server.connections)


async def test_a_websocket_does_not_outlive_the_server() -> None:
    app = Echo()
    async with AsyncExitStack() as clients:
        async with running(app, LIMITS) as server:
            stream = await clients.enter_async_context(await server.connect())
            client = await trio_websocket.wrap_client_stream(server.nursery, stream, "test", "/")
            await client.send_message("x")
            assert await client.get_message() == "x"
    assert not server.server.connections
