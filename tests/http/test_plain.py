"""Plain requests and answers, which go past h11: that h11 would have done the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import h11
import pytest
import trio
from hypercorn.config import Config
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.frontend.cors import with_headers
from dynamo_trio.http.plain import read_plain
from dynamo_trio.http.reading import Reader
from dynamo_trio.http.respond import send_json
from dynamo_trio.http.sinks import TERMINATOR, SinkOutcome
from dynamo_trio.http.spoken import SpokenHttp1
from tests.http.harness import client_of, running
from tests.http.routes import LIMITS, App, finish_stream

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send

MOST = 4096
BODY = b'{"model":"m"}'
PLAIN = (
    b"POST /v1/chat/completions?a=%20b HTTP/1.1\r\nHost: localhost:8000\r\n"
    b"Content-Type:application/json\r\nX-Empty:\r\nX-Spaces: \t a \t b \t \r\nX-Latin: \xe9\r\n"
    b"Content-Length: 13\r\nConnection: keep-alive\r\n\r\n"
)

#: What a head may be made of, and what may not be in one.
PIECES = st.sampled_from(
    [
        *(b"GET ", b"POST ", b"HEAD ", b"PRI ", b"CONNECT ", b"get ", b" "),
        *(b"/", b"/a?b", b"*", b"http://h/", b"\x80", b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0"),
        *(b"\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\n\n", b"\r", b"\0", b"\x0b", b"\x0c", b"\t"),
        *(b"host: t", b"Host:t", b"host : t", b": t", b"x:", b"x: y z", b" folded", b"x: \xff"),
        *(b"content-length: 3", b"content-length: 3, 3", b"Content-Length: -1"),
        *(b"content-length: 99999999999999999999999", b"content-length: 0x3", b"content-length:"),
        *(b"transfer-encoding: chunked", b"expect: 100-continue", b"upgrade: h2c"),
        *(b"connection: close", b"connection: keep-alive", b"connection: Keep-Alive, x"),
        *(b"abc", b"xxxxxxxx" * 600),
    ]
)
HEADS = st.one_of(
    st.lists(PIECES, max_size=12).map(b"".join),
    # Most of the above are far from any request, so others begin as one.
    st.lists(PIECES, max_size=8).map(
        lambda parts: b"POST / HTTP/1.1\r\nhost: t\r\n" + b"".join(parts) + b"\r\n\r\nabc"
    ),
    st.lists(st.tuples(PIECES, st.just(b"\r\n")), max_size=6).map(
        lambda parts: b"GET /a HTTP/1.1\r\n" + b"".join(b"".join(p) for p in parts) + b"\r\n"
    ),
    st.tuples(st.integers(0, len(PLAIN)), PIECES, st.integers(0, 3)).map(
        lambda cut: PLAIN[: cut[0]] + cut[1] + PLAIN[cut[0] + cut[2] :] + BODY
    ),
)


def slow_events(data: bytes) -> tuple[Reader, list[Any]]:
    """What h11 makes of it."""
    reader = Reader(MOST)
    events: list[Any] = []
    reader.receive_data(data)
    while not events or events[-1] not in (h11.NEED_DATA, h11.PAUSED):
        events.append(reader.next_event())
        if isinstance(events[-1], h11.ConnectionClosed):
            break
    return reader, events


def told(events: list[Any]) -> tuple[Any, bytes, bool]:
    """A request, its body so far, and whether that was all."""
    body = b"".join(bytes(e.data) for e in events if isinstance(e, h11.Data))
    head = events[0]
    over = any(isinstance(event, h11.EndOfMessage) for event in events)
    return (head.method, head.target, list(head.headers), head.http_version), body, over


def state_of(reader: Reader) -> list[object]:
    """All that decides how it goes on."""
    return [
        reader.states,
        vars(reader._cstate),
        reader.their_http_version,
        reader._request_method,
        reader.client_is_waiting_for_100_continue,
        reader.trailing_data,
        reader.asked_for_head,
        _kind(reader._reader),
        _kind(reader._writer),
    ]


def _kind(part: Any) -> object:
    """Functions are themselves; of readers and writers of bodies there is one for each body."""
    return part if part is None or hasattr(part, "__code__") else (type(part), vars(part))


@settings(max_examples=1500, deadline=None)
@given(HEADS)
def test_what_is_plain_is_read_as_h11_reads_it(data: bytes) -> None:
    fast = Reader(MOST)
    plain = fast.take_plain(data)
    if plain is None:
        assert state_of(fast) == state_of(Reader(MOST))
        return
    head, body = plain
    rest: list[Any] = []
    while body is None and (not rest or rest[-1] not in (h11.NEED_DATA, h11.PAUSED)):
        rest.append(fast.next_event())
    slow, events = slow_events(data)
    request, slow_body, over = told(events)
    assert (head.method, head.target, head.headers, b"1.1") == request
    if body is None:
        body = b"".join(bytes(event.data) for event in rest if isinstance(event, h11.Data))
        assert over is any(isinstance(event, h11.EndOfMessage) for event in rest)
    else:
        assert over
    assert body == slow_body
    assert state_of(fast) == state_of(slow)


@pytest.mark.parametrize(
    "more", [b"", b"Accept-Encoding: gzip, deflate, br\r\n", b"Authorization: Bearer k\r\n"]
)
def test_what_clients_send_as_a_rule_is_plain(more: bytes) -> None:
    data = PLAIN.replace(b"X-Empty", more + b"X-Empty")
    head = read_plain(data + BODY, MOST)
    assert head is not None
    assert (head.length, head.size) == (len(BODY), len(data))


@pytest.mark.parametrize(
    "line",
    [
        *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Upgrade: websocket"),
        *(b"Connection: close", b"Host: twice", b"Content-Length: 13", b" folded", b"no colon"),
        *(b"Connection: keep-alive", b"bad\0: x", b"bad: \0", b"x : y", b"a: b\nc: d"),
    ],
)
def test_what_may_change_more_than_a_value_is_left_to_h11(line: bytes) -> None:
    assert read_plain(PLAIN.replace(b"X-Empty:", line), MOST) is None


def test_a_head_that_is_too_long_by_a_byte_is_left_to_h11() -> None:
    assert read_plain(PLAIN, len(PLAIN)) is not None
    assert read_plain(PLAIN, len(PLAIN) - 1) is None


@pytest.mark.parametrize(
    "field",
    [
        b"x:" + b" " * 30_000 + b"a \t" * 10_000 + b"\0",
        b"x:" + b" " * 60_000 + b"\0",
        b"x:" + b" \t" * 30_000,
        b"x: " + b"a" * 60_000 + b"\0",
        b"x: a" + b" " * 60_000 + b"\0",
        b"x" * 60_000,
        b"x: a\r\n" * 10_000 + b"\0",
        b"x:\r\n" * 10_000 + b"x",
    ],
    ids=["mixed", "spaces", "no end", "long", "behind", "name", "lines", "empty lines"],
)
def test_a_head_that_never_matches_takes_no_longer_than_it_is_long(field: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nhost: t\r\n" + field + b"\r\n\r\n"
    began = time.process_time()
    read_plain(head, 10**6)
    assert time.process_time() - began < 1.0  # what is quadratic takes many seconds


def test_the_frame_of_an_answer_leaves_h11_as_if_it_had_made_it() -> None:
    fast, slow = Reader(MOST), Reader(MOST)
    for _ in range(2):
        assert fast.take_plain(PLAIN + BODY) is not None
        slow.receive_data(PLAIN + BODY)
        while slow.next_event() is not h11.NEED_DATA:
            pass
        assert state_of(fast) == state_of(slow)
        assert fast.begin_chunked()
        slow.send(h11.Response(status_code=200, headers=[]))
        assert state_of(fast) == state_of(slow)
        assert fast.end_chunked()
        slow.send(h11.EndOfMessage())
        assert state_of(fast) == state_of(slow)
        fast.start_next_cycle()
        h11.Connection.start_next_cycle(slow)
        assert state_of(fast) == state_of(slow)


@pytest.mark.parametrize(
    "request_head",
    [
        b"HEAD / HTTP/1.1\r\nhost: t\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
def test_the_head_of_an_answer_that_is_not_plain_is_left_to_h11(request_head: bytes) -> None:
    reader = Reader(MOST)
    reader.receive_data(request_head)
    reader.next_event()
    before = state_of(reader)
    assert not reader.begin_chunked()
    assert not reader.end_chunked()
    assert state_of(reader) == before


# --- on a connection ----------------------------------------------------------------------


async def head_of_a_stream() -> bytes:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        await stream.send_all(b"POST /stream HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}")
        await finish_stream(server)
        said = b""
        while not said.endswith(TERMINATOR):
            said += await stream.receive_some()
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n")
        assert b'"hello"' in await stream.receive_some()
    head, _, body = said.partition(b"\r\n\r\n")
    assert body == b"4\r\ndata\r\n" + TERMINATOR
    return head


async def test_the_head_of_a_streamed_answer_is_the_one_that_h11_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Config, "response_headers", lambda self, kind: [(b"date", b"today")])
    made = (await head_of_a_stream()).split(b"\r\n")
    monkeypatch.setattr(SpokenHttp1, "begin_chunked", lambda *args: None)
    h11s = (await head_of_a_stream()).split(b"\r\n")
    assert made == h11s
    assert made[0] == b"HTTP/1.1 200 OK"


async def test_a_plain_request_has_the_scope_that_hypercorn_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append({**scope, "extensions": list(scope["extensions"])})
        scopes[-1]["body"] = await receive()
        await send_json(scope, send, 200, b"1")

    async with running(app, LIMITS) as server, client_of(server) as client:
        for _ in range(2):
            asked = await client.ask("POST", "/v1/chat%20x/%E2%82%AC?a=%20b&c", b"{}", accept="*/*")
            assert asked.body == b"1"
            monkeypatch.setattr(Reader, "take_plain", lambda *args: None)
    assert scopes[0] == scopes[1]
    assert list(scopes[0]) == list(scopes[1])


async def test_requests_that_come_together_are_answered_one_after_the_other() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        one = b"POST /%b HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}"
        await stream.send_all(one % b"stream" + one % b"echo" + one % b"stream")
        await finish_stream(server, b"first")
        await finish_stream(server, b"third")
        said = b""
        while said.count(TERMINATOR) < 2:
            said += await stream.receive_some()
        assert [said.find(what) for what in (b"first", b"\r\n{}", b"third")] == sorted(
            said.find(what) for what in (b"first", b"\r\n{}", b"third")
        )
        assert b"\r\n{}" in said


async def test_a_stream_whose_head_the_app_adds_to_is_left_to_hypercorn() -> None:
    app = App()

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, with_headers(send, [(b"x-more", b"1")]))

    async with running(wrapped, LIMITS) as server, client_of(server) as client:
        await client.send("POST", "/stream", b"{}")
        await server.wait_until(lambda: bool(app.streams) and app.streams[0].started)
        app.streams[0].feed(b"data")
        app.streams[0].finish(SinkOutcome.STOP)
        answer = await client.answer()
        assert (answer.headers[b"x-more"], answer.body) == (b"1", b"data")
        assert (await client.ask("GET", "/")).status == 200


async def test_a_body_that_follows_its_head_in_pieces_is_read_by_h11() -> None:
    async with running(App(), LIMITS) as server, await server.connect() as stream:
        for piece in (b"POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 6\r\n\r\n", b"abc"):
            await stream.send_all(piece)
            await trio.sleep(0.05)
        await stream.send_all(b"def")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n")
        assert b"hello" in await stream.receive_some()
