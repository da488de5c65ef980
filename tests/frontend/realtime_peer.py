"""A client of ``/v1/realtime`` that calls the ASGI app directly, in virtual time."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.frontend.app import App

Event = dict[str, Any]


@attrs.define(eq=False)
class Peer:
    """One WebSocket, as its client has it."""

    app: App
    #: Status (with headers and body) of a refusal; 101 once the upgrade was accepted.
    status: int = 0
    headers: list[tuple[bytes, bytes]] = attrs.field(factory=list)
    body: bytes = b""
    accepted: Event = attrs.field(factory=dict)
    events: list[Event] = attrs.field(factory=list)
    #: Code and reason of the server's Close frame.
    close: tuple[int, str] | None = None
    #: The application has returned.
    over: trio.Event = attrs.field(factory=trio.Event)
    #: Seconds that the client takes for each frame; None: it takes nothing.
    slowness: float | None = 0.0
    _inbox: list[Event] = attrs.field(factory=list)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _next: int = 0

    # --- what the client does -----------------------------------------------------------

    def say(self, type: str, **fields: Any) -> None:
        """Send an event."""
        self.text(json.dumps({"type": type, **fields}))

    def text(self, text: str) -> None:
        self._put({"type": "websocket.receive", "text": text, "bytes": None})

    def binary(self, data: bytes) -> None:
        self._put({"type": "websocket.receive", "text": None, "bytes": data})

    def leave(self, code: int = 1006) -> None:
        """1006: without a Close frame."""
        self._put({"type": "websocket.disconnect", "code": code})

    def user(self, text: str, **fields: Any) -> None:
        """Add a message of the user to the conversation."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        self.say("conversation.item.create", item={**item, **fields})

    async def read(self, type: str | None = None) -> Event:
        """The next event; with ``type``, the next of that type, passing others."""
        while True:
            while self._next >= len(self.events):
                assert not self.over.is_set(), f"no {type} came, but {self.types()}"
                await self._news.park()
            self._next += 1
            event = self.events[self._next - 1]
            if type in (None, event["type"]):
                return event

    async def ask(self, **fields: Any) -> Event:
        """Ask for a response; returns the ``response`` of its ``response.done``."""
        self.say("response.create", **fields)
        response: Event = (await self.read("response.done"))["response"]
        return response

    def skip(self) -> None:
        """What has come so far is of no interest."""
        self._next = len(self.events)

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def deltas(self) -> str:
        """All text that came so far."""
        name = "response.output_text.delta"
        return "".join(e["delta"] for e in self.events if e["type"] == name)

    # --- ASGI -----------------------------------------------------------------------------

    async def run(self, query: str, headers: list[tuple[bytes, bytes]], **scope: Any) -> None:
        base: Event = {
            "type": "websocket",
            "http_version": "1.1",
            "scheme": "ws",
            "path": "/v1/realtime",
            "query_string": query.encode(),
            "headers": headers,
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self._inbox.insert(0, {"type": "websocket.connect"})
        try:
            await self.app({**base, **scope}, self._receive, self._take)
        finally:
            self.over.set()
            self._news.unpark_all()

    async def _receive(self) -> Event:
        while not self._inbox:
            await self._lot.park()
        await trio.lowlevel.checkpoint()
        return self._inbox.pop(0)

    async def _take(self, message: Any) -> None:
        assert self.close is None, "a frame behind the Close frame"
        if message["type"] == "websocket.send":
            if self.slowness is None:
                await trio.sleep_forever()
            await trio.sleep(self.slowness or 0)
            self.events.append(json.loads(message["text"]))
        elif message["type"] == "websocket.accept":
            self.status, self.accepted = 101, message
        elif message["type"] == "websocket.close":
            self.close = message["code"], message.get("reason", "")
        elif message["type"] == "websocket.http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.body += message["body"]
        self._news.unpark_all()

    def _put(self, message: Event) -> None:
        self._inbox.append(message)
        self._lot.unpark_all()


@asynccontextmanager
async def talking(app: App, query: str = "model=sim", **scope: Any) -> AsyncIterator[Peer]:
    """A client that leaves at the end of the block, if it is still there."""
    peer = Peer(app)
    headers: list[tuple[bytes, bytes]] = scope.pop("headers", [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(peer.run, query, headers, **scope))
        yield peer
        peer.leave()
