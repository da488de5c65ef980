"""Who is judged for silence: not a worker that has answered, whatever this process did meanwhile.

The clock is real, and the loop is blocked as by a long computation. Workers that answer run in a
thread with a loop of their own, so that they do so while this one is blocked.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.mux.kernel import is_readable
from dynamo_trio.plane.net.dialling import dial
from dynamo_trio.plane.net.tls import HandshakeTimeout, TlsSettings, dialer_context
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from tests.plane.mux_peer import ADDRESS, HEAD, PATH, Endpoint, Sink, open_pair
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from dynamo_trio.plane.mux import MuxPlane

INTERVAL = 0.25
SETTINGS = MuxSettings(host="127.0.0.1", heartbeat=INTERVAL, patience=100.0)


@attrs.define(eq=False)
class Worker:
    """Runs in a thread; does nothing but to take requests on."""

    settings: MuxSettings
    address: str = ""
    endpoint: Endpoint = attrs.field(factory=Endpoint)
    _ready: threading.Event = attrs.field(factory=threading.Event)
    _token: trio.lowlevel.TrioToken | None = None
    _over: trio.Event | None = None

    async def _main(self) -> None:
        self._token, self._over = trio.lowlevel.current_trio_token(), trio.Event()
        async with (
            open_mux_plane(self.settings) as plane,
            plane.serve(PATH, self.endpoint) as self.address,
        ):
            self._ready.set()
            await self._over.wait()

    @contextmanager
    def running(self) -> Iterator[Worker]:
        thread = threading.Thread(target=trio.run, args=(self._main,))
        thread.start()
        try:
            assert self._ready.wait(20)
            yield self
        finally:
            assert self._token is not None
            assert self._over is not None
            self._token.run_sync_soon(self._over.set)
            thread.join(20)


def block(intervals: float) -> None:
    """As a long computation does."""
    time.sleep(intervals * INTERVAL)


async def says_hello_and_dies(stream: trio.SocketStream) -> None:
    worker = WorkerConnection()
    async with stream:
        while not worker.established:
            worker.receive_data(await stream.receive_some())
            while worker.next_event() is not None:
                pass
        await stream.send_all(worker.data_to_send())
        await trio.sleep_forever()


@asynccontextmanager
async def beside_a_dead_one(
    tls: TlsSettings,
) -> AsyncIterator[tuple[Both, Worker, str]]:
    """Clients, a worker that answers, and the address of one that is dead."""
    settings = attrs.evolve(SETTINGS, tls=tls)
    with Worker(settings).running() as worker:
        async with (
            open_mux_plane(settings) as client,
            open_mux_plane(SETTINGS) as plain,
            trio.open_nursery() as nursery,
        ):
            listeners = await nursery.start(trio.serve_tcp, says_hello_and_dies, 0)
            port = listeners[0].socket.getsockname()[1]
            dead = f"127.0.0.1:{port}/{PATH}"
            plain.instance_found(dead)
            client.instance_found(worker.address)
            both = Both(client, plain)
            await both.connected(worker.address, dead)
            yield both, worker, dead
            nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class Both:
    """The client of the worker that answers, and that of the dead one, which speaks plainly."""

    client: MuxPlane
    plain: MuxPlane

    async def connected(self, alive: str, dead: str) -> None:
        with trio.fail_after(20):
            for plane, address in ((self.client, alive), (self.plain, dead)):
                way = plane.client._way(TcpTarget.parse(address).address)
                while way._link is None:  # noqa: ASYNC110 - of another task
                    await trio.sleep(0.001)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_a_blocked_loop_judges_nobody_who_answers_and_still_finds_the_dead(
    tmp_path: Path, *, secure: bool
) -> None:
    """Blocked for longer than two intervals, and for less, at any moment of the heartbeat."""
    rng = random.Random(4)
    tls = mutual_tls(tmp_path) if secure else TlsSettings()
    async with beside_a_dead_one(tls) as (both, worker, dead):
        untouched = Sink()
        async with both.client.open_stream(worker.address, HEAD, b"", untouched):
            for blocked in (2.5, 1.0, 1.9, 0.7):
                block(blocked)
                assert not both.client.avoids(worker.address)
                end = trio.current_time() + rng.uniform(0.0, 1.2) * INTERVAL
                while trio.current_time() < end:
                    await trio.sleep(0.001)
                    assert not both.client.avoids(worker.address)
            with trio.fail_after(20):
                while not both.plain.avoids(dead):
                    assert not both.client.avoids(worker.address)
                    await trio.sleep(0.001)
            assert not both.client.avoids(worker.address)
            assert not untouched.ends


async def test_a_question_that_could_not_leave_is_not_held_against_who_did_not_hear_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is blocked as soon as it was asked, before or behind the writer's turn."""
    asked = trio.lowlevel.ParkingLot()
    ping = ClientConnection.ping

    def ping_and_block(wire: ClientConnection) -> int:
        asked.unpark_all()
        return ping(wire)

    with Worker(SETTINGS).running() as worker:
        async with open_mux_plane(SETTINGS) as client:
            client.instance_found(worker.address)
            async with client.open_stream(worker.address, HEAD, b"", Sink()):
                monkeypatch.setattr(ClientConnection, "ping", ping_and_block)
                for _ in range(5):
                    await asked.park()
                    block(1.6)
                    for _ in range(20):
                        assert not client.avoids(worker.address)
                        await trio.lowlevel.checkpoint()
                    await trio.sleep(0.05 * INTERVAL)
                    assert not client.avoids(worker.address)


