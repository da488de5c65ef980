"""The server over real loopback sockets: containment, early answers, HTTP versions, its end."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import h2.config
import h2.connection
import h2.events
import h11
import pytest
import trio

from dynamo_trio.errors import PayloadTooLarge, PortInUse
from dynamo_trio.frontend.connection import exchange_of
from dynamo_trio.frontend.http_limits import HttpLimits
from dynamo_trio.frontend.respond import read_body, send_json, stream_response, watch_disconnect
from dynamo_trio.frontend.server import HttpServer, open_listeners, serve_http
from dynamo_trio.frontend.sinks import RawSink, SinkOutcome, open_sink
from dynamo_trio.lifecycle.admission import CutReason, Gate
from tests.http.harness import PATIENCE, Http1Client, Running, client_of, read_to_end, running

if TYPE_CHECKING:
    from dynamo_trio.frontend.asgi import Receive, Scope, Send
    from dynamo_trio.frontend.sinks import BodySink

LIMITS = HttpLimits(body_bytes=300_000, linger_time=2, write_time=20)


@attrs.define(eq=False)
class App:
    """A few routes; each does one thing that a real one does."""

    gate: Gate = attrs.field(factory=lambda: Gate("http"))
    left: list[str] = attrs.field(factory=list)
    streams: list[BodySink] = attrs.field(factory=list)
    outcomes: list[SinkOutcome | None] = attrs.field(factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/echo":
                await send_json(scope, send, 200, await read_body(scope, receive, LIMITS))
            case "/early":
                await send_json(scope, send, 503, b'"early"')
            case "/early-close":
                await send_json(scope, send, 503, b'"early"', close=True)
            case "/big":
                await self.big(scope, receive, send)
            case "/wait":
                await self.wait(scope, receive, send)
            case "/stream":
                await self.stream(scope, receive, send)
            case "/raise":
                raise RuntimeError("a handler that raises")
            case "/raise-late":
                await self.raise_late(send)
            case "/raise-in-nursery":
                await self.raise_in_nursery()
            case _:
                await send_json(scope, send, 200, b'"hello"')

    async def big(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_body(scope, receive, LIMITS)
        except PayloadTooLarge as exc:
            await send_json(scope, send, exc.status, exc.message.encode())

    async def wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        with self.gate.admit(scope["path"]) as admission:
            cut = lambda: admission.cut(CutReason.CLIENT_LEFT)  # noqa: E731
            async with watch_disconnect(scope, receive, cut):
                with admission.scope:
                    await trio.sleep_forever()
            self.left.append(str(admission.reason))
            await send_json(scope, send, 503, b'"cut"')

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        sink = open_sink(scope, send)
        self.streams.append(sink)

        async def work() -> None:
            await sink.start(200, [(b"content-type", b"text/event-stream")])
            await sink.serve()

        with self.gate.admit(scope["path"]) as admission:
            cut = lambda: admission.cut(CutReason.CLIENT_LEFT)  # noqa: E731
            async with watch_disconnect(scope, receive, cut):
                farewell = lambda: None if self.has_left(admission.reason) else b"bye"  # noqa: E731
                self.outcomes.append(
                    await stream_response(sink, admission, work, farewell=farewell)
                )

    def has_left(self, reason: CutReason | None) -> bool:
        return reason is CutReason.CLIENT_LEFT

    async def raise_late(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a handler that raises in the middle")

    async def raise_in_nursery(self) -> None:
        async def fail() -> None:
            raise RuntimeError("a handler that raises in a nursery")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)


# --- listeners ------------------------------------------------------------------------


async def test_a_taken_port_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}.*in use"):
            await open_listeners("127.0.0.1", port)


async def test_an_address_of_another_machine_is_named_in_the_error() -> None:
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1:0: the address does not belong"):
        await open_listeners("192.0.2.1", 0)
    with pytest.raises(PortInUse, match=r"\[2001:db8::1\]:0"):
        await open_listeners("2001:db8::1", 0)


async def test_an_unknown_host_is_named_in_the_error() -> None:
    with pytest.raises(PortInUse, match=r"no\.such\.host\.invalid:1: the host has no address"):
        await open_listeners("no.such.host.invalid", 1)


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
    with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:80: {words}"):
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


# --- answers before the request's end ----------------------------------------------------


async def test_an_early_answer_keeps_the_connection_if_the_body_follows_soon() -> None:
    async with running(App(), LIMITS) as server, client_of(server) as client:
        assert (await client.ask("POST", "/early", b"x" * 100_000)).status == 503
        assert (await client.ask("POST", "/echo", b"1")).body == b"1"
        assert server.server.accepted == 1


async def test_an_early_answer_arrives_although_the_body_never_ends() -> None:
    """Nor does a reset overtake it, nor does anything of the connection stay behind."""
    limits = attrs.evolve(LIMITS, linger_time=0.2)
    async with running(App(), limits) as server, await server.connect() as stream:
        await stream.send_all(
            b"POST /early HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999\r\n\r\n"
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload, stream)
            answer, was_reset = await read_to_end(stream)
            nursery.cancel_scope.cancel()
        assert b"503" in answer
        assert answer.endswith(b'"early"')
        assert not was_reset
        await server.wait_until(lambda: not server.server.connections)


async def upload(stream: trio.SocketStream) -> None:
    while True:
        try:
            await stream.send_all(b"x" * 5000)
        except trio.BrokenResourceError:
            return
        await trio.sleep(0.001)


@pytest.mark.parametrize("framing", [b"content-length: 10000000", b"transfer-encoding: chunked"])
async def test_a_body_that_is_too_large_is_answered_with_413(framing: bytes) -> None:
    limits = attrs.evolve(LIMITS, linger_time=0.2)
    async with running(App(), limits) as server, await server.connect() as stream:
        await stream.send_all(b"POST /big HTTP/1.1\r\nhost: t\r\n" + framing + b"\r\n\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload if b"length" in framing else upload_chunks, stream)
            answer, _ = await read_to_end(stream)
            nursery.cancel_scope.cancel()
        assert b" 413 " in answer
        await server.wait_until(lambda: not server.server.connections)


async def upload_chunks(stream: trio.SocketStream) -> None:
    while True:
        try:
            await stream.send_all(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        except trio.BrokenResourceError:
            return


async def test_one_byte_after_another_is_a_body_too() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(
            b"POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await stream.send_all(b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
        client = Http1Client(stream)
        client.parser.send(h11.Request(method="GET", target="/", headers=[("host", "t")]))
        client.parser.send(h11.EndOfMessage())
        assert (await client.answer()).body == b"x" * 5000


# --- HTTP/1 -----------------------------------------------------------------------------


async def test_http10_is_answered_and_closed() -> None:
    async with running(App(), LIMITS) as server:
        for path in (b"/", b"/stream"):
            async with await server.connect() as stream:
                await stream.send_all(b"GET " + path + b" HTTP/1.0\r\n\r\n")
                if path == b"/stream":
                    await finish_stream(server)
                answer, was_reset = await read_to_end(stream)
                assert b"200" in answer
                assert answer.endswith((b'"hello"', b"data"))
                assert b"chunked" not in answer
                assert not was_reset


async def finish_stream(server: Running, data: bytes = b"data") -> None:
    app = server.server.app
    assert isinstance(app, App)
    await server.wait_until(lambda: bool(app.streams) and app.streams[-1].started)
    sink = app.streams.pop()
    sink.feed(data)
    sink.finish(SinkOutcome.STOP)


async def test_head_has_the_headers_and_no_body() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"HEAD / HTTP/1.1\r\nhost: t\r\n\r\n")
        await stream.send_all(b"HEAD /stream HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        await finish_stream(server)
        answer, _ = await read_to_end(stream)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert b"content-length: 7" in answer
        assert b"hello" not in answer
        assert b"data" not in answer


async def test_a_kept_connection_carries_streams_and_whole_answers() -> None:
    async with running(App(), LIMITS) as server, client_of(server) as client:
        for number in range(5):
            await client.send("POST", "/stream", b"{}")
            await finish_stream(server, b"%d" % number)
            assert (await client.answer()).body == b"%d" % number
            assert (await client.ask("POST", "/echo", b"e")).body == b"e"
        assert server.server.accepted == 1


async def test_what_is_no_http_is_refused() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"hello there\r\n\r\n")
        answer, _ = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 400")


async def test_a_head_that_is_too_long_is_refused() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: t\r\na: " + b"x" * 2 * LIMITS.head_bytes)
        answer, _ = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 431")


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        head = (
            b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
        )
        await stream.send_all(head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        await stream.send_all(b"ok")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/wait", "/stream"])
@pytest.mark.parametrize("how", ["fin", "half-close", "reset"])
async def test_a_client_that_leaves_is_noticed(path: str, how: str) -> None:
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        await Http1Client(stream).send("POST", path, b"{}")
        await server.wait_until(lambda: app.gate.count == 1)
        if how == "half-close":
            await stream.send_eof()
        elif how == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how != "half-close":
            await stream.aclose()
        await server.wait_until(lambda: app.gate.count == 0)
        await server.wait_until(lambda: not server.server.connections)
    assert app.left + app.outcomes in (["client_left"], [SinkOutcome.GONE])


async def test_a_soft_cut_ends_a_stream_with_its_farewell_and_keeps_the_connection() -> None:
    app = App()
    async with running(app, LIMITS) as server, client_of(server) as client:
        await client.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        assert isinstance(app.streams[0], RawSink)
        app.streams[0].feed(b"some ")
        app.gate.cut_all(CutReason.DRAIN_LIMIT)
        assert (await client.answer()).body == b"some bye"
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.CUT])
        assert (await client.ask("GET", "/")).status == 200


# --- HTTP/2 -----------------------------------------------------------------------------


@attrs.define(eq=False)
class Http2Client:
    """As much of an HTTP/2 client as the tests need."""

    stream: trio.SocketStream
    parser: h2.connection.H2Connection = attrs.field(factory=h2.connection.H2Connection)
    bodies: dict[int, bytes] = attrs.field(factory=dict)
    statuses: dict[int, bytes] = attrs.field(factory=dict)
    ended: set[int] = attrs.field(factory=set)

    async def begin(self, method: str, path: str, *, end: bool = True) -> int:
        number: int = self.parser.get_next_available_stream_id()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "t")]
        self.parser.send_headers(number, head, end_stream=end)
        await self.flush()
        return number

    async def flush(self) -> None:
        await self.stream.send_all(self.parser.data_to_send())

    async def send_data(self, number: int, data: bytes, *, end: bool = False) -> None:
        self.parser.send_data(number, data, end_stream=end)
        await self.flush()

    async def read_until_ended(self, number: int) -> bytes:
        with trio.fail_after(PATIENCE):
            while number not in self.ended:
                data = await self.stream.receive_some()
                assert data, "the server closed the connection"
                self.take(self.parser.receive_data(data))
                await self.flush()
        return self.bodies.get(number, b"")

    def take(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.ResponseReceived):
                assert event.stream_id is not None
                self.statuses[event.stream_id] = dict(event.headers or [])[b":status"]
            elif isinstance(event, h2.events.DataReceived):
                assert event.stream_id is not None
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + (
                    event.data or b""
                )
                self.parser.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id
                )
            elif isinstance(event, h2.events.StreamEnded):
                assert event.stream_id is not None
                self.ended.add(event.stream_id)


async def http2(stream: trio.SocketStream) -> Http2Client:
    config = h2.config.H2Configuration(header_encoding=None)
    client = Http2Client(stream, h2.connection.H2Connection(config))
    client.parser.initiate_connection()
    await client.flush()
    return client


async def test_http2_with_prior_knowledge_many_streams_at_once() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        echo = await client.begin("POST", "/echo", end=False)
        streamed = await client.begin("GET", "/stream")
        await finish_stream(server, b"x" * 100_000)  # more than one window
        await client.send_data(echo, b"echo", end=True)
        assert await client.read_until_ended(echo) == b"echo"
        assert await client.read_until_ended(streamed) == b"x" * 100_000


async def test_http2_by_upgrade() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = Http2Client(stream, h2.connection.H2Connection())
        settings = client.parser.initiate_upgrade_connection()
        assert settings is not None
        await stream.send_all(
            b"GET / HTTP/1.1\r\nhost: t\r\nconnection: upgrade, http2-settings\r\n"
            b"upgrade: h2c\r\nhttp2-settings: " + settings + b"\r\n\r\n"
        )
        assert b"101" in await stream.receive_some(300)
        await client.flush()
        assert await client.read_until_ended(1) == b'"hello"'


async def test_an_early_answer_on_http2_waits_for_the_body_and_spares_the_other_streams() -> None:
    """hypercorn alone would end the connection with a KeyError at the first DATA frame."""
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        other = await client.begin("GET", "/stream")
        early = await client.begin("POST", "/early-close", end=False)
        await trio.sleep(0.05)
        for _ in range(30):  # more messages than hypercorn queues
            await client.send_data(early, b"x" * 100)
        await client.send_data(early, b"x", end=True)
        assert await client.read_until_ended(early) == b'"early"'
        assert client.statuses[early] == b"503"
        await finish_stream(server)
        assert await client.read_until_ended(other) == b"data"
        assert server.server.failed == 0


async def test_an_upload_that_outlasts_its_early_answer_ends_its_own_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = attrs.evolve(LIMITS, write_time=0.2)
    async with running(App(), limits) as server, client_of(server) as innocent:
        assert (await innocent.ask("GET", "/")).status == 200
        async with await server.connect() as stream:
            client = await http2(stream)
            early = await client.begin("POST", "/early", end=False)
            assert await client.read_until_ended(early) == b'"early"'
            await client.send_data(early, b"late")
            await read_to_end(stream)
        assert (await innocent.ask("GET", "/")).status == 200
        await server.wait_until(lambda: len(server.server.connections) == 1)
        assert server.server.failed == 1
    assert "KeyError" in caplog.text


async def test_a_reset_stream_is_noticed_and_spares_the_others() -> None:
    app = App()
    async with running(app, LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        waiting = await client.begin("POST", "/wait")
        streaming = await client.begin("POST", "/stream")
        other = await client.begin("POST", "/stream")
        await server.wait_until(lambda: app.gate.count == 3)
        client.parser.reset_stream(waiting)
        client.parser.reset_stream(streaming)
        await client.flush()
        await server.wait_until(lambda: app.gate.count == 1)
        assert app.left == ["client_left"]
        assert app.outcomes == [SinkOutcome.GONE]
        await finish_stream(server)
        assert await client.read_until_ended(other) == b"data"


async def test_a_stalled_http2_window_ends_at_the_write_limit() -> None:
    app = App()
    limits = attrs.evolve(LIMITS, write_time=0.3)
    async with running(app, limits) as server, await server.connect() as stream:
        client = await http2(stream)
        await client.begin("POST", "/stream")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        app.streams[0].feed(b"x" * 300_000)  # and no window is ever opened
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.GONE])
        await server.wait_until(lambda: not server.server.connections)
        assert server.server.reset == 1


async def test_a_stalled_http2_window_does_not_outlive_the_server() -> None:
    app = App()
    async with running(app, LIMITS) as server:
        async with await server.connect() as stream:
            client = await http2(stream)
            await client.begin("POST", "/stream")
            await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
            app.streams[0].feed(b"x" * 300_000)
            await trio.sleep(0.05)
            server.nursery.cancel_scope.cancel()
    assert app.gate.count == 0


async def test_an_http2_response_that_breaks_off_does_not_hang_its_client() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        client = await http2(stream)
        await client.begin("GET", "/raise-late")
        await read_to_end(stream)


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
            assert server.server.close_idle() == 2
            assert await read_to_end(idle.stream) == (b"", False)
            assert (await read_to_end(half))[0] == b""
            await finish_stream(server)
            assert (await busy.answer()).body == b"data"


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
    async with running(app, attrs.evolve(LIMITS, max_connections=1)) as server:
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
        await serve_http(App(), listeners)  # type: ignore[arg-type]
    assert raised.group_contains(OSError)


def test_the_cap_leaves_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, cap in ((1024, 960), (1_000_000, 4096), (10, 1), (-1, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert HttpLimits().connection_cap() == cap


async def test_an_exchange_is_there_only_on_our_own_server() -> None:
    assert exchange_of({"type": "http"}) is None
    assert exchange_of({"type": "http", "extensions": {"dynamo_trio.connection": {}}}) is None
