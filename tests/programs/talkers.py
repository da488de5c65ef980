"""Sessions of ``/v1/realtime`` by trio-websocket: each keeps all that it hears, and its end."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import attrs
import trio
import trio_websocket

if TYPE_CHECKING:
    from collections.abc import Callable

Event = dict[str, Any]
TRANSCRIBED = "conversation.item.input_audio_transcription.completed"


def append_and_commit() -> list[Event]:
    """A second of audio, to be transcribed."""
    audio = base64.b64encode(bytes(48_000)).decode()
    append = {"type": "input_audio_buffer.append", "audio": audio}
    return [append, {"type": "input_audio_buffer.commit"}]


def ask_for_much() -> list[Event]:
    """A response that goes on until the model's context is full."""
    content = [{"type": "input_text", "text": "Why is the sky blue?"}]
    item = {"type": "message", "role": "user", "content": content}
    create = {"type": "conversation.item.create", "item": item}
    return [create, {"type": "response.create"}]


@attrs.define(eq=False)
class Talker:
    """One session."""

    model: str
    #: What it says at first, and again whenever ``again`` is heard.
    says: Callable[[], list[Event]] = list
    again: str = ""
    heard: list[Event] = attrs.field(factory=list)
    #: Something of an answer was heard; the session, if it asks for none.
    begun: trio.Event = attrs.field(factory=trio.Event)
    #: Of the Close frame.
    code: int | None = None

    async def run(self, port: int) -> None:
        """Until it is closed."""
        path = f"/v1/realtime?model={self.model}"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            async with trio.open_nursery() as nursery:
                socket = await trio_websocket.wrap_client_stream(nursery, stream, "test", path)
                try:
                    await self._talk(socket)
                except trio_websocket.ConnectionClosed as closed:
                    self.code = closed.reason.code if closed.reason else None
                nursery.cancel_scope.cancel("it is closed")

    async def _talk(self, socket: trio_websocket.WebSocketConnection) -> None:
        await self._say(socket)
        while True:
            event = json.loads(await socket.get_message())
            self.heard.append(event)
            if event["type"].endswith(".delta") or not self.says():
                self.begun.set()
            if event["type"] == self.again:
                await self._say(socket)

    async def _say(self, socket: trio_websocket.WebSocketConnection) -> None:
        for event in self.says():
            await socket.send_message(json.dumps(event))

    @property
    def notices(self) -> list[tuple[str, bool]]:
        """The reason of each notice of a drain, and whether it was the last word."""
        kind = "dynamo_trio.session.draining"
        return [(e["reason"], e["deadline"] == 0) for e in self.heard if e["type"] == kind]
