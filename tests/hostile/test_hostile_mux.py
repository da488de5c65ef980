"""Mux peers that break the rules: what they do costs little, and hurts nobody beside them."""

from __future__ import annotations

import logging
import random
import struct
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio.errors import DynamoException, RemoteProtocolError
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.mux import frames
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.frames import HEAD, FrameType, encode
from dynamo_trio.wire.mux.limits import MAGIC, MAX_PIECE
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from tests.hostile.garbage import for_any_port
from tests.plane.mux_peer import HEAD as REQUEST
from tests.plane.mux_peer import PATH, Call, Sink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.plane import Outbox, RequestHead
    from dynamo_trio.plane.mux import MuxPlane

MIB = 2**20
#: What an attack may cost while it lasts, the attacker's own needs and those of others included.
SLACK = 48 * MIB
SETTINGS = MuxSettings(
    host="127.0.0.1", handshake_time=1.0, frame_time=1.0, max_streams=64, max_message=4 * MIB
)
TOKENS = list(range(20))
#: Seconds after which a worker has said what it has to say.
PATIENCE = 2.5
FLOOD_TIME = 0.7
GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
HELLO = ClientConnection().data_to_send()


@attrs.define(eq=False)
class Talkative:
    """Every request is answered: by tokens, or by items of some size without an end."""

    nursery: trio.Nursery
    calls: list[Call] = attrs.field(factory=list)
    most: int = 0

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        call = Call(outbox, head, payload)
        self.calls = [c for c in self.calls if not c.finished]
        self.calls.append(call)
        self.most = max(self.most, len(self.calls))
        self.nursery.start_soon(self._talk if payload == b"question" else self._flood, call)
        return call

    async def _talk(self, call: Call) -> None:
        call.outbox.begin()
        for token in TOKENS:
            call.outbox.put_tokens([token])
            await trio.sleep(0.001)
        call.outbox.finish(None)

    async def _flood(self, call: Call) -> None:
        call.outbox.begin()
        while not call.cancels:
            while not call.outbox.has_credit and not call.cancels:
                await call.outbox.wait_credit()
            call.outbox.put(b"x" * 10_000)
            await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Target:
    """A worker, and somebody who uses it in good order all the time."""

    worker: MuxPlane
    client: MuxPlane
    endpoint: Talkative
    address: str
    whole: int = 0
    wrong: list[str] = attrs.field(factory=list)

    async def use(self) -> None:
        while True:
            sink = Sink()
            try:
                with trio.fail_after(20):
                    async with self.client.open_stream(self.address, REQUEST, b"question", sink):
                        end = await sink.end()
            except Exception as exc:
                self.wrong.append(repr(exc))
                return
            if (end, sink.tokens) != (None, TOKENS):
                self.wrong.append(f"{end!r} behind {sink.tokens}")
            self.whole += 1

    async def wait_whole(self, more: int) -> None:
        """Wait until so many streams more were whole."""
        goal = self.whole + more
        with trio.fail_after(30):
            while self.whole < goal and not self.wrong:  # noqa: ASYNC110 - of another task
                await trio.sleep(0.005)
        assert self.wrong == []

    async def dial(self) -> trio.SocketStream:
        place = TcpTarget.parse(self.address).address
        return await trio.open_tcp_stream(place.host, place.port)


