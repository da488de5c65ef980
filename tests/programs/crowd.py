"""Many clients at once, in one Trio loop: each keeps what it saw to its end."""

from __future__ import annotations

import json
import socket
from typing import Any

import attrs
import h11
import trio

CHAT = "/v1/chat/completions"


@attrs.define(eq=False)
class Reader:
    """One streamed request on a connection of its own."""

    port: int
    body: bytes
    said: bytearray = attrs.field(factory=bytearray)
    begun: trio.Event = attrs.field(factory=trio.Event)
    #: The connection broke, rather than being closed.
    was_reset: bool = False

    async def run(self) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(post(self.body) + self.body)
            try:
                async for part in stream:
                    self.said += part
                    if b"data: " in part:
                        self.begun.set()
            except trio.BrokenResourceError:
                self.was_reset = True
        self.begun.set()

    async def wait_begun(self) -> None:
        """Wait for its first words."""
        await self.begun.wait()
        assert b"data: " in self.said, bytes(self.said)

    def events(self) -> list[Any]:
        """The data of each event of a whole answer; ``[DONE]`` as it is.

        Raises:
            h11.RemoteProtocolError: the answer does not have its proper end.
        """
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="POST", target=CHAT, headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(bytes(self.said))
        client.receive_data(b"")
        body = b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            body += getattr(event, "data", b"")
        data = [part[len("data: ") :] for part in body.decode().split("\n\n") if part]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    def ending(self) -> str:
        """``done``, or the reason with which a stream was cut."""
        assert not self.was_reset
        *said, last = self.events()
        if last == "[DONE]":
            return "done"
        assert "[DONE]" not in said
        return str(last["error"]["code"])


def post(body: bytes) -> bytes:
    """The head of a request whose connection is to be closed behind the answer."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode()


def connect_without_reading(port: int, data: bytes) -> socket.socket:
    """A client with hardly any room, which takes nothing of what it is answered."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", port))
    sock.sendall(data)
    return sock


@attrs.define(eq=False)
class Prober:
    """Asks one path every 50 ms, on one connection, until it is closed at the end."""

    port: int
    path: str
    statuses: list[int] = attrs.field(factory=list)
    bodies: list[bytes] = attrs.field(factory=list)
    #: It was closed in the middle of an answer.
    was_torn: bool = False

    async def run(self) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            client = h11.Connection(h11.CLIENT)
            while await self._ask(stream, client):
                await trio.sleep(0.05)
                client.start_next_cycle()

    async def _ask(self, stream: trio.SocketStream, client: h11.Connection) -> bool:
        request = h11.Request(method="GET", target=self.path, headers=[("host", "x")])
        data = (client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b"")
        body, head = b"", None
        try:
            await stream.send_all(data)
            while not isinstance(event := client.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    client.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    break
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            event = None
        if not isinstance(event, h11.EndOfMessage) or head is None:
            self.was_torn = head is not None
            return False
        self.statuses.append(head.status_code)
        self.bodies.append(body)
        return True
