"""Sessions of workers that speak the Realtime API, over real sockets: every way to leave."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio_websocket import ConnectionClosed, wrap_client_stream

from tests.frontend.voices import PATIENCE, open_choir, until
from tests.http.harness import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio_websocket import WebSocketConnection

    from tests.frontend.voices import Choir, Voice


@asynccontextmanager
async def connected(
    folder: Path, kind: str = "mux"
) -> AsyncIterator[tuple[Choir, WebSocketConnection, trio.SocketStream]]:
    """A session that its worker has agreed to, its WebSocket, and the connection below."""
    async with open_choir(folder, kind) as choir, running(choir.app) as server:
        stream = await server.connect()
        async with stream, trio.open_nursery() as nursery:
            with trio.fail_after(PATIENCE):
                peer = await wrap_client_stream(nursery, stream, "localhost", "/v1/realtime")
                await hear(peer)
                session = {"type": "realtime", "model": "voice"}
                await say(peer, "session.update", session=session)
                await hear(peer)
            yield choir, peer, stream
            await stream.aclose()
            nursery.cancel_scope.cancel()


async def say(peer: WebSocketConnection, type: str, **fields: object) -> None:
    await peer.send_message(json.dumps({"type": type, **fields}))


async def hear(peer: WebSocketConnection) -> dict[str, object]:
    event: dict[str, object] = json.loads(await peer.get_message())
    return event


async def fill(voice: Voice, peer: WebSocketConnection) -> None:
    """Send more than everybody on the way takes, to a worker that does not read."""
    voice.deaf = True
    with trio.move_on_after(1.0):
        while True:
            await say(peer, "input_audio_buffer.append", audio="A" * 100_000)


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("kind", ["mem", "tcp", "mux"])
async def test_a_session_that_is_closed_stops_its_worker_without_killing_it(
    kind: str, tmp_path: Path
) -> None:
    async with connected(tmp_path, kind) as (choir, peer, _):
        with trio.fail_after(PATIENCE):
            await say(peer, "hello")
            assert (await hear(peer))["of"] == "hello"
            await peer.aclose()
            await until(lambda: choir.voices[0].ends == [(True, False)])
            await until(lambda: choir.lifecycle.http.count == 0)
        assert choir.outcomes() == {"success": 1}


async def test_a_worker_may_go_on_speaking_behind_its_client(tmp_path: Path) -> None:
    async with connected(tmp_path) as (choir, peer, _):
        [voice] = choir.voices
        voice.last_words = 5
        with trio.fail_after(PATIENCE):
            await say(peer, "hello")
            assert (await hear(peer))["of"] == "hello"
            await peer.aclose()
            await until(lambda: choir.lifecycle.http.count == 0)
        assert voice.ends == [(True, False)]
        assert voice.last_words == 0


@pytest.mark.parametrize("kind", ["tcp", "mux"])
@pytest.mark.parametrize(
    ("how", "full"), [("fin", False), ("rst", False), ("rst", True)], ids=["fin", "rst", "full"]
)
async def test_a_client_that_is_gone_is_noticed(
    how: str, full: bool, kind: str, tmp_path: Path
) -> None:
    """Also if its worker takes nothing, and so nothing of it is read any more.

    Behind what does not fit into our window no FIN comes: then only a reset can be seen.
    """
    async with connected(tmp_path, kind) as (choir, peer, stream):
        [voice] = choir.voices
        if full:
            await fill(voice, peer)
        with trio.fail_after(PATIENCE):
            if how == "fin":
                await stream.aclose()
            else:
                reset(stream)
            await until(lambda: len(voice.ends) == 1)
            await until(lambda: choir.lifecycle.http.count == 0)
        assert choir.outcomes() == {"cancelled": 1}
        assert choir.frontend.kept.used == 0


async def test_a_client_that_reads_nothing_does_not_hurt_others(tmp_path: Path) -> None:
    async with connected(tmp_path) as (choir, peer, _):
        for _ in range(20):
            await say(peer, "input_audio_buffer.append", audio="FLOOD")  # 40 MB of answers
        async with connected_too(choir) as other:
            with trio.fail_after(PATIENCE):
                for number in range(100):
                    await say(other, "hello", number=number)
                    assert (await hear(other))["event"] == {"type": "hello", "number": number}
        assert len(choir.voices[0].ends) == 1


@asynccontextmanager
async def connected_too(choir: Choir) -> AsyncIterator[WebSocketConnection]:
    async with running(choir.app) as server, await server.connect() as stream:
        async with trio.open_nursery() as nursery:
            path = "/v1/realtime?model=voice"
            peer = await wrap_client_stream(nursery, stream, "localhost", path)
            await hear(peer)
            yield peer
            await peer.aclose()


@pytest.mark.parametrize(
    ("frame", "code"), [("no json", 1007), (b"\x00", 1003), ('{"type": "end"}', 1000)]
)
async def test_close_codes_reach_the_client(frame: str | bytes, code: int, tmp_path: Path) -> None:
    async with connected(tmp_path) as (choir, peer, _):
        await peer.send_message(frame)
        with trio.fail_after(PATIENCE), pytest.raises(ConnectionClosed) as caught:
            await peer.get_message()
        assert caught.value.reason is not None
        assert caught.value.reason.code == code
        with trio.fail_after(PATIENCE):
            await until(lambda: choir.lifecycle.http.count == 0)
        assert len(choir.voices[0].ends) == 1