@asynccontextmanager
async def under_attack(
    caplog: pytest.LogCaptureFixture, settings: MuxSettings = SETTINGS
) -> AsyncIterator[Target]:
    """Afterwards only the good client is there, nothing runs, and no mistake was made."""
    async with trio.open_nursery() as nursery:
        endpoint = Talkative(nursery)
        async with (
            open_mux_plane(settings) as worker,
            open_mux_plane(SETTINGS) as client,
            worker.serve(PATH, endpoint) as address,
        ):
            target = Target(worker, client, endpoint, address)
            nursery.start_soon(target.use)
            await target.wait_whole(3)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                yield target
                await target.wait_whole(3)
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most - before < SLACK, f"{(most - before) / MIB:.0f} MiB more"
            with trio.fail_after(30):
                while len(worker.server._links) > 1:  # noqa: ASYNC110 - of somebody else's task
                    await trio.sleep(0.01)
            (good,) = worker.server._links
            assert len(good._answers) <= 1
            nursery.cancel_scope.cancel()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def say(target: Target, *pieces: bytes, every: float = 0.0) -> bytes:
    """Say it on a connection of its own, and hear the worker out. Returns what came."""
    heard = bytearray()
    stream = await target.dial()
    async with stream, trio.open_nursery() as nursery:

        async def hear() -> None:
            with suppress(*GONE):
                while data := await stream.receive_some(65536):
                    heard.extend(data[:1000])
            nursery.cancel_scope.cancel()

        nursery.start_soon(hear)
        with suppress(*GONE):
            for piece in pieces:
                await stream.send_all(piece)
                if every:
                    await trio.sleep(every)
            # Some of what is said is in good order, and the worker then keeps the connection.
            await trio.sleep(PATIENCE)
        nursery.cancel_scope.cancel()
    return bytes(heard)


def frame(kind: int, body: bytes) -> bytes:
    return HEAD.pack(1 + len(body), kind) + body


def an_open(sid: int, payload: bytes = b"x", **other: object) -> bytes:
    fields: dict[str, Any] = {
        "path": PATH,
        "request_id": "r",
        "codec": MSGPACK.name,
        "streams_in": False,
        "credit": 64,
        "sent_at_ns": None,
        "metadata": {},
    }
    return encode(frames.Open(sid=sid, payload=payload, **(fields | other)))


# --- what is no mux --------------------------------------------------------------------------


