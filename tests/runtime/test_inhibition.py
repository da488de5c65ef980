"""An instance that could not be reached is left out of the choice for a while."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.client import Client, Inhibitions, open_client
from dynamo_trio.discovery import EndpointId, Instance, MemoryDiscovery
from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    Draining,
    DynamoException,
    InvalidArgument,
    Overloaded,
)
from dynamo_trio.plane import ClientStream, RequestPlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.plane import Acceptor, ItemSink, RequestHead

ENDPOINT = EndpointId.parse("a.b.c")
#: An item, in MessagePack.
ONE = b"\x01"


class _Stream(ClientStream):
    def grant(self, items: int) -> None:
        pass

    def stop(self) -> None:
        pass


@attrs.define(eq=False)
class ScriptedPlane(RequestPlane):
    """Each address fails as it is told to, at the beginning or later; others answer with 1."""

    name = "scripted"
    refusals: dict[str, DynamoException] = attrs.field(factory=dict)
    endings: dict[str, tuple[int, DynamoException]] = attrs.field(factory=dict)

    def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AbstractAsyncContextManager[str]:
        raise NotImplementedError

    @asynccontextmanager
    async def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        await trio.lowlevel.checkpoint()
        if address in self.refusals:
            raise self.refusals[address]
        items, error = self.endings.get(address, (1, None))
        for _ in range(items):
            sink.feed([ONE])
        sink.finish(error)
        yield _Stream()


@attrs.define(eq=False)
class Fleet:
    discovery: MemoryDiscovery
    plane: ScriptedPlane
    client: Client

    async def register(self, number: int, address: str = "") -> None:
        address = address or str(number)
        await self.discovery.register(Instance(ENDPOINT, number, {"scripted": address}))
        await wait_all_tasks_blocked()

    async def ask(self) -> None:
        async with self.client.generate(None) as stream:
            async for _ in stream:
                pass

    async def failures(self, requests: int) -> int:
        """How many of so many requests fail."""
        count = 0
        for _ in range(requests):
            try:
                await self.ask()
            except DynamoException:
                count += 1
        return count


@asynccontextmanager
async def open_fleet(size: int, **settings: float) -> AsyncIterator[Fleet]:
    discovery, plane = MemoryDiscovery(), ScriptedPlane()
    async with open_client(ENDPOINT, discovery, {"scripted": plane}, **settings) as client:
        fleet = Fleet(discovery, plane, client)
        for number in range(1, size + 1):
            await fleet.register(number)
        yield fleet


@pytest.mark.parametrize("error", [CannotConnect("nobody"), ConnectionTimeout("too late")])
async def test_an_instance_that_is_not_reached_fails_one_request_in_five_seconds(
    autojump_clock: MockClock, error: DynamoException, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fleet(2) as fleet:
        fleet.plane.refusals["1"] = error
        assert await fleet.failures(20) == 1
        assert caplog.messages == [
            f"instance 1 of dyn://a.b.c is left out for 5 s: {error.message}"
        ]
        await trio.sleep(5.1)
        assert await fleet.failures(20) == 1


async def test_a_stream_that_breaks_counts_only_before_its_first_item(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(2) as fleet:
        fleet.plane.endings["1"] = (0, Disconnected("gone"))
        assert await fleet.failures(20) == 1
        await trio.sleep(5.1)
        fleet.plane.endings["1"] = (1, Disconnected("gone"))
        assert await fleet.failures(20) == 10


@pytest.mark.parametrize("error", [Draining(""), Overloaded(""), InvalidArgument("")])
async def test_an_instance_that_answers_is_not_left_out(
    autojump_clock: MockClock, error: DynamoException
) -> None:
    async with open_fleet(2) as fleet:
        fleet.plane.refusals["1"] = error
        assert await fleet.failures(20) == 10


async def test_if_all_are_left_out_they_are_tried(autojump_clock: MockClock) -> None:
    async with open_fleet(2) as fleet:
        fleet.plane.refusals |= {"1": CannotConnect(), "2": CannotConnect()}
        assert await fleet.failures(4) == 4
        fleet.plane.refusals.clear()
        assert await fleet.failures(4) == 0


async def test_the_choice_at_random_leaves_it_out_and_the_direct_one_does_not(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(2) as fleet:
        fleet.client.inhibitions.note(fleet.client.find(1), CannotConnect())
        assert {fleet.client.pick_random().instance_id for _ in range(50)} == {2}
        async with fleet.client.direct(None, 1) as stream:
            assert [item async for item in stream] == [1]


@pytest.mark.parametrize("address", ["1", "elsewhere"], ids=["registered anew", "changed"])
async def test_a_new_record_counts_at_once(autojump_clock: MockClock, address: str) -> None:
    async with open_fleet(2) as fleet:
        one = fleet.client.find(1)
        fleet.client.inhibitions.note(one, CannotConnect())
        await fleet.register(1)  # the same again says nothing new
        assert {fleet.client.pick().instance_id for _ in range(4)} == {2}
        if address == "1":
            await fleet.discovery.unregister(one)
        await fleet.register(1, address)
        assert {fleet.client.pick().instance_id for _ in range(4)} == {1, 2}


async def test_zero_leaves_nobody_out(autojump_clock: MockClock) -> None:
    async with open_fleet(2, inhibited=0.0) as fleet:
        fleet.plane.refusals["1"] = CannotConnect()
        assert await fleet.failures(20) == 10


async def test_what_its_caller_raises_says_nothing_of_the_instance(
    autojump_clock: MockClock,
) -> None:
    async with open_fleet(2) as fleet:
        with suppress(CannotConnect):
            async with fleet.client.direct(None, 1):
                raise CannotConnect("another one, which the handler asked")
        assert fleet.client.inhibitions.filter(fleet.client.instances()) == (
            fleet.client.instances()
        )


async def test_it_is_told_once_while_it_lasts(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    inhibitions, one = Inhibitions(), Instance(ENDPOINT, 255, {})
    for _ in range(4):
        inhibitions.note(one, CannotConnect("no"))
        await trio.sleep(4)
    assert caplog.messages == ["instance ff of dyn://a.b.c is left out for 5 s: no"]
