"""ZeroMQ sockets on Trio: nothing blocks, nothing is forgotten, every queue has an end."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from dynamo_trio.errors import PortInUse
from dynamo_trio.events.sockets import SocketSettings, ZmqOutlet, open_inlet, open_outlet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.events import Inlet, Outlet

SETTINGS = SocketSettings(reconnect=(0.02, 0.1))


@pytest.fixture
def outlet() -> Iterator[Outlet]:
    with open_outlet("127.0.0.1", "127.0.0.1", SETTINGS) as outlet:
        yield outlet


async def join(outlet: Outlet, inlet: Inlet) -> None:
    """Wait until what is published arrives."""
    with trio.fail_after(10):
        while True:
            outlet.send([b"t", b"hello"])
            with trio.move_on_after(0.05):
                await inlet.receive()
                break
        await empty(inlet)


async def empty(inlet: Inlet) -> None:
    with trio.move_on_after(0.2):
        while True:
            await inlet.receive()


async def test_messages_arrive_whole_and_in_order(outlet: Outlet) -> None:
    with open_inlet(outlet.address, "t", SETTINGS) as inlet:
        await join(outlet, inlet)
        for number in range(200):
            outlet.send([b"t", b"%d" % number, b"x" * number])
        with trio.fail_after(10):
            got = [await inlet.receive() for _ in range(200)]
    assert got == [[b"t", b"%d" % number, b"x" * number] for number in range(200)]


async def test_no_message_waits_for_the_next_one(outlet: Outlet) -> None:
    # The descriptor shows an edge: whoever waits for it in the wrong order sleeps on a message.
    with open_inlet(outlet.address, "t", SETTINGS) as inlet:
        await join(outlet, inlet)
        with trio.fail_after(30):
            for number in range(300):
                outlet.send([b"t", b"%d" % number])
                if number % 3 == 0:
                    await trio.lowlevel.checkpoint()
                assert (await inlet.receive())[1] == b"%d" % number


async def test_other_topics_do_not_arrive(outlet: Outlet) -> None:
    with open_inlet(outlet.address, "t", SETTINGS) as inlet:
        await join(outlet, inlet)
        outlet.send([b"u", b"other"])
        outlet.send([b"t", b"ours"])
        with trio.fail_after(10):
            assert await inlet.receive() == [b"t", b"ours"]


async def test_a_subscriber_may_come_first_and_the_publisher_come_back() -> None:
    with open_outlet("127.0.0.1", "127.0.0.1", SETTINGS) as first:
        address = first.address
    with open_inlet(address, "t", SETTINGS) as inlet:
        for _ in range(2):
            with bound_to(address) as outlet:
                await join(outlet, inlet)


def bound_to(address: str) -> Bound:
    return Bound(address)


class Bound:
    """An outlet on a port that is known already."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # libzmq gives a port up a moment after the close
            with suppress(zmq.ZMQError):
                self.socket.bind(address)
                break

    def __enter__(self) -> ZmqOutlet:
        return ZmqOutlet("", self.socket)

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)


async def test_a_full_queue_holds_nobody_up() -> None:
    """One subscriber reads, one does not: the reader gets on, and memory stays small."""
    small = SocketSettings(send_queue=10, receive_queue=4)
    with (
        open_outlet("127.0.0.1", "127.0.0.1", small) as outlet,
        open_inlet(outlet.address, "t", small) as dead,
        open_inlet(outlet.address, "t", small) as alive,
    ):
        await join(outlet, dead)
        await join(outlet, alive)
        before = resident()
        block = os.urandom(1_000_000)
        got = 0
        for number in range(300):
            outlet.send([b"t", b"%d" % number, block])
            with trio.move_on_after(0.5):
                await alive.receive()
                got += 1
    assert got > 250
    # 300 MB were sent; two queues and the kernel's buffers hold a few tens of them.
    assert resident() - before < 100_000_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_publisher_whose_frame_is_too_long_is_cut() -> None:
    small = SocketSettings(max_frame=1000, reconnect=(0.02, 0.1))
    with (
        open_outlet("127.0.0.1", "127.0.0.1", small) as outlet,
        open_inlet(outlet.address, "t", small) as cut,
        open_inlet(outlet.address, "t", SETTINGS) as patient,
    ):
        await join(outlet, cut)
        await join(outlet, patient)
        await empty(cut)
        outlet.send([b"t", b"x" * 1001])
        outlet.send([b"t", b"more"])
        with trio.fail_after(10):
            assert len((await patient.receive())[1]) == 1001
            assert (await patient.receive())[1] == b"more"
        with trio.move_on_after(0.3) as waited:
            await cut.receive()
        assert waited.cancelled_caught


async def test_closing_takes_no_time() -> None:
    began = time.monotonic()
    with open_outlet("127.0.0.1", "127.0.0.1", SETTINGS) as outlet:
        with open_inlet(outlet.address, "t", SETTINGS) as inlet:
            await join(outlet, inlet)
        joined = time.monotonic()
        for _ in range(500):
            outlet.send([b"t", b"x" * 10_000])
    assert time.monotonic() - joined < 15
    assert time.monotonic() - began < 20


async def test_a_cancelled_reader_loses_nothing(outlet: Outlet) -> None:
    with open_inlet(outlet.address, "t", SETTINGS) as inlet:
        await join(outlet, inlet)
        for number in range(50):
            outlet.send([b"t", b"%d" % number])
        got: list[int] = []
        with trio.fail_after(10):
            while len(got) < 50:
                with trio.CancelScope() as scope:
                    if len(got) % 2:
                        scope.cancel()
                    got.append(int((await inlet.receive())[1]))
    assert got == [*range(50)]


@pytest.mark.parametrize("address", ["", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://1.2.3.4"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="no address of events"):
        with open_inlet(address, "t", SETTINGS):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1"):
        with open_outlet("192.0.2.1", "192.0.2.1", SETTINGS):
            pass


async def test_ipv6() -> None:
    with open_outlet("::1", "::1", SETTINGS) as outlet:
        assert outlet.address.startswith("tcp://[::1]:")
        with open_inlet(outlet.address, "t", SETTINGS) as inlet:
            await join(outlet, inlet)
