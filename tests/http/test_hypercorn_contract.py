"""What is used of hypercorn beyond its documented API, pinned.

If one of these fails after an update of hypercorn, read its changes before the pin is moved.
"""

from __future__ import annotations

import inspect
import socket
from typing import TYPE_CHECKING, Any, cast

import attrs
import h2.connection
import h11
import hypercorn.config
import pytest
import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import parse_socket_addr

from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.server import hypercorn_config, logger
from tests.http.harness import Http1Client, MemoryStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Message, Receive, Scope, Send

CONFIG = hypercorn_config(HttpLimits())
GET = b"GET /path?q=1 HTTP/1.1\r\nhost: test\r\n\r\n"


@attrs.define(eq=False)
class Recorder:
    """An app that does what a test tells it, and notes what it was given."""

    scopes: list[Scope] = attrs.field(factory=list)
    messages: list[Message] = attrs.field(factory=list)
    steps: list[Message | trio.Event] = attrs.field(factory=list)
    done: trio.Event = attrs.field(factory=trio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.messages.append(await receive())
        while self.messages[-1].get("more_body", False):
            self.messages.append(await receive())
        for step in self.steps:
            if isinstance(step, trio.Event):
                await step.wait()
            else:
                await send(step)
        self.done.set()
        self.messages.append(await receive())


def start(**headers: str) -> Message:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Used:
    """A stream that notes what is asked of it; the attributes of TLS streams it has not."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream
        self._names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self._names.add(name)
        return getattr(self._stream, name)


def bare_server(app: Recorder) -> tuple[TCPServer, trio.abc.HalfCloseableStream, Used]:
    """hypercorn's protocol engine as we build it, without our guard and exchange."""
    client, server = trio.testing.lockstep_stream_pair()
    used = Used(MemoryStream(server))
    wrapped = ASGIWrapper(cast("Any", app))
    return TCPServer(wrapped, CONFIG, WorkerContext(None), {}, cast("Any", used)), client, used


def names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_constructors_have_the_arguments_that_we_give() -> None:
    assert names(TCPServer) == ["app", "config", "context", "state", "stream"]
    assert names(WorkerContext) == ["max_requests"]
    assert names(ASGIWrapper) == ["app"]
    assert names(ASGIWrapper(cast("Any", None)).__call__) == [
        "scope", "receive", "send", "sync_spawn", "call_soon",
    ]  # fmt: skip
    assert inspect.iscoroutinefunction(TCPServer.run)


def test_every_setting_that_we_make_exists() -> None:
    ours = {name for name in vars(CONFIG) if not name.startswith("_")}
    assert ours <= set(vars(hypercorn.config.Config))
    assert CONFIG.log.error_logger is logger
    assert CONFIG.log.access_logger is None


async def test_of_a_stream_it_uses_five_things_and_probes_for_tls_with_one(
    autojump_clock: MockClock,
) -> None:
    app = Recorder(steps=[start(content_length="2"), body(b"ok")])
    server, client, used = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        assert (await Http1Client(client).ask("GET", "/", connection="close")).body == b"ok"
    assert used._names == {
        "do_handshake", "socket", "send_all", "receive_some", "send_eof", "aclose",
    }  # fmt: skip


async def test_the_scope_and_the_messages_of_a_request(autojump_clock: MockClock) -> None:
    app = Recorder(steps=[start(content_length="0"), body(b"")])
    server, client, _ = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await Http1Client(client).ask("POST", "/path?q=1", b"abc", connection="close")
    scope = app.scopes[0]
    assert {key: scope[key] for key in ("type", "http_version", "method", "scheme", "path")} == {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/path",
    }  # fmt: skip
    assert (b"host", b"test") in scope["headers"]
    assert scope["extensions"] == {}
    assert app.messages == [
        {"type": "http.request", "body": b"abc", "more_body": True},
        {"type": "http.request", "body": b"", "more_body": False},
        {"type": "http.disconnect"},
    ]


async def test_the_head_leaves_at_once(autojump_clock: MockClock) -> None:
    go_on = trio.Event()
    app = Recorder(steps=[start(), go_on, body(b"")])
    server, client, _ = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await client.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        head = await client.receive_some()
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        assert b"server:" not in head.lower()
        go_on.set()
        assert await client.receive_some() == b"0\r\n\r\n"
        nursery.cancel_scope.cancel()


async def test_h11_needs_no_notice_of_body_bytes_that_were_written_past_it(
    autojump_clock: MockClock,
) -> None:
    go_on = trio.Event()
    app = Recorder(steps=[start(), go_on, body(b"")])
    server, client, used = bare_server(app)
    http = Http1Client(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        for _ in range(2):  # and the connection can be used again
            app.done = trio.Event()
            go_on = app.steps[1] = trio.Event()
            await http.send("GET", "/")
            assert isinstance(await http.next_event(), h11.Response)
            await trio.testing.wait_all_tasks_blocked()  # as after send(response.start)
            nursery.start_soon(used._stream.send_all, b"3\r\nraw\r\n")
            event = await http.next_event()
            assert isinstance(event, h11.Data)
            assert event.data == b"raw"
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
            assert isinstance(await http.next_event(), h11.EndOfMessage)
        nursery.cancel_scope.cancel()


async def test_send_is_a_method_of_the_stream_and_knows_its_number(
    autojump_clock: MockClock,
) -> None:
    """By it the guard finds out how far an HTTP/2 response has got."""
    numbers: list[int] = []

    class Numbered(Recorder):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            numbers.append(cast("Any", send).__self__.stream_id)
            await send(start(content_length="0"))
            await send(body(b""))

    server, client, _ = bare_server(Numbered())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(read_away, client)
        await client.send_all(http2_requests(1, 3, 5))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sorted(numbers) == [1, 3, 5]


async def test_a_shut_http2_window_holds_nothing_back(autojump_clock: MockClock) -> None:
    """Why the guard counts. If this fails, hypercorn has got back-pressure of its own."""
    app = Recorder(steps=[start(), *(body(b"x" * 16_000, more=True) for _ in range(100))])
    server, client, _ = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(read_away, client)
        await client.send_all(http2_requests(1))
        with trio.fail_after(60):
            await app.done.wait()
        nursery.cancel_scope.cancel()


def http2_requests(*numbers: int) -> bytes:
    h2c = h2.connection.H2Connection()
    h2c.initiate_connection()
    head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "t")]
    for number in numbers:
        h2c.send_headers(number, head, end_stream=True)
    return h2c.data_to_send()


