"""Above the cap of connections: a few more, for who asks how the process is."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import h2.events
import pytest
import trio

from dynamo_trio.http.exchange import exchange_of
from dynamo_trio.http.respond import send_json
from tests.http.harness import PATIENCE, client_of, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import http2

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send
    from tests.http.harness import Http1Client, Running

FULL = attrs.evolve(LIMITS, max_connections=2, reserved_connections=2, reserved_time=0.5)


async def fill(server: Running, app: App, clients: AsyncExitStack) -> list[Http1Client]:
    """The cap full of requests that run."""
    crowd = [await clients.enter_async_context(client_of(server)) for _ in range(2)]
    for client in crowd:
        await client.send("POST", "/stream", b"{}")
    await server.wait_until(lambda: app.gate.count == 2)
    return crowd


async def test_who_comes_at_the_cap_is_answered_and_sent_away() -> None:
    app = App()
    async with running(app, FULL) as server, AsyncExitStack() as clients:
        crowd = await fill(server, app, clients)
        for _ in range(5):
            async with client_of(server) as probe:
                answer = await probe.ask("GET", "/live")
                assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
                assert await read_to_end(probe.stream) == (b"", False)
        await server.wait_until(lambda: server.server.statistics().connections == 2)
        assert not server.server.reserve
        for _ in crowd:
            await finish_stream(server)
        for client in crowd:
            assert (await client.answer()).body == b"data"
            assert (await client.ask("GET", "/")).status == 200  # no reserve: it stays open


async def test_who_says_nothing_keeps_nobody_out_of_the_reserve() -> None:
    app = App()
    async with running(app, FULL) as server, AsyncExitStack() as clients:
        await fill(server, app, clients)
        for _ in range(6):
            await clients.enter_async_context(await server.connect())
        half = await clients.enter_async_context(await server.connect())
        await half.send_all(b"GET /")
        await server.wait_until(lambda: server.server.accepted == 9)
        async with client_of(server) as probe:
            assert (await probe.ask("GET", "/live")).status == 200
        await server.wait_until(lambda: not server.server.reserve)  # in half a second
        assert server.server.statistics().connections == 2


async def test_a_client_of_http2_is_asked_to_go_behind_its_answer() -> None:
    app = App()
    async with running(app, FULL) as server, AsyncExitStack() as clients:
        await fill(server, app, clients)
        async with await server.connect() as stream:
            client = await http2(stream)
            number = await client.begin("GET", "/live")
            assert await client.read_until_ended(number) == b'"hello"'
            events = client.parser.receive_data((await read_to_end(stream))[0])
            assert any(isinstance(event, h2.events.ConnectionTerminated) for event in events)


async def test_the_app_knows_which_connections_those_are() -> None:
    app = App()

    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        if scope["path"] == "/which":
            said = b"true" if exchange.connection.reserve else b"false"
            await send_json(scope, send, 200, said)
        else:
            await app(scope, receive, send)

    async with running(tell, FULL) as server, AsyncExitStack() as clients:
        async with client_of(server) as early:
            assert (await early.ask("GET", "/which")).body == b"false"
        await server.wait_until(lambda: not server.server.connections)
        await fill(server, app, clients)
        async with client_of(server) as late:
            assert (await late.ask("GET", "/which")).body == b"true"


@pytest.mark.parametrize("speak", ["idle", "busy"])
async def test_clients_of_http2_are_asked_to_go_when_nothing_runs(speak: str) -> None:
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        number = await client.begin("GET", "/stream" if speak == "busy" else "/")
        if speak == "idle":
            await client.read_until_ended(number)
        else:
            await server.wait_until(lambda: app.gate.count == 1)
        await server.wait_until(lambda: server.server.statistics().busy == (speak == "busy"))
        server.server.retire()
        if speak == "busy":
            await trio.sleep(0.3)
            late = await client.begin("GET", "/")
            assert await client.read_until_ended(late) == b'"hello"'
            await finish_stream(server)
            assert await client.read_until_ended(number) == b"data"
        said, was_reset = await read_to_end(stream)
        events = client.parser.receive_data(said)
        (gone,) = [item for item in events if isinstance(item, h2.events.ConnectionTerminated)]
        assert (gone.error_code, gone.last_stream_id, was_reset) == (0, 2**31 - 1, False)


async def test_who_was_asked_to_go_and_asks_again_is_answered() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        assert await client.read_until_ended(await client.begin("GET", "/")) == b'"hello"'
        await server.wait_until(lambda: server.server.statistics().busy == 0)
        server.server.retire()
        (connection,) = server.server.connections
        await server.wait_until(lambda: connection.guard.parted)  # the client has not read it yet
        number = await client.begin("GET", "/")
        frames = b""
        with trio.fail_after(PATIENCE):
            while b'"hello"' not in frames:
                frames += bytes(await stream.receive_some())
        assert number == 3
        assert frames.count((2**31 - 1).to_bytes(4) + bytes(4)) == 1
