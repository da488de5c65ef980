"""HTTP/2 clients that mean no good: each is alone with what it does."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import hyperframe.frame as frames
import pytest
import trio

from dynamo_trio.http.frames import PREFACE
from tests.http.harness import PATIENCE, client_of, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import Http2Client, http2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.harness import Running

SETTINGS = frames.SettingsFrame(0).serialize()
FLOODS = {
    "ping": frames.PingFrame(0, b"12345678").serialize(),
    "settings": frames.SettingsFrame(0, {4: 4096}).serialize(),
    "empty": SETTINGS,
    "priority": frames.PriorityFrame(1).serialize(),
    "window": frames.WindowUpdateFrame(0, 1).serialize(),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_is_ended_and_nobody_else_waits(kind: str) -> None:
    async with running(App(), attrs.evolve(LIMITS, linger_time=0.2)) as server:
        async with await server.connect() as stream, client_of(server) as other:
            assert (await other.ask("GET", "/")).status == 200
            await stream.send_all(PREFACE + SETTINGS + FLOODS[kind] * 3000)
            said, was_reset = await read_to_end(stream)
            assert said.endswith(
                frames.GoAwayFrame(0, 2**31 - 1, h2.errors.ErrorCodes.ENHANCE_YOUR_CALM).serialize()
            )
            assert not was_reset
            assert (await other.ask("GET", "/")).status == 200
        await server.wait_until(lambda: server.server.sent_away == 1)
        assert server.server.failed == 0


async def test_requests_that_are_taken_back_end_the_connection() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, h2_streams=20, linger_time=0.2)
    async with running(app, limits) as server, await server.connect() as stream:
        client = await http2(stream)
        for _ in range(100):
            number = client.parser.get_next_available_stream_id()
            head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "t")]
            client.parser.send_headers(number, head, end_stream=True)
            client.parser.reset_stream(number)
        await client.flush()
        await read_to_end(stream)
        await server.wait_until(lambda: server.server.sent_away == 1)
        await server.wait_until(lambda: not server.server.connections)


@asynccontextmanager
async def another_runs(server: Running, app: App) -> AsyncIterator[Http2Client]:
    """A connection on which a stream runs; it is to end as if nothing had been."""
    async with await server.connect() as stream:
        client = await http2(stream)
        streamed = await client.begin("GET", "/stream")
        await server.wait_until(lambda: app.gate.count == 1)
        yield client
        await finish_stream(server)
        assert await client.read_until_ended(streamed) == b"data"


def bad(**changes: str) -> list[tuple[str, str]]:
    head = {"method": "GET", "path": "/", "scheme": "http", "authority": "t"} | changes
    return [(f":{name}", value) for name, value in head.items() if value]


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (bad(method="CONNECT", path="", scheme=""), b"501", b"not_implemented"),
        (bad(path="/\xe4"), b"400", b"invalid_request"),
        ([*bad(), ("x-long", "v" * 33_000)], b"431", b"head_too_large"),
        ([*bad(), *((f"x-{n}", "") for n in range(1000))], b"431", b"head_too_large"),
    ],
)
@pytest.mark.parametrize("end", [True, False])
async def test_a_bad_request_ends_its_stream_alone(
    head: list[tuple[str, str]], status: bytes, code: bytes, end: bool
) -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with another_runs(server, app) as client:
            client.parser.config.validate_outbound_headers = False
            number = client.parser.get_next_available_stream_id()
            client.parser.send_headers(number, head, end_stream=end)
            if not end:
                client.parser.send_data(number, b"what follows", end_stream=True)
            await client.flush()
            with trio.fail_after(PATIENCE):
                while number not in client.ended:
                    client.take(client.parser.receive_data(await client.stream.receive_some()))
            assert client.statuses[number] == status
            assert code in client.bodies[number]
        assert server.server.failed == 0


async def test_the_limit_of_a_head_is_the_one_that_is_announced() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        number = client.parser.get_next_available_stream_id()
        room = LIMITS.head_bytes - sum(len(n) + len(v) + 32 for n, v in bad()) - 32 - 1
        client.parser.send_headers(number, [*bad(), ("x", "v" * room)], end_stream=True)
        await client.flush()
        assert await client.read_until_ended(number) == b'"hello"'
        assert client.parser.remote_settings.max_header_list_size == LIMITS.head_bytes
