"""Many requests over one pair of planes, ended in every way: none gets what is another's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.errors import CannotConnect, DynamoException, EngineShutdown, Overloaded
from dynamo_trio.plane.abc import AcceptedCall, RequestHead
from dynamo_trio.plane.tcp import TcpPlane, TcpSettings, TlsSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from tests.plane.fake_worker import Collector, until
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dynamo_trio.plane.abc import Outbox

CLIENTS, REQUESTS, ITEMS = 30, 6, 40


@attrs.define(eq=False)
class Job(AcceptedCall):
    """One call on the worker's side: it counts, until it is told to end."""

    head: RequestHead
    outbox: Outbox
    way: str
    ended: bool = False

    def cancel(self) -> None:
        self.ended = True
        self.outbox.wake()

    def stop(self) -> None:
        self.ended = True
        self.outbox.wake()

    async def run(self, pause: Callable[[], float]) -> None:
        if self.way == "invalid":
            self.outbox.finish(CannotConnect("invalid"))
            return
        self.outbox.begin()
        for number in range(ITEMS):
            while not self.outbox.has_credit and not self.ended:
                await self.outbox.wait_credit()
            if self.ended:
                break
            self.outbox.put(self.head.codec.encode([self.head.request_id, number]))
            await trio.sleep(pause())
        self.outbox.finish(EngineShutdown("bye") if self.way == "error" else None)


@attrs.define(eq=False)
class Endpoint:
    nursery: trio.Nursery
    dice: random.Random
    jobs: list[Job] = attrs.field(factory=list)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Job:
        way = head.codec.decoder(str, "way")(payload)
        if way == "refused":
            raise Overloaded("full")
        job = Job(head, outbox, way)
        self.jobs.append(job)
        self.nursery.start_soon(job.run, self.pause)
        return job

    def pause(self) -> float:
        return self.dice.choice([0, 0, 0, 0.001])


WAYS = ["whole", "error", "invalid", "refused", "left", "stopped", "given up early"]


async def one_request(
    plane: TcpPlane, address: str, way: str, name: str, dice: random.Random
) -> None:
    codec = dice.choice([MSGPACK, JSON])
    sink = Collector(codec)
    head = RequestHead(name, codec=codec)
    ended_early = False
    with trio.CancelScope() as scope:
        if way == "given up early":
            scope.deadline = trio.current_time() + dice.random() * 0.01
        try:
            async with plane.open_stream(address, head, codec.encode(way), sink) as stream:
                sink.stream = stream
                if way in ("left", "stopped"):
                    await trio.sleep(dice.random() * 0.02)
                    if way == "stopped":
                        stream.stop()
                if way == "left":
                    ended_early = True
                else:
                    await sink.end()
        except Overloaded:
            assert way == "refused"
    items = len(sink.items)
    await trio.sleep(dice.random() * 0.005)
    assert sink.items == [[name, number] for number in range(items)]
    assert len(sink.items) == items
    check_end(way, sink, ended_early=ended_early or scope.cancelled_caught)


def check_end(way: str, sink: Collector, *, ended_early: bool) -> None:
    kinds: list[type[DynamoException | None]] = [type(end) for end in sink.ends]
    if way == "whole":
        assert (kinds, len(sink.items)) == ([type(None)], ITEMS)
    elif way == "error":
        assert (kinds, len(sink.items)) == ([EngineShutdown], ITEMS)
    elif way == "invalid":
        assert kinds == [CannotConnect]
    elif way == "refused":
        assert kinds == []
    elif way == "stopped":
        assert kinds == [type(None)]
    else:
        assert len(kinds) <= 1
        assert ended_early or kinds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_no_request_gets_what_is_anothers(seed: int, tls: bool, tmp_path: Path) -> None:
    dice = random.Random(seed)
    settings = TcpSettings(
        rpc_host="127.0.0.1",
        response_host="127.0.0.1",
        tls=mutual_tls(tmp_path) if tls else TlsSettings(),
        channel_buffer=8,
        ack_time=60.0,  # by a real clock, on a machine that may freeze
    )
    async with (
        open_tcp_plane(settings) as worker,
        open_tcp_plane(settings) as plane,
        trio.open_nursery() as jobs,
    ):
        endpoint = Endpoint(jobs, dice)

        async def client(number: int) -> None:
            for turn in range(REQUESTS):
                way = dice.choice(WAYS)
                await one_request(plane, address, way, f"{number}.{turn}", dice)

        async with worker.serve("1f/generate", endpoint) as address:
            async with trio.open_nursery() as clients:
                for number in range(CLIENTS):
                    clients.start_soon(client, number)
            await until(lambda: not jobs.child_tasks)
        assert len(plane.client.streams) == 0
        # What is left are the listener, and one task for each request connection.
        (connections,) = plane.client._pool._connections.values()
        assert all(connection.outstanding == 0 for connection in connections)
        await until(lambda: len(plane.client.nursery.child_tasks) == 1 + len(connections))
