"""The server over real loopback sockets: listeners, containment, capacity, and its end."""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import attrs
import h2.config
import h2.connection
import h2.events
import h11
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, send_json
from dynamo_trio.http.server import AT_ONCE, HttpServer, open_listeners, serve_http
from dynamo_trio.http.sinks import SinkOutcome
from tests.http.harness import (
    PATIENCE,
    Http1Client,
    Running,
    client_of,
    in_memory,
    read_to_end,
    running,
    shut_request,
)
from tests.http.routes import LIMITS, App, finish_stream

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send


# --- listeners ------------------------------------------------------------------------


async def test_a_taken_port_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}.*in use"):
            await open_listeners("127.0.0.1", port)


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "no.such.host.invalid", "256.1.1.1", "a..b", "x" * 64]
)
async def test_a_host_that_is_not_this_machine_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await open_listeners(host, 0)
    for words in (repr(host), "DYN_HTTP_HOST", "--http-host", "must be an address of this machine"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EACCES, "x"), "this user may not use that port"),
        (OSError(errno.ENFILE, "x"), "Too many open files in system"),
        (OSError("no addresses"), "no addresses"),
    ],
)
async def test_a_port_that_may_not_be_bound_is_named_in_the_error(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(trio, "open_tcp_listeners", refuse)
    with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:80 \(.*DYN_HTTP_PORT\): {words}"):
        await open_listeners("127.0.0.1", 80)


# --- containment ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/raise", "/raise-in-nursery"])
async def test_a_handler_that_raises_harms_nobody_else(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(App(), LIMITS) as server, client_of(server) as innocent:
        async with client_of(server) as client:
            assert (await client.ask("GET", path)).status == 500
        assert (await innocent.ask("GET", "/")).status == 200
    assert "a handler that raises" in caplog.text


async def test_a_response_that_breaks_off_does_not_look_whole() -> None:
    async with running(App(), LIMITS) as server, client_of(server) as client:
        with pytest.raises(h11.RemoteProtocolError):
            await client.ask("GET", "/raise-late")


async def test_nor_does_it_in_http10_whose_answers_end_with_the_connection() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"GET /raise-late HTTP/1.0\r\n\r\n")
        _, was_reset = await read_to_end(stream)
        assert was_reset


async def test_what_hypercorn_raises_ends_one_connection_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Headers that no HTTP allows raise in the protocol engine, not in the app."""
    async with running(App(), LIMITS) as server, client_of(server) as innocent:
        assert (await innocent.ask("GET", "/")).status == 200
        async with await server.connect() as stream:
            h2c = h2.connection.H2Connection()
            h2c.initiate_connection()
            await stream.send_all(h2c.data_to_send() + b"\x00\x00\x05\x01\x04\x00\x00\x00\x01hello")
            await read_to_end(stream)
        async with await server.connect() as stream:  # not ASCII: hypercorn's decode fails
            await stream.send_all(b"GET /\xff HTTP/1.1\r\nhost: t\r\n\r\n")
            await read_to_end(stream)
        assert (await innocent.ask("GET", "/")).status == 200
        await server.wait_until(lambda: len(server.server.connections) == 1)


async def test_a_silent_crowd_and_an_innocent_one() -> None:
    async with running(App(), LIMITS) as server:
        crowd = [await server.connect() for _ in range(30)]
        for stream in crowd[:10]:
            await stream.send_all(
                b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"
            )
        async with client_of(server) as client:
            assert (await client.ask("POST", "/echo", b"1")).body == b"1"
        await server.wait_until(lambda: server.server.statistics().busy == 10)
        for stream in crowd:
            await stream.aclose()
        await server.wait_until(lambda: not server.server.connections)
        assert server.server.failed == 0


async def test_a_base_exception_of_an_app_is_not_swallowed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyboardInterrupt

    async def scenario() -> None:
        async with running(app, LIMITS) as server, client_of(server) as client:
            await client.send("GET", "/")
            await trio.sleep(PATIENCE)

    with pytest.raises(BaseExceptionGroup) as raised:
        await scenario()
    assert raised.group_contains(KeyboardInterrupt)


# --- the end ----------------------------------------------------------------------------


async def test_idle_connections_can_be_closed_alone() -> None:
    app = App()
    async with running(app, LIMITS) as server, client_of(server) as idle:
        assert (await idle.ask("GET", "/")).status == 200
        async with await server.connect() as half, client_of(server) as busy:
            await half.send_all(b"POST / HTT")
            await busy.send("POST", "/stream", b"{}")
            await server.wait_until(lambda: app.gate.count == 1)
            await server.wait_until(lambda: server.server.accepted == 3)
            assert await server.server.close_idle() == 2
            assert await read_to_end(idle.stream) == (b"", False)
            assert (await read_to_end(half))[0] == b""
            await finish_stream(server)
            assert (await busy.answer()).body == b"data"


async def test_a_crowd_of_idle_connections_is_closed_in_turns() -> None:
    async with in_memory(App()) as memory:
        clients = [memory.connect() for _ in range(4 * AT_ONCE)]
        await wait_all_tasks_blocked()
        left: list[int] = []

        async def watch() -> None:
            while memory.server.connections:
                left.append(len(memory.server.connections))
                await trio.lowlevel.checkpoint()

        memory.nursery.start_soon(watch)
        assert await memory.server.close_idle() == len(clients)
        await wait_all_tasks_blocked()
        assert len(set(left)) >= 3  # others had their turns


async def test_all_connections_can_be_reset_at_once() -> None:
    async with running(App(), LIMITS) as server, client_of(server) as client:
        await client.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: server.server.statistics().busy == 1)
        assert server.server.abort_all("a test") == 1
        with pytest.raises((trio.BrokenResourceError, h11.RemoteProtocolError)):
            await client.answer()


async def test_the_listener_stays_open_until_the_server_is_cancelled() -> None:
    app = App()
    async with running(app, LIMITS) as server:
        app.gate.shut()
        async with client_of(server) as client:
            assert (await client.ask("GET", "/live")).status == 200
        port = server.port
    with pytest.raises(OSError, match="attempts to connect"):
        await trio.open_tcp_stream("127.0.0.1", port)


async def test_the_end_leaves_nobody_and_nothing_broken_looks_whole() -> None:
    app = App()
    async with AsyncExitStack() as clients:
        async with running(app, LIMITS, send_buffer=4608) as server:
            idle, busy, stuck = [
                await clients.enter_async_context(await server.connect()) for _ in range(3)
            ]
            assert (await Http1Client(idle).ask("GET", "/")).status == 200
            await Http1Client(busy).send("POST", "/wait", b"{}")
            await Http1Client(stuck).send("POST", "/stream", b"{}")
            await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
            app.streams[0].feed(b"x" * 900_000)
            await server.wait_until(lambda: app.gate.count == 2)
        assert app.gate.count == 0
        assert await read_to_end(idle) == (b"", False)
        assert (await read_to_end(busy))[0] == b""
        assert not (await read_to_end(stuck))[0].endswith(b"0\r\n\r\n")


async def test_a_client_that_never_reads_is_let_go_at_the_write_limit() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, write_time=0.3)
    async with running(app, limits, send_buffer=4608) as server:
        async with await server.connect(receive_buffer=4608) as stuck, client_of(server) as other:
            await Http1Client(stuck).send("POST", "/stream", b"{}")
            await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
            app.streams[0].feed(b"x" * 500_000)
            assert (await other.ask("GET", "/")).status == 200
            await server.wait_until(lambda: app.gate.count == 0)
            assert app.outcomes == [SinkOutcome.GONE]
            assert (await other.ask("GET", "/")).status == 200


async def test_a_client_that_left_before_its_whole_answer_did_not_get_it() -> None:
    results: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        await read_body(scope, receive, LIMITS)
        while not exchange.lost:  # noqa: ASYNC110 - a handler that is busy elsewhere
            await trio.sleep(0.001)
        results.append(await send_json(scope, send, 200, b"{}"))

    async with running(app, LIMITS) as server:
        async with client_of(server) as client:
            await client.send("GET", "/")
            await server.wait_until(lambda: server.server.statistics().busy == 1)
        await server.wait_until(lambda: results == [False])


async def test_an_answer_that_nobody_reads_is_given_up_in_unary_too() -> None:
    results: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        results.append(await send_json(scope, send, 200, b"x" * 3_000_000))

    limits = attrs.evolve(LIMITS, write_time=0.3)
    async with running(app, limits, send_buffer=4608) as server:
        async with await server.connect(receive_buffer=4608) as stuck:
            await Http1Client(stuck).send("GET", "/")
            await server.wait_until(lambda: results == [False])
            await server.wait_until(lambda: not server.server.connections)


# --- capacity ------------------------------------------------------------------------------


async def test_at_the_cap_the_longest_idle_makes_room() -> None:
    app = App()
    async with running(app, attrs.evolve(LIMITS, max_connections=2)) as server:
        async with client_of(server) as first, client_of(server) as second:
            assert (await first.ask("GET", "/")).status == 200
            assert (await second.ask("GET", "/")).status == 200
            async with client_of(server) as third:
                assert (await third.ask("GET", "/")).status == 200
                assert await read_to_end(first.stream) == (b"", False)
                assert (await second.ask("GET", "/")).status == 200


async def test_at_the_cap_newcomers_wait_while_all_are_busy() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, max_connections=1, reserved_connections=0)
    async with running(app, limits) as server:
        async with client_of(server) as busy:
            await busy.send("POST", "/stream", b"{}")
            await server.wait_until(lambda: app.gate.count == 1)
            async with client_of(server) as waiting:
                await waiting.send("GET", "/")
                await trio.sleep(0.05)
                assert server.server.accepted == 1
                await finish_stream(server)
                assert (await busy.answer()).body == b"data"
                await busy.stream.aclose()
                assert (await waiting.answer()).status == 200


async def test_at_the_cap_half_sent_requests_make_room_and_running_ones_do_not() -> None:
    app = App()
    async with running(app, attrs.evolve(LIMITS, max_connections=3)) as server:
        async with AsyncExitStack() as clients:
            running_one = await clients.enter_async_context(client_of(server))
            await running_one.send("POST", "/stream", b"{}")
            for _ in range(2):
                half = await clients.enter_async_context(await server.connect())
                await half.send_all(
                    b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\nhalf"
                )
            await server.wait_until(lambda: server.server.statistics().busy == 3)
            newcomer = await clients.enter_async_context(client_of(server))
            with trio.fail_after(3):
                assert (await newcomer.ask("GET", "/live")).status == 200
            await server.wait_until(lambda: server.server.statistics().connections == 3)
            await finish_stream(server)
            assert (await running_one.answer()).body == b"data"


async def test_at_the_cap_clients_that_take_nothing_make_room() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, max_connections=3, reserved_connections=0, stall_time=0.3)
    async with running(app, limits, send_buffer=4096) as server, AsyncExitStack() as clients:
        running_one = await clients.enter_async_context(client_of(server))
        await running_one.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: app.gate.count == 1)
        # One in HTTP/1.1, and one in HTTP/2 that never opens its window.
        stuck = Http1Client(await clients.enter_async_context(await server.connect(4096)))
        await stuck.send("POST", "/echo", b"x" * 250_000)
        shut = await clients.enter_async_context(await server.connect())
        await shut.send_all(shut_request("/"))
        await server.wait_until(lambda: stalled(server) == 2)
        for count in (2, 3):
            newcomer = await clients.enter_async_context(client_of(server))
            with trio.fail_after(PATIENCE):
                await newcomer.send("POST", "/stream", b"{}")
                await server.wait_until(partial(has_admitted, app, count))
        await server.wait_until(lambda: server.server.statistics().reset == 2)
        assert server.server.statistics().connections == 3
        for _ in range(3):
            await finish_stream(server)
        assert (await running_one.answer()).body == b"data"


def has_admitted(app: App, count: int) -> bool:
    return app.gate.count == count


def stalled(server: Running) -> int:
    return sum(c.stalled_since < math.inf for c in server.server.connections)


async def test_who_waits_for_room_at_the_end_is_closed() -> None:
    app = App()
    async with AsyncExitStack() as clients:
        async with running(app, attrs.evolve(LIMITS, max_connections=1)) as server:
            busy = await clients.enter_async_context(client_of(server))
            await busy.send("POST", "/stream", b"{}")
            await server.wait_until(lambda: app.gate.count == 1)
            waiting = await clients.enter_async_context(await server.connect())
            await trio.sleep(0.05)
        assert (await read_to_end(waiting))[0] == b""


@attrs.define(eq=False)
class NoRoom(trio.abc.Listener[trio.SocketStream]):
    """Says for a while that the process has no file descriptors left."""

    listener: trio.SocketListener
    refusals: int
    code: int = errno.EMFILE

    async def accept(self) -> trio.SocketStream:
        if self.refusals:
            self.refusals -= 1
            raise OSError(self.code, os.strerror(self.code))
        return await self.listener.accept()

    async def aclose(self) -> None:
        await self.listener.aclose()


async def test_running_out_of_descriptors_is_survived_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "dynamo_trio.frontend.http")
    listeners = [NoRoom(listener, 3) for listener in await open_listeners("127.0.0.1", 0)]
    port = listeners[0].listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, App(), listeners)
        assert isinstance(server, HttpServer)
        async with client_of(Running(server, port, nursery)) as client:
            with trio.fail_after(PATIENCE):
                assert (await client.ask("GET", "/")).status == 200
        nursery.cancel_scope.cancel()
    assert len(caplog.records) == 1
    assert "cannot accept connections" in caplog.text


async def test_another_error_of_accept_is_the_servers_end() -> None:
    listeners = [NoRoom(item, 1, errno.EINVAL) for item in await open_listeners("127.0.0.1", 0)]
    with pytest.raises(ExceptionGroup) as raised:
        await serve_http(App(), listeners)  # type: ignore[arg-type]  # a listener of our own kind
    assert raised.group_contains(OSError)


def test_the_cap_leaves_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, cap, halved in (
        *((1024, 880, 440), (8192, 4096, 4024), (1_000_000, 4096, 4096)),
        *((10, 1, 1), (-1, 4096, 4096)),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert HttpLimits().connection_cap() == cap
        assert HttpLimits(descriptors=2).connection_cap() == halved


async def test_a_cap_below_the_one_that_was_asked_for_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    async with running(App(), LIMITS):
        pass
    assert "880 connections at once, not 4096: the limit of file descriptors is 1024" in caplog.text


async def test_an_exchange_is_there_only_on_our_own_server() -> None:
    assert exchange_of({"type": "http"}) is None
    assert exchange_of({"type": "http", "extensions": {"dynamo_trio.connection": {}}}) is None