async def test_a_dead_one_is_not_judged_right_behind_a_freeze() -> None:
    async with beside_a_dead_one(TlsSettings()) as (both, _, dead):
        block(2.5)
        woke = trio.current_time()
        with trio.fail_after(20):
            while not both.plain.avoids(dead):  # noqa: ASYNC110 - of another task
                await trio.sleep(0.001)
        # It counts anew: one interval until it is asked, and one to answer.
        assert trio.current_time() - woke > 1.9 * INTERVAL


async def test_who_hands_on_a_long_backlog_judges_nobody(mock_clock: MockClock) -> None:
    """What has come later lies unread meanwhile."""
    settings = MuxSettings(high_water=2**24)
    count, seen = 8000, []

    @attrs.define(eq=False)
    class Slow(Sink):
        def feed(self, payloads: Sequence[bytes]) -> None:
            super().feed(payloads)
            mock_clock.jump(0.0005)
            seen.append(pair.client.avoids(ADDRESS))

    slow, untouched = Slow(), Sink()
    async with open_pair(settings) as pair, pair.ask(slow) as stream, pair.ask(untouched):
        stream.grant(2 * count)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        for _ in range(count):
            pair.endpoint.calls[0].outbox.put(b"x")
        while len(slow.items) < count:
            await trio.lowlevel.checkpoint()
        assert trio.current_time() - began > 3
        await wait_all_tasks_blocked()
        assert not any(seen)
        assert not untouched.ends
        assert not pair.client.avoids(ADDRESS)


async def test_what_lies_in_the_kernel_is_seen() -> None:
    one, other = trio.socket.socketpair()
    assert not is_readable(one)
    await other.send(b"x")
    assert is_readable(one)
    await one.recv(10)
    assert not is_readable(one)
    other.close()
    assert is_readable(one)
    one.close()
    assert not is_readable(one)


async def test_a_listener_that_only_its_kernel_speaks_for(tmp_path: Path) -> None:
    """So looks a frozen process with TLS; who refuses, or talks nonsense, is no such."""
    tls = attrs.evolve(mutual_tls(tmp_path), handshake_time=0.2)
    settings = attrs.evolve(SETTINGS, tls=tls)
    context = dialer_context(tls)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        place = HostPort("127.0.0.1", frozen.getsockname()[1])
        with pytest.raises(HandshakeTimeout):
            await dial(place, context, settings)
    with pytest.raises(OSError, match="refused") as raised:
        await dial(place, context, settings)
    assert not isinstance(raised.value, HandshakeTimeout)
