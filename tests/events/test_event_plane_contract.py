"""What every event plane promises: the one over ZeroMQ, and the one in memory."""

from __future__ import annotations

import pytest
import trio

from dynamo_trio.events import EventPlane, Inlet, MemoryEvents, Outlet
from dynamo_trio.events.sockets import SocketSettings, ZmqEvents

MANY = 8


def make_plane(kind: str, room: int) -> EventPlane:
    if kind == "memory":
        return MemoryEvents(room)
    settings = SocketSettings(send_queue=room, receive_queue=room, reconnect=(0.02, 0.1))
    return ZmqEvents("127.0.0.1", "127.0.0.1", settings)


@pytest.fixture(params=["memory", "zmq"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plane(kind: str) -> EventPlane:
    return make_plane(kind, 1000)


async def join(outlet: Outlet, *inlets: Inlet) -> None:
    """Wait until what is published arrives, and take what has arrived."""
    deaf = [*inlets]
    with trio.fail_after(10):
        while deaf:
            outlet.send([b"topic", b"hello"])
            deaf = [inlet for inlet in inlets if not await drain(inlet) and inlet in deaf]
    for inlet in inlets:
        await drain(inlet, 0.2)


async def drain(inlet: Inlet, seconds: float = 0.05) -> int:
    """How many messages come within this time."""
    count = 0
    with trio.move_on_after(seconds):
        while True:
            await inlet.receive()
            count += 1
    return count


async def test_each_message_reaches_every_subscriber_in_order(plane: EventPlane) -> None:
    with (
        plane.open_outlet() as outlet,
        plane.open_inlet(outlet.address, "topic") as one,
        plane.open_inlet(outlet.address, "topic") as two,
    ):
        await join(outlet, one, two)
        for number in range(100):
            outlet.send([b"topic", b"%d" % number])
            with trio.fail_after(10):
                for inlet in (one, two):
                    assert await inlet.receive() == [b"topic", b"%d" % number]


async def test_topics_are_told_apart_by_how_they_begin(plane: EventPlane) -> None:
    with plane.open_outlet() as outlet, plane.open_inlet(outlet.address, "topic") as inlet:
        await join(outlet, inlet)
        for topic in (b"other", b"top", b"topical", b"topic"):
            outlet.send([topic])
        with trio.fail_after(10):
            assert [await inlet.receive() for _ in range(2)] == [[b"topical"], [b"topic"]]


async def test_who_reads_nothing_holds_nobody_up_and_misses_the_newest(kind: str) -> None:
    plane = make_plane(kind, 8)
    with plane.open_outlet() as outlet, plane.open_inlet(outlet.address, "topic") as inlet:
        await join(outlet, inlet)
        block = bytes(1_000_000)
        for number in range(200):
            outlet.send([b"topic", b"%d" % number, block])
        got: list[int] = []
        with trio.move_on_after(1):
            while True:
                got.append(int((await inlet.receive())[1]))
    assert got == sorted(got)
    assert got[0] == 0
    assert len(got) < 200


async def test_a_reader_that_is_cancelled_loses_nothing(plane: EventPlane) -> None:
    with plane.open_outlet() as outlet, plane.open_inlet(outlet.address, "topic") as inlet:
        await join(outlet, inlet)
        for number in range(MANY):
            outlet.send([b"topic", b"%d" % number])
        got: list[int] = []
        with trio.fail_after(10):
            while len(got) < MANY:
                with trio.CancelScope() as scope:
                    if len(got) % 2:
                        scope.cancel()
                        await trio.lowlevel.checkpoint_if_cancelled()
                    got.append(int((await inlet.receive())[1]))
                if scope.cancelled_caught:
                    got.append(int((await inlet.receive())[1]))
    assert got == [*range(MANY)]


def test_two_outlets_have_two_places(plane: EventPlane) -> None:
    with plane.open_outlet() as one, plane.open_outlet() as two:
        assert one.address != two.address


@pytest.mark.parametrize("address", ["", "nowhere", "ipc:///tmp/x"])
def test_what_is_no_address_is_refused(plane: EventPlane, address: str) -> None:
    with pytest.raises(ValueError, match="no address of events"):
        with plane.open_inlet(address, "topic"):
            pass
