"""A client of ``/v1/realtime`` of either make's frontend."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio_websocket import wrap_client_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_websocket import WebSocketConnection

PATIENCE = 30.0


async def hear(socket: WebSocketConnection) -> dict[str, Any]:
    """The next event."""
    with trio.fail_after(PATIENCE):
        event: dict[str, Any] = json.loads(await socket.get_message())
        return event


@asynccontextmanager
async def websocket(port: int, path: str) -> AsyncIterator[WebSocketConnection]:
    """A WebSocket whose connection is closed at the end, also if the other side came first."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        async with trio.open_nursery() as nursery:
            socket = await wrap_client_stream(nursery, stream, "127.0.0.1", path)
            yield socket
            await socket.aclose()


@asynccontextmanager
async def session(port: int, name: str) -> AsyncIterator[WebSocketConnection]:
    """A WebSocket that has told which model it wants."""
    async with websocket(port, f"/v1/realtime?model={name}") as socket:
        assert (await hear(socket))["type"] == "session.created"
        wanted = {"type": "realtime", "model": name}
        await socket.send_message(json.dumps({"type": "session.update", "session": wanted}))
        updated = await hear(socket)
        assert (updated["type"], updated["session"]["model"]) == ("session.updated", name)
        yield socket


async def say(socket: WebSocketConnection, audio: str) -> None:
    """Send audio."""
    await socket.send_message(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
