"""HTTP/2 clients that mean no good: each is alone with what it does."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import hyperframe.frame as frames
import pytest
import trio
from h2.connection import ConnectionState
from h2.errors import ErrorCodes

from dynamo_trio.http.frames import PREFACE
from tests.http.harness import PATIENCE, client_of, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import Http2Client, http2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.http.asgi import Receive, Scope, Send
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


# --- malformed requests (RFC 9113, 8.1.1) -------------------------------------------------------


async def read_on(client: Http2Client, number: int) -> None:
    """Until the stream has ended, in whatever way."""
    with trio.fail_after(PATIENCE):
        while number not in {*client.ended, *client.resets}:
            data = await client.stream.receive_some()
            assert data, "the server closed the connection"
            client.take(client.parser.receive_data(data))
    assert client.parser.state_machine.state is ConnectionState.CLIENT_OPEN


MALFORMED = {
    "transfer-encoding": [*bad(), ("transfer-encoding", "chunked")],
    "connection": [*bad(), ("connection", "close")],
    "another host": [*bad(), ("host", "u")],
    "no host": bad(authority=""),
    "a capital": [*bad(), ("X-a", "b")],
    "no length": [*bad(), ("content-length", "x")],
    "two lengths": [*bad(), ("content-length", "1"), ("content-length", "2")],
    "no scheme": bad(scheme=""),
    "a late field": [*bad(), ("a", "b"), (":path", "/x")],
    "te": [*bad(), ("te", "gzip")],
}


@pytest.mark.parametrize("head", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("end", [True, False])
async def test_a_malformed_head_is_answered_and_ends_its_stream_alone(
    head: list[tuple[str, str]], end: bool
) -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with another_runs(server, app) as client:
            client.parser.config.validate_outbound_headers = False
            client.parser.config.normalize_outbound_headers = False
            number = client.parser.get_next_available_stream_id()
            client.parser.send_headers(number, head, end_stream=end, priority_weight=7)
            if not end:
                client.parser.send_data(number, b"what follows", end_stream=True)
            await client.flush()
            await read_on(client, number)
            assert client.statuses[number] == b"400"
            error = json.loads(client.bodies[number])["error"]
            assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
            assert number not in client.resets or client.resets[number] == ErrorCodes.NO_ERROR
        assert server.server.failed == 0


@pytest.mark.parametrize(
    ("length", "sent"), [("3", b"four"), ("5", b"four"), ("5", b""), ("0", b"x")]
)
async def test_a_body_that_does_not_fit_its_length_ends_its_stream_alone(
    length: str, sent: bytes
) -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with another_runs(server, app) as client:
            number = client.parser.get_next_available_stream_id()
            client.parser.send_headers(
                number, [*bad(method="POST", path="/echo"), ("content-length", length)]
            )
            client.parser.send_data(number, sent, end_stream=True)
            await client.flush()
            await read_on(client, number)
            assert client.resets == {number: ErrorCodes.PROTOCOL_ERROR}
            assert number not in client.statuses
        assert server.server.failed == 0
        await server.wait_until(lambda: all(c.idle for c in server.server.connections))


async def test_a_head_that_promises_a_body_and_ends_is_malformed() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        number = client.parser.get_next_available_stream_id()
        client.parser.send_headers(number, [*bad(), ("content-length", "5")], end_stream=True)
        await client.flush()
        await read_on(client, number)
        assert client.statuses[number] == b"400"


async def test_bodies_that_are_thrown_away_leave_the_connection_its_window_and_streams() -> None:
    limits = attrs.evolve(LIMITS, h2_streams=12)
    async with running(App(), limits) as server, await server.connect() as stream:
        client = await http2(stream)
        for _ in range(20):  # more than the window together, and than may run at once
            number = client.parser.get_next_available_stream_id()
            head = [*bad(method="POST", path="/echo"), ("content-length", "1")]
            client.parser.send_headers(number, head)
            client.parser.send_data(number, b"x" * 10_000)
            await client.flush()
            await read_on(client, number)
        echo = await client.begin("POST", "/echo", end=False)
        await client.send_data(echo, b"x" * 10_000, end=True)
        assert await client.read_until_ended(echo) == b"x" * 10_000


@pytest.mark.parametrize("trailer", [(":path", "/"), ("connection", "close"), ("A", "b")])
async def test_bad_trailers_end_their_stream_alone(trailer: tuple[str, str]) -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with another_runs(server, app) as client:
            client.parser.config.validate_outbound_headers = False
            client.parser.config.normalize_outbound_headers = False
            number = await client.begin("POST", "/echo", end=False)
            client.parser.send_headers(number, [trailer], end_stream=True, priority_weight=7)
            await client.flush()
            await read_on(client, number)
            assert client.resets == {number: ErrorCodes.PROTOCOL_ERROR}
        assert server.server.failed == 0


async def test_good_trailers_do_no_harm() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        number = await client.begin("POST", "/echo", end=False)
        client.parser.send_data(number, b"said")
        client.parser.send_headers(number, [("x-sum", "1")], end_stream=True)
        await client.flush()
        assert await client.read_until_ended(number) == b"said"


@pytest.mark.parametrize("kind", ["too long", "behind the end"])
async def test_who_has_its_requests_reset_again_and_again_is_sent_away(kind: str) -> None:
    """Or it could have more of them begun than may run at once, at no cost to itself."""
    app = App()
    limits = attrs.evolve(LIMITS, h2_streams=20, linger_time=0.2)
    async with running(app, limits) as server, await server.connect() as stream:
        client = await http2(stream)
        for _ in range(200):
            number = client.parser.get_next_available_stream_id()
            head = [*bad(method="POST", path="/wait"), ("content-length", "1")]
            client.parser.send_headers(number, head)
            client.parser.send_data(number, b"xx" if kind == "too long" else b"x")
            with suppress(trio.BrokenResourceError):
                await client.flush()
                if kind == "behind the end":
                    await stream.send_all(
                        frames.DataFrame(number, b"", flags=["END_STREAM"]).serialize()
                    )
                    await stream.send_all(frames.DataFrame(number, b"more").serialize())
            client.parser.reset_stream(number)
            client.parser.clear_outbound_data_buffer()
        await read_to_end(stream)
        await server.wait_until(lambda: server.server.sent_away == 1)
        await server.wait_until(lambda: not server.server.connections)


# --- what the engine answers by itself --------------------------------------------------


@pytest.mark.parametrize("end", [True, False])
async def test_a_bad_upgrade_is_told_so(end: bool) -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with another_runs(server, app) as client:
            client.parser.config.validate_outbound_headers = False
            number = client.parser.get_next_available_stream_id()
            head = [*bad(method="CONNECT"), (":protocol", "websocket")]
            client.parser.send_headers(number, head, end_stream=end)
            await client.flush()
            await read_on(client, number)
            assert client.statuses[number] == b"400"
            assert "sec-websocket-version" in json.loads(client.bodies[number])["error"]["message"]
        assert server.server.failed == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_client_of_an_app_that_fails_is_told_so(method: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """One that says nothing at all."""

    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        for _ in range(3):
            number = await client.begin(method, "/")
            await read_on(client, number)
            assert client.statuses[number] == b"500"
            body = client.bodies.get(number, b"")
            assert method == "HEAD" or json.loads(body)["error"]["code"] == "internal"
            assert not body or method == "GET"


async def test_a_refused_head_request_has_no_body() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        client.parser.config.validate_outbound_headers = False
        number = client.parser.get_next_available_stream_id()
        head = [*bad(method="HEAD"), ("host", "u")]
        client.parser.send_headers(number, head, end_stream=True)
        await client.flush()
        await read_on(client, number)
        assert (client.statuses[number], client.bodies) == (b"400", {})
