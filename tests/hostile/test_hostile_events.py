"""Strangers at both ends of the event plane: garbage, floods, and silence."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.discovery import EventChannel, EventSource, MemoryDiscovery
from dynamo_trio.events.sockets import SocketSettings, ZmqEvents, open_inlet, open_outlet
from dynamo_trio.kv import FollowSettings, KvFleet, Stored, follow_fleet, open_kv_publisher
from dynamo_trio.kv.fleet import CacheId
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.runtime import open_runtime
from dynamo_trio.wire.dynamo.kv_events import Block

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SETTINGS = SocketSettings(reconnect=(0.02, 0.1), handshake_time=1.0)
FAST = FollowSettings(first_audit=0.2, audit=0.5, pause=0.02, longest_pause=0.1, answer_time=1)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- at a publisher's port ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536), GREETING[:20], GREETING + b"\x06" * 4096],
    ids=["nothing", "http", "noise", "half a greeting", "a long command"],
)
async def test_strangers_at_a_publishers_port_change_nothing(words: bytes) -> None:
    with (
        open_outlet("127.0.0.1", "127.0.0.1", SETTINGS) as outlet,
        open_inlet(outlet.address, "t", SETTINGS) as inlet,
        ExitStack() as strangers,
    ):
        place = ("127.0.0.1", int(outlet.address.rpartition(":")[2]))
        for _ in range(100):
            stranger = strangers.enter_context(socket.create_connection(place, 5))
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.send(words)
        with trio.fail_after(20):
            heard = False
            while not heard:
                outlet.send([b"t", b"hello"])
                with trio.move_on_after(0.05):
                    heard = await inlet.receive() == [b"t", b"hello"]


OUTLETS = """
import random, socket
from dynamo_trio.events.sockets import SocketSettings, open_outlet
noise = random.Random(7).randbytes
for _ in range(200):
    strangers = []
    with open_outlet("127.0.0.1", "127.0.0.1", SocketSettings()) as outlet:
        place = ("127.0.0.1", int(outlet.address.rpartition(":")[2]))
        for number in range(30):
            stranger = socket.create_connection(place, 5)
            stranger.setblocking(False)
            stranger.send(noise(4096) if number % 2 else b"GET / HTTP/1.1\\r\\n\\r\\n")
            strangers.append(stranger)
    for stranger in strangers:
        stranger.close()
"""


def test_strangers_at_a_port_that_is_being_closed_end_no_process() -> None:
    """In a process of its own: what libzmq aborts is all of it."""
    done = subprocess.run([sys.executable, "-c", OUTLETS], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- a publisher that is none -------------------------------------------------------------------


async def serve_noise(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        while True:
            await stream.send_all(os.urandom(65536))


async def serve_half(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.send_all(GREETING[:40])
        await trio.sleep_forever()


async def serve_endless_frame(stream: trio.SocketStream) -> None:
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
    head = GREETING + b"\x04" + bytes([len(ready)]) + ready
    with suppress(trio.BrokenResourceError):
        await stream.send_all(head + b"\x02" + (2**40).to_bytes(8))
        while True:
            await stream.send_all(bytes(65536))


@pytest.mark.parametrize("serve", [serve_noise, serve_half, serve_endless_frame])
async def test_a_publisher_that_is_none_costs_nothing(
    serve: Callable[[trio.SocketStream], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dynamo_trio")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
    plane, discovery = MemoryPlane(), MemoryDiscovery()
    events = ZmqEvents("127.0.0.1", "127.0.0.1", SETTINGS)
    async with (
        trio.open_nursery() as nursery,
        open_runtime(discovery=discovery, planes=[plane], events=events) as listening,
        open_runtime(discovery=discovery, planes=[plane], events=events) as telling,
    ):
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        endpoint = telling.endpoint("a.b.c")
        before = resident()
        async with (
            open_kv_publisher(endpoint) as publisher,
            follow_fleet(listening.endpoint("a.b.c"), FAST) as fleet,
        ):
            await discovery.register(EventChannel(endpoint.id, "kv-events", 7, address))
            await discovery.register(EventChannel(endpoint.id, "kv_metrics", 8, address))
            await discovery.register(EventSource(endpoint.id, "kv-events", 7, worker_id=1))
            await trio.sleep(1)
            publisher.publish([Stored(None, None, (Block(1, 1),))])
            await until(fleet, {CacheId(telling.instance_id): 1})
        assert resident() - before < 50_000_000
        nursery.cancel_scope.cancel()
    assert len([r for r in caplog.records if r.name.startswith("dynamo_trio")]) <= 1


async def until(fleet: KvFleet, overlaps: dict[CacheId, int]) -> None:
    with trio.fail_after(20):
        while fleet.overlaps([1]) != overlaps:
            with trio.move_on_after(0.1):
                await fleet.wait_changed()