async def read_away(client: trio.abc.ReceiveStream) -> None:
    while await client.receive_some():
        pass


async def test_connection_close_of_the_app_is_honoured(autojump_clock: MockClock) -> None:
    app = Recorder(steps=[start(content_length="0", connection="close"), body(b"")])
    server, client, _ = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await client.send_all(GET)
        while await client.receive_some():
            pass
        # The server ended by itself.


async def test_it_parks_behind_one_stray_byte_and_then_sees_no_fin(
    autojump_clock: MockClock,
) -> None:
    """Why the guard reads by itself. Should this ever fail, the guard may become simpler."""
    app = Recorder(steps=[start(), trio.Event()])
    server, client, _ = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(client.send_all, GET + b"x")
        await client.receive_some()
        await client.send_eof()
        with trio.move_on_after(1000):
            await app.done.wait()
        assert {"type": "http.disconnect"} not in app.messages
        nursery.cancel_scope.cancel()


async def test_a_stuck_send_outlasts_its_cancellation(autojump_clock: MockClock) -> None:
    """Why the guard has a deadline of its own inside hypercorn's shield."""
    app = Recorder(steps=[start()])
    server, client, used = bare_server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await client.send_all(GET)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(1000)
            assert nursery.child_tasks
            used._stream.close()


async def test_data_behind_an_early_answer_ends_the_connection_with_a_key_error(
    autojump_clock: MockClock,
) -> None:
    """Why each connection is contained, and bodies are read away before an early answer."""

    class Early(Recorder):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send(start(content_length="0"))
            await send(body(b""))

    server, client, _ = bare_server(Early())
    h2c = h2.connection.H2Connection()
    h2c.initiate_connection()
    h2c.send_headers(
        1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "t")]
    )
    ended = trio.Event()

    async def send_data() -> None:
        await client.send_all(h2c.data_to_send())
        await ended.wait()
        h2c.send_data(1, b"late")
        await client.send_all(h2c.data_to_send())

    async def listen() -> None:
        while data := await client.receive_some():
            events = h2c.receive_data(bytes(data))
            if any(type(event).__name__ == "StreamEnded" for event in events):
                ended.set()

    async def all_of_it() -> None:
        async with trio.open_nursery() as nursery:
            for task in (server.run, listen, send_data):
                nursery.start_soon(task)

    with pytest.raises(ExceptionGroup) as raised:
        await all_of_it()
    assert raised.group_contains(KeyError)


def test_a_config_object_knows_the_family_of_a_socket() -> None:
    assert parse_socket_addr(socket.AF_INET, ("127.0.0.1", 1)) == ("127.0.0.1", 1)