async def test_garbage(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(4)
    said = [*for_any_port(rng), *(HELLO + data for data in for_any_port(rng))]
    said += [HELLO + frame(rng.randrange(256), rng.randbytes(rng.randrange(60))) for _ in range(50)]
    async with under_attack(caplog) as target, trio.open_nursery() as nursery:
        for data in said:
            nursery.start_soon(say, target, data)
        await target.wait_whole(3)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert 1 <= len(lines) <= 4  # not one for each: one in ten seconds
    assert max(map(len, lines)) < 2000


async def test_half_frames_and_silence(caplog: pytest.LogCaptureFixture) -> None:
    began = trio.current_time()
    request = an_open(1)
    wholes = [HELLO, HELLO + request, HELLO + frame(FrameType.PART, b"\x92\x01\xc4\x01a")]
    async with under_attack(caplog) as target, trio.open_nursery() as nursery:
        for whole in wholes:
            for size in {0, 1, len(MAGIC), len(whole) // 2, len(whole) - 1}:
                nursery.start_soon(say, target, whole[:size])
        await target.wait_whole(3)
    assert trio.current_time() - began < 15


async def test_slow_bytes(caplog: pytest.LogCaptureFixture) -> None:
    async with under_attack(caplog) as target:
        data = HELLO + an_open(1, b"x" * 30_000)
        with trio.fail_after(10):
            heard = await say(target, HELLO, *(bytes([b]) for b in data[len(HELLO) :]), every=0.01)
    assert b"took over 1 s to arrive" in heard


# --- broken rules, each told ------------------------------------------------------------------

WRONG: dict[str, bytes] = {
    "a giant frame": struct.pack(">IB", 2**32 - 1, 2),
    "a frame above the limit": struct.pack(">IB", 2**17, 2) + b"x" * 1000,
    "a frame without a type": struct.pack(">IB", 0, 2),
    "an unknown frame": frame(99, b"\x90"),
    "a frame of a worker": frame(FrameType.OPENED, b"\x92\x01\x01"),
    "hello twice": HELLO[len(MAGIC) :],
    "an item for nobody": encode(frames.Item(7, b"x")),
    "credit for nobody": encode(frames.Credit([7, 1])),
    "credit without a number": encode(frames.Credit([7])),
    "credit above all bounds": an_open(1) + encode(frames.Credit([1, 2**31 - 1])),
    "an item in a request that is whole": an_open(1) + encode(frames.Item(1, b"x")),
    "an item without credit": an_open(1, streams_in=True) + encode(frames.Item(1, b"x")) * 100,
    "a stream twice": an_open(1) + an_open(1),
    "streams that fall": an_open(9) + an_open(8),
    "a pong without a ping": encode(frames.Pong(3)),
    "an acknowledgement without a notice": encode(frames.Ack(3, 1)),
    "deep nesting": frame(FrameType.OPEN, b"\x91" * 60_000),
    "a giant array": frame(FrameType.CREDIT, b"\x91\xdd\xff\xff\xff\xff"),
    "a giant piece": frame(FrameType.PART, b"\x92\x01\xc6\xff\xff\xff\xff"),
    "a message above the limit": encode(frames.Part(1, b"x" * MAX_PIECE)) * 200,
    "two messages in one": an_open(1, streams_in=True)
    + encode(frames.Part(1, b"x"))
    + encode(frames.Part(2, b"x")),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_broken_rule_is_told_and_cut(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async with under_attack(caplog) as target:
        heard = await say(target, HELLO + WRONG[what])
    peer = ClientConnection()
    peer.data_to_send()
    peer.receive_data(heard)
    events = []
    with suppress(RemoteProtocolError):  # answers to streams that it never opened
        while (event := peer.next_event()) is not None:
            events.append(event)
    assert b"protocol" in heard
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "127.0.0.1:" in lines[0]


# --- floods ----------------------------------------------------------------------------------


async def flood(
    target: Target, data: Callable[[int], bytes], *, rounds: int = 2000, hears: bool = False
) -> int:
    """Send as long as the worker takes it, for some seconds at most; returns how much it took."""
    sent = 0
    stream = await target.dial()
    async with stream, trio.open_nursery() as nursery:

        async def hear() -> None:
            with suppress(*GONE):
                while await stream.receive_some(65536):
                    pass

        if hears:
            nursery.start_soon(hear)
        with (
            trio.move_on_after(FLOOD_TIME),
            suppress(*GONE),
        ):
            await stream.send_all(HELLO)
            for number in range(rounds):
                piece = data(number)
                await stream.send_all(piece)
                sent += len(piece)
        nursery.cancel_scope.cancel()
    return sent


def opens(number: int) -> bytes:
    return b"".join(an_open(1 + number * 100 + n) for n in range(100))


def opens_and_cancels(number: int) -> bytes:
    first = 1 + number * 100
    return b"".join(an_open(n) + encode(frames.Cancel(n)) for n in range(first, first + 100))


def opens_for_nobody(number: int) -> bytes:
    return b"".join(an_open(1 + number * 100 + n, path="nobody") for n in range(100))


def never_grants(number: int) -> bytes:
    return b"".join(an_open(1 + number * 10 + n, credit=0) for n in range(10))


def grants_all(number: int) -> bytes:
    """And reads nothing."""
    return b"".join(an_open(1 + number * 10 + n, credit=2**30) for n in range(10))


def pings(number: int) -> bytes:
    return b"".join(encode(frames.Ping(1 + number * 1000 + n)) for n in range(1000))


def late_frames(number: int) -> bytes:
    first = encode(frames.Cancel(1))
    return (an_open(1) + first if number == 0 else b"") + first * 1000


FLOODS = [opens, opens_and_cancels, opens_for_nobody, never_grants, grants_all, pings, late_frames]


@pytest.mark.parametrize("hears", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("data", FLOODS)
async def test_a_flood_costs_bounded_memory_and_hurts_nobody(
    data: Callable[[int], bytes], caplog: pytest.LogCaptureFixture, *, hears: bool
) -> None:
    async with under_attack(caplog) as target:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(flood_and_see, target, data, hears)
            await target.wait_whole(3)
        assert target.endpoint.most <= 2 * SETTINGS.max_streams + 1


async def flood_and_see(target: Target, data: Callable[[int], bytes], hears: bool) -> None:
    rounds = 30 if hears else 2000  # what is read must come to an end by itself
    assert await flood(target, data, rounds=rounds, hears=hears) > 0


async def test_open_and_abandon(caplog: pytest.LogCaptureFixture) -> None:
    """Connections that open streams and break off."""
    async with under_attack(caplog) as target:
        for _ in range(100):
            stream = await target.dial()
            await stream.send_all(HELLO + opens(0)[: random.randrange(100, 5000)])
            stream.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: close with a reset
            stream.socket.close()
        await target.wait_whole(3)


async def test_large_messages_that_never_become_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Each is within its limit; all together they are too much."""
    part = encode(frames.Part(1, b"x" * MAX_PIECE))
    message = part * (SETTINGS.max_message // MAX_PIECE)
    settings = attrs.evolve(SETTINGS, max_arriving=16 * MIB, frame_time=60.0)
    async with under_attack(caplog, settings) as target, trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(say, target, HELLO, message)
    assert "before there were too many" in caplog.text


async def test_a_client_that_takes_nothing_holds_back_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = attrs.evolve(SETTINGS, stall_time=2.0)
    async with under_attack(caplog, settings) as target:
        stream = await target.dial()
        await stream.send_all(HELLO + grants_all(0))
        with trio.fail_after(30):
            while "is closed: " not in caplog.text:  # noqa: ASYNC110 - of somebody else's task
                await trio.sleep(0.05)
        stream.socket.close()


# --- a worker that breaks the rules -----------------------------------------------------------

ITEM = encode(frames.Item(1, b"x"))
ACCEPTED = encode(frames.Opened(1, 0))
OF_WORKERS: dict[str, bytes] = {
    "garbage": b"\xff" * 100,
    "nothing": b"",
    "an item before its answer": ITEM,
    "tokens for nobody": encode(frames.Tokens([7, 1], [])),
    "tokens without credit": ACCEPTED + encode(frames.Tokens([1, 5] * 65, [])),
    "items without credit": ACCEPTED + ITEM * 65,
    "half a token": ACCEPTED + encode(frames.Tokens([1], [])),
    "accepted twice": ACCEPTED * 2,
    "an open": an_open(1),
    "credit for a request that is whole": ACCEPTED + encode(frames.Credit([1, 2**31 - 1])) * 2,
    "notices that fall": encode(frames.Draining(2, ["a"])) + encode(frames.Draining(1, ["b"])),
    "notices without an end": b"".join(
        encode(frames.Draining(n, [f"{n}/{m}" for m in range(32)])) for n in range(1, 200)
    ),
    "a giant message": ACCEPTED + encode(frames.Part(1, b"x" * MAX_PIECE)) * 200,
    "an error of unknown kind": encode(frames.Error(1, ["Strange"] * 16, "x" * 60_000, False)),
}


@pytest.mark.parametrize("what", OF_WORKERS)
async def test_a_hostile_worker_ends_only_its_own_streams(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            worker = WorkerConnection()
            with suppress(*GONE):
                while not worker.streams:
                    if not (data := await stream.receive_some()):
                        return
                    worker.receive_data(data)
                    while worker.next_event() is not None:
                        pass
                    await stream.send_all(worker.data_to_send() or b"")
                await stream.send_all(OF_WORKERS[what])

    sink = Sink()
    async with under_attack(caplog) as target, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(DynamoException), trio.fail_after(10):  # noqa: PT012 - at either place
            address = f"127.0.0.1:{port}/{PATH}"
            async with target.client.open_stream(address, REQUEST, b"question", sink):
                end = await sink.end()
                assert end is not None
                raise end
        await target.wait_whole(2)
        nursery.cancel_scope.cancel()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert max(map(len, lines), default=0) < 2000
