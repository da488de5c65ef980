"""A plane that does as it is told, and notes what it is told, for tests of the choice of one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.plane import Acknowledgements, ClientStream, Connections, RequestPlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane import Acceptor, ItemSink, RequestHead

#: An item, in MessagePack.
ONE = b"\x01"


class FakeStream(ClientStream):
    def grant(self, items: int) -> None:
        pass

    def stop(self) -> None:
        pass


@attrs.define(eq=False)
class FakePlane(RequestPlane):
    """Each address fails as it is told to, at the beginning or later; others answer with 1."""

    name: str  # type: ignore[misc]  # each of them is a kind of its own
    #: How opening a stream there fails, and when it does.
    refusals: dict[str, DynamoException] = attrs.field(factory=dict)
    #: How a stream there ends that brings nothing.
    endings: dict[str, DynamoException] = attrs.field(factory=dict)
    avoided: set[str] = attrs.field(factory=set)
    #: What it was told, in order: a verb and an address.
    told: list[tuple[str, str]] = attrs.field(factory=list)
    #: The addresses that were asked, whatever came of it.
    asked: list[str] = attrs.field(factory=list)
    #: Peers have not acknowledged while it is not set.
    acknowledged: trio.Event = attrs.field(factory=trio.Event)
    has_silent_peers: bool = False
    places: int = 0
    acknowledgements: Acknowledgements = attrs.field(factory=Acknowledgements)
    connections: Connections = attrs.field(factory=Connections)

    @asynccontextmanager
    async def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AsyncIterator[str]:
        yield f"{self.name}/{path}"

    @asynccontextmanager
    async def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        await trio.lowlevel.checkpoint()
        self.asked.append(address)
        if address in self.refusals:
            raise self.refusals[address]
        if address in self.endings:
            sink.finish(self.endings[address])
        else:
            sink.feed([ONE])
            sink.finish(None)
        yield FakeStream()

    def instance_found(self, address: str) -> None:
        self.told.append(("found", address))

    def instance_gone(self, address: str) -> None:
        self.told.append(("gone", address))

    def avoids(self, address: str) -> bool:
        return address in self.avoided

    def withdraw(self, *addresses: str) -> None:
        self.told.append(("withdraw", " ".join(addresses)))

    def restore(self, address: str) -> None:
        self.told.append(("restore", address))

    async def wait_acknowledged(self) -> None:
        await self.acknowledged.wait()
