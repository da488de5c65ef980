"""HTTP/1 over real loopback sockets: early answers, versions, clients that leave."""

from __future__ import annotations

import socket

import attrs
import h11
import pytest
import trio

from dynamo_trio.http.sinks import RawSink, SinkOutcome
from dynamo_trio.lifecycle.admission import CutReason
from tests.http.harness import Http1Client, client_of, read_to_end, running
from tests.http.routes import LIMITS, App, finish_stream

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
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")


async def test_a_head_that_is_too_long_is_refused() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: t\r\na: " + b"x" * 2 * LIMITS.head_bytes)
        answer, _ = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        head = (
            b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
        )
        await stream.send_all(head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 Continue\r\n")
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


async def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(
            b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n"
            b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        answer, _ = await read_to_end(stream)
        assert b"connection: close" in answer.lower()
        assert answer.endswith(b"abc")
