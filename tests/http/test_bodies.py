"""All bodies together: what lies in memory has a bound, and small requests pass by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import UploadsFull
from dynamo_trio.http.bodies import BodyRoom, FreeShare
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, send_json
from tests.http.harness import Http1Client, running

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Receive, Scope, Send

LIMITS = HttpLimits(body_bytes=1000, body_total=2000, body_free=100)


def waiting() -> h11.Connection:
    """A parser whose request has been sent by other means."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "t")]))
    parser.send(h11.EndOfMessage())
    return parser


def test_room_is_taken_beyond_what_is_free_and_given_back() -> None:
    room = BodyRoom()
    with room.hold(LIMITS) as one, room.hold(LIMITS) as other:
        one.grow(100)
        assert room.taken == 0
        one.grow(1100)
        one.grow(1100)
        other.grow(1100)
        assert room.taken == 2000
        with room.hold(LIMITS) as small:
            small.grow(100)
            with pytest.raises(UploadsFull, match="over 2000 bytes are being read"):
                small.grow(101)
        assert room.taken == 2000
    assert room.taken == 0


def test_the_bodies_of_one_connection_share_what_is_free() -> None:
    """Or each stream of HTTP/2, of which a client may have hundreds, would have it anew."""
    room, share, elsewhere = BodyRoom(), FreeShare(), FreeShare()
    with room.hold(LIMITS, share) as one:
        one.grow(60)
        with room.hold(LIMITS, share) as other, room.hold(LIMITS, elsewhere) as third:
            other.grow(60)
            other.grow(70)
            third.grow(100)
            assert (room.taken, share.taken, elsewhere.taken) == (30, 100, 100)
            one.grow(2030)
            assert room.taken == 2000
            with pytest.raises(UploadsFull):
                other.grow(71)
        assert (room.taken, share.taken, elsewhere.taken) == (1970, 60, 0)
        with room.hold(LIMITS, share) as other:
            other.grow(40)
            assert share.taken == 100
    assert (room.taken, share.taken) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 1500), max_size=5), max_size=8))
def test_the_sum_is_kept_and_nothing_is_left(bodies: list[list[int]]) -> None:
    room = BodyRoom()
    for pieces in bodies:
        size = 0
        with room.hold(LIMITS) as hold:
            for piece in pieces:
                size += piece
                before = room.taken
                try:
                    hold.grow(size)
                except UploadsFull:
                    assert room.taken == before
                assert room.taken <= LIMITS.body_total
    assert room.taken == 0


async def test_one_too_many_is_refused_with_its_reason_and_others_go_on() -> None:
    room = BodyRoom()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with room.hold(LIMITS) as hold:
                body = await read_body(scope, receive, LIMITS, hold)
        except UploadsFull as exc:
            await send_json(scope, send, exc.status, exc.message.encode())
        else:
            await send_json(scope, send, 200, b"%d" % len(body))

    head = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n"
    async with running(app, LIMITS) as server:
        async with (
            await server.connect() as first,
            await server.connect() as second,
            await server.connect() as third,
            await server.connect() as fourth,
        ):
            for half in (first, second):
                await half.send_all(head + b"x" * 999)
            await server.wait_until(lambda: room.taken == 2 * 899)
            await third.send_all(head + b"x" * 999)
            assert (await Http1Client(third, waiting()).answer()).status == 503
            small = await Http1Client(fourth).ask("POST", "/", b"x" * 100)
            assert (small.status, small.body) == (200, b"100")
            for half in (first, second):
                await half.send_all(b"x")
                assert (await Http1Client(half, waiting()).answer()).body == b"1000"
        await server.wait_until(lambda: room.taken == 0)


async def test_who_leaves_gives_its_room_back() -> None:
    room = BodyRoom()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with room.hold(LIMITS) as hold:
            await read_body(scope, receive, LIMITS, hold)

    async with running(app, LIMITS) as server:
        async with await server.connect() as half:
            await half.send_all(b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 999\r\n\r\n")
            await half.send_all(b"x" * 500)
            await server.wait_until(lambda: room.taken == 400)
        await server.wait_until(lambda: room.taken == 0)
