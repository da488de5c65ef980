"""TLS: what holds in clear text holds inside it, and what is no TLS ends quietly."""

from __future__ import annotations

import logging
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.errors import FileUnusable, InvalidArgument
from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import send_json
from dynamo_trio.http.sinks import QueueSink, SinkOutcome
from dynamo_trio.http.tls import server_context
from dynamo_trio.lifecycle import CutReason
from dynamo_trio.wire.openai.response import error_body
from tests.http.harness import (
    PATIENCE,
    Http1Client,
    MemoryStream,
    Running,
    in_memory,
    read_to_end,
    running,
)
from tests.http.routes import LIMITS, App, finish_stream
from tests.http.test_http2 import Http2Client, http2
from tests.plane.tls_files import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Receive, Scope, Send


@attrs.frozen
class Ends:
    """The two ends' contexts."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    authority = Authority(tmp_path)
    identity = authority.identity("localhost")
    client = ssl.create_default_context(cafile=authority.file)
    return Ends(server_context(identity.cert, identity.key), client)


TlsClient = trio.SSLStream[Any]


async def shake_hands(stream: trio.abc.Stream, ends: Ends, *protocols: str) -> TlsClient:
    ends.client.set_alpn_protocols(list(protocols or ["http/1.1"]))
    tls = trio.SSLStream(stream, ends.client, server_hostname="localhost")
    with trio.fail_after(PATIENCE):
        await tls.do_handshake()
    return tls


@asynccontextmanager
async def tls_client(server: Running, ends: Ends) -> AsyncIterator[Http1Client]:
    async with await server.connect() as stream:
        yield Http1Client(await shake_hands(stream, ends))  # type: ignore[arg-type]  # sends and receives


async def test_requests_one_after_the_other(ends: Ends) -> None:
    async with running(App(), LIMITS, tls=ends.server) as server:
        async with tls_client(server, ends) as client:
            for number in range(3):
                body = b"%d" % number * 100_000
                assert (await client.ask("POST", "/echo", body)).body == body
        await server.wait_until(lambda: not server.server.connections)
        assert server.server.statistics().failed == 0


async def test_the_scope_says_https_and_nobody_writes_past_the_engine(ends: Ends) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        assert exchange.raw_socket() is None
        await send_json(scope, send, 200, scope["scheme"].encode())

    async with running(app, LIMITS, tls=ends.server) as server, tls_client(server, ends) as client:
        assert (await client.ask("GET", "/")).body == b"https"


async def test_a_stream_is_chunked_and_whole(ends: Ends) -> None:
    app = App()
    async with running(app, LIMITS, tls=ends.server) as server, tls_client(server, ends) as client:
        for _ in range(2):
            await client.send("POST", "/stream", b"{}")
            await server.wait_until(lambda: bool(app.streams) and app.streams[-1].started)
            assert isinstance(app.streams[-1], QueueSink)
            await finish_stream(server, b"x" * 200_000)
            assert (await client.answer()).body == b"x" * 200_000
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.STOP] * 2)


async def test_http2_is_agreed_upon_and_preferred(ends: Ends) -> None:
    app = App()
    async with running(app, LIMITS, tls=ends.server) as server, await server.connect() as stream:
        tls = await shake_hands(stream, ends, "h2", "http/1.1")
        assert tls.selected_alpn_protocol() == "h2"
        client: Http2Client = await http2(tls)  # type: ignore[arg-type]  # a stream like any other
        first = await client.begin("POST", "/stream", end=False)
        await client.send_data(first, b"{}", end=True)
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        second = await client.begin("GET", "/")
        assert await client.read_until_ended(second) == b'"hello"'
        await finish_stream(server, b"y" * 300_000)
        assert await client.read_until_ended(first) == b"y" * 300_000


async def test_a_cut_stream_has_its_farewell(ends: Ends) -> None:
    app = App()
    async with running(app, LIMITS, tls=ends.server) as server, tls_client(server, ends) as client:
        await client.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        app.streams[0].feed(b"some, ")
        app.gate.cut_all(CutReason.DRAIN_LIMIT)
        assert (await client.answer()).body == b"some, bye"
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.CUT])


# --- clients that leave --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close_notify", "fin", "rst"])
async def test_a_client_that_leaves_is_noticed_in_that_moment(how: str, ends: Ends) -> None:
    app = App()
    async with running(app, LIMITS, tls=ends.server) as server, tls_client(server, ends) as client:
        await client.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        await leave(client.stream, how)
        await server.wait_until(lambda: app.outcomes == [SinkOutcome.GONE])
        await server.wait_until(lambda: not server.server.connections)


async def leave(tls: Any, how: str) -> None:
    sock: trio.socket.SocketType = tls.transport_stream.socket
    if how == "close_notify":
        with trio.move_on_after(PATIENCE):
            await tls.aclose()
    elif how == "fin":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()


async def test_a_client_that_never_reads_is_let_go_at_the_write_limit(ends: Ends) -> None:
    app = App()
    limits = attrs.evolve(LIMITS, write_time=0.3)
    async with running(app, limits, send_buffer=4608, tls=ends.server) as server:
        async with (
            await server.connect(receive_buffer=4608) as stream,
            tls_client(server, ends) as other,
        ):
            stuck = Http1Client(await shake_hands(stream, ends))  # type: ignore[arg-type]  # a stream like any other
            await stuck.send("POST", "/stream", b"{}")
            await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
            app.streams[0].feed(b"x" * 500_000)
            assert (await other.ask("GET", "/")).status == 200
            await server.wait_until(lambda: app.outcomes == [SinkOutcome.GONE])
            await server.wait_until(lambda: server.server.reset == 1)  # counted at its end
            assert (await other.ask("GET", "/")).status == 200


async def test_who_sends_garbage_behind_the_handshake_has_left(ends: Ends) -> None:
    app = App()
    async with running(app, LIMITS, tls=ends.server) as server, tls_client(server, ends) as client:
        await client.send("POST", "/wait", b"{}")
        await server.wait_until(lambda: app.gate.count == 1)
        raw = client.stream.transport_stream  # type: ignore[attr-defined]  # a stream like any other
        await raw.send_all(b"no TLS at all" * 10)
        await server.wait_until(lambda: app.gate.count == 0 and not server.server.connections)
        assert server.server.statistics().failed == 0


# --- the end of a connection ---------------------------------------------------------------


async def test_a_closed_connection_says_so_in_tls(ends: Ends) -> None:
    """Else an answer that ends with its connection looks cut off to a careful client."""
    async with running(App(), LIMITS, tls=ends.server) as server, await server.connect() as stream:
        tls = await shake_hands(stream, ends)  # strict: an end without a close_notify raises
        await tls.send_all(b"GET / HTTP/1.0\r\n\r\n")
        data, was_reset = await read_to_end(tls)
        assert data.endswith(b'"hello"')
        assert not was_reset


async def test_and_so_does_an_idle_one_at_the_servers_end(ends: Ends) -> None:
    async with running(App(), LIMITS, tls=ends.server) as server, await server.connect() as stream:
        tls = await shake_hands(stream, ends)
        client = Http1Client(tls)  # type: ignore[arg-type]  # a stream like any other
        assert (await client.ask("GET", "/")).status == 200
        await server.wait_until(lambda: server.server.statistics().busy == 0)
        assert await server.server.close_idle() == 1
        assert await read_to_end(tls) == (b"", False)


async def test_a_broken_answer_does_not_end_well(ends: Ends) -> None:
    async with running(App(), LIMITS, tls=ends.server) as server, await server.connect() as stream:
        tls = await shake_hands(stream, ends)
        await tls.send_all(b"GET /raise-late HTTP/1.0\r\n\r\n")
        _, broke = await read_to_end(tls)
        assert broke


# --- strangers -----------------------------------------------------------------------------


#: What comes behind the head.
SPEAK_TLS = error_body(InvalidArgument("This port speaks HTTPS, not HTTP."))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nhost: t\r\n\r\n", SPEAK_TLS),
        (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", SPEAK_TLS),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
        (b"\x00" * 500, b""),
        (b"\x16\x03\x01\x02\x00" + b"\xff" * 512, b""),
        (b"", b""),
    ],
)
async def test_what_is_no_tls_concerns_nobody_else(
    said: bytes, answer: bytes, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(App(), LIMITS, tls=ends.server) as server:
        async with tls_client(server, ends) as innocent:
            assert (await innocent.ask("GET", "/")).status == 200
            for _ in range(3):
                async with await server.connect() as stranger:
                    await stranger.send_all(said)
                    await stranger.send_eof()
                    heard, _ = await read_to_end(stranger)
                    assert heard.endswith(answer)
                    assert heard.startswith(b"HTTP/1.1 400 Bad Request\r\n") or not answer
            await server.wait_until(lambda: server.server.strangers == 3)
            assert (await innocent.ask("GET", "/")).status == 200
        assert server.server.statistics().failed == 0
    (record,) = [record for record in caplog.records if "TLS" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert record.exc_info is None


async def test_who_trusts_another_authority_is_a_stranger(ends: Ends) -> None:
    async with running(App(), LIMITS, tls=ends.server) as server, await server.connect() as stream:
        other = ssl.create_default_context()
        tls = trio.SSLStream(stream, other, server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError):
            await tls.do_handshake()
        await stream.aclose()
        await server.wait_until(lambda: not server.server.connections)


async def test_old_tls_is_refused(ends: Ends) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("AES128-SHA256")  # TLS 1.2 without forward secrecy: RFC 9113 forbids it
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with running(App(), LIMITS, tls=ends.server) as server, await server.connect() as stream:
        with pytest.raises(trio.BrokenResourceError):
            await trio.SSLStream(stream, old, server_hostname="localhost").do_handshake()
        await server.wait_until(lambda: server.server.strangers == 1)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
async def test_a_handshake_has_its_time_however_it_trickles_in(
    said: bytes, ends: Ends, autojump_clock: MockClock
) -> None:
    limits = HttpLimits(handshake_time=10)
    async with in_memory(App(), limits, tls=ends.server) as memory:
        client = memory.connect()
        with suppress(trio.BrokenResourceError):
            for byte in said + bytes(100):  # a byte of the hello a second
                await trio.sleep(1)
                await client.send_all(bytes([byte]) if said else b"")
                if memory.server.strangers:
                    break
        assert trio.current_time() == pytest.approx(limits.handshake_time, abs=2)
        assert memory.server.strangers == 1
        assert not memory.server.connections


async def test_one_that_shakes_hands_and_says_no_more_is_idle(
    ends: Ends, autojump_clock: MockClock
) -> None:
    limits = HttpLimits(idle_time=75)
    async with in_memory(App(), limits, tls=ends.server) as memory:
        client = memory.connect()
        await trio.sleep(5)
        tls = await shake_hands(client, ends)
        await read_to_end_at_leisure(tls)
        assert trio.current_time() == pytest.approx(80, abs=1)


async def read_to_end_at_leisure(stream: trio.abc.ReceiveStream) -> None:
    with suppress(trio.BrokenResourceError):  # nothing can be written to a memory stream
        while await stream.receive_some():
            pass


async def test_the_end_of_the_server_ends_handshakes(ends: Ends) -> None:
    ended: list[MemoryStream] = []
    async with in_memory(App(), LIMITS, tls=ends.server) as memory:
        memory.connect()
        await trio.testing.wait_all_tasks_blocked()
        ended = memory.ends
    assert not memory.server.connections
    with pytest.raises(trio.ClosedResourceError):
        await ended[0].receive_some()


async def test_handshakes_make_room_at_the_cap(ends: Ends) -> None:
    limits = attrs.evolve(LIMITS, max_connections=2)
    async with running(App(), limits, tls=ends.server) as server:
        async with await server.connect() as first, await server.connect() as second:
            await server.wait_until(lambda: len(server.server.connections) == 2)
            async with tls_client(server, ends) as client:
                assert (await client.ask("GET", "/")).status == 200
            assert (await read_to_end(first))[0] == b""
            await second.aclose()


# --- the files -----------------------------------------------------------------------------


def test_files_that_are_wrong_are_named_with_their_variables(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.identity("one.example"), authority.identity("two.example")
    missing, nonsense = tmp_path / "none.pem", tmp_path / "nonsense.pem"
    nonsense.write_text("no PEM")
    for cert, key, words in (
        (missing, one.key, f"DYN_TLS_CERT_PATH={missing}: must be a PEM certificate"),
        (nonsense, one.key, f"DYN_TLS_CERT_PATH={nonsense}: must be a PEM certificate"),
        (one.cert, missing, f"DYN_TLS_KEY_PATH={missing}: must be the PEM key of"),
        (one.cert, nonsense, f"DYN_TLS_KEY_PATH={nonsense}: must be the PEM key of"),
        (one.cert, other.key, f"DYN_TLS_KEY_PATH={other.key}: must be the PEM key of"),
    ):
        with pytest.raises(FileUnusable) as caught:
            server_context(cert, key)
        assert words in str(caught.value)
