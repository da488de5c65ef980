"""What is used of hypercorn beyond its documented API, pinned.

If one of these fails after an update of hypercorn, read its changes before the pin is moved.
"""

from __future__ import annotations

import dataclasses
import inspect
import socket
from typing import TYPE_CHECKING, Any, cast

import attrs
import h2.connection
import h2.events
import h11
import hypercorn.config
import pytest
import trio
import trio.testing
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from dynamo_trio.http.engine import Engine, Inbox
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.resetting import reset_stream
from dynamo_trio.http.server import hypercorn_config, logger
from dynamo_trio.http.sinks import TERMINATOR
from tests.http.harness import Http1Client, MemoryStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.protocol.h2 import H2Protocol
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


class Orderly(MemoryStream):
    """It takes one send after the other, which on HTTP/2 come from many tasks."""

    def __init__(self, stream: trio.StapledStream[Any, Any]) -> None:
        super().__init__(stream)
        self._order = trio.Lock()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        async with self._order:
            await super().send_all(data)

    def take_earned(self) -> int:
        return 0


def bare_server(app: Recorder) -> tuple[Engine, trio.abc.HalfCloseableStream, MemoryStream]:
    """hypercorn's protocols as we run them, without our guard and exchange."""
    client, server = trio.testing.lockstep_stream_pair()
    stream = Orderly(server)
    return engine_on(stream, app), client, stream


def engine_on(stream: object, app: Recorder) -> Engine:
    async def call(scope: Scope, inbox: Inbox, send: Send) -> None:
        await app(scope, inbox.receive, send)

    return Engine(call, CONFIG, WorkerContext(None), cast("Any", stream))


def names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_constructors_have_the_arguments_that_we_give() -> None:
    assert names(ProtocolWrapper) == [
        "app", "config", "context", "task_group", "state", "ssl", "client", "server", "send",
        "alpn_protocol",
    ]  # fmt: skip
    assert names(WorkerContext) == ["max_requests"]
    assert ConnectionState({}).copy() == {}
    for name in ("initiate", "handle"):
        assert inspect.iscoroutinefunction(getattr(ProtocolWrapper, name))


def test_our_engine_stands_in_for_its_task_group() -> None:
    theirs = {name for name in vars(TaskGroup) if not name.startswith("_")}
    assert theirs == {"spawn", "spawn_app"}
    assert names(TaskGroup.spawn_app) == names(Engine.spawn_app)


def test_the_protocols_say_three_things() -> None:
    assert [field.name for field in dataclasses.fields(RawData)] == ["data", "address"]
    assert dataclasses.fields(Closed) == ()
    assert [field.name for field in dataclasses.fields(Updated)] == ["idle"]


def test_every_setting_that_we_make_exists() -> None:
    ours = {name for name in vars(CONFIG) if not name.startswith("_")}
    assert ours <= set(vars(hypercorn.config.Config))
    assert CONFIG.log.error_logger is logger
    assert CONFIG.log.access_logger is None


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
        {"type": "http.request", "body": b"abc", "more_body": False},
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


async def test_neither_head_nor_end_waits_for_anything_but_the_stream(
    autojump_clock: MockClock,
) -> None:
    """Why the raw sink may ask for them without a shield."""
    sent: list[bytes] = []

    class Hurried(Recorder):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body", False):
                pass
            with trio.CancelScope() as scope_:
                scope_.cancel()
                await send(start())
                await send(body(b""))
                self.done.set()

    class Swallowing(MemoryStream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            sent.append(bytes(data))

    app = Hurried()
    client, server_end = trio.testing.lockstep_stream_pair()
    server = engine_on(Swallowing(server_end), app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await client.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc")
        await app.done.wait()
        assert sent[0].endswith(b"\r\n\r\n")
        assert sent[1:] == [TERMINATOR]
        nursery.cancel_scope.cancel()


async def test_h11_needs_no_notice_of_body_bytes_that_were_written_past_it(
    autojump_clock: MockClock,
) -> None:
    go_on = trio.Event()
    app = Recorder(steps=[start(), go_on, body(b"")])
    server, client, stream = bare_server(app)
    http = Http1Client(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        for _ in range(2):  # and the connection can be used again
            app.done = trio.Event()
            go_on = app.steps[1] = trio.Event()
            await http.send("GET", "/")
            assert isinstance(await http.next_event(), h11.Response)
            await trio.testing.wait_all_tasks_blocked()  # as after send(response.start)
            nursery.start_soon(stream.send_all, b"3\r\nraw\r\n")
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


async def test_a_stream_can_be_reset_from_outside(autojump_clock: MockClock) -> None:
    """What :mod:`dynamo_trio.http.resetting` reaches for, and that nothing is left behind."""
    engines: list[H2Protocol] = []

    class Resetting(Recorder):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            stream = cast("Any", send).__self__
            engines.append(stream.send.__self__)
            await send(start())
            await send(body(b"x" * 20_000, more=True))
            await reset_stream(send)
            await reset_stream(send)  # idempotent
            assert stream.stream_id not in engines[0].connection.streams or (
                engines[0].connection.streams[stream.stream_id].closed
            )

    server, client, _ = bare_server(Resetting())
    h2c = h2.connection.H2Connection()
    h2c.initiate_connection()
    head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "t")]
    resets: list[int | None] = []

    async def listen() -> None:
        while data := await client.receive_some():
            events = h2c.receive_data(bytes(data))
            resets.extend(e.stream_id for e in events if isinstance(e, h2.events.StreamReset))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(listen)
        for number in (1, 3):
            h2c.send_headers(number, head, end_stream=True)
        await client.send_all(h2c.data_to_send())
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(filter(None, resets)) == [1, 3]
        assert not engines[0].stream_buffers
        assert not engines[0].streams
        nursery.cancel_scope.cancel()


async def test_only_a_stream_of_http2_can_be_reset() -> None:
    async def send(message: Message) -> None:
        """No method of anything."""

    with pytest.raises((TypeError, AttributeError)):
        await reset_stream(send)


async def test_a_stream_that_agreed_upon_a_protocol_is_of_tls(autojump_clock: MockClock) -> None:
    """By what the guard shows of it, hypercorn knows the scheme and the protocol."""
    app = Recorder(steps=[start(content_length="0"), body(b"")])
    client, server_end = trio.testing.lockstep_stream_pair()

    class Secret(MemoryStream):
        def selected_alpn_protocol(self) -> str:
            return "http/1.1"

    engine = engine_on(Secret(server_end), app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await Http1Client(client).ask("GET", "/", connection="close")
    assert app.scopes[0]["scheme"] == "https"
