"""A worker's request connections: what is acknowledged, refused, or not listened to."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest
import trio
import trio.testing

from dynamo_trio.errors import Draining, Overloaded
from dynamo_trio.plane.tcp.settings import TcpSettings
from dynamo_trio.plane.tcp.worker_connection import WorkerConnection
from dynamo_trio.wire.dynamo.ack import ACCEPTED, Ack
from dynamo_trio.wire.dynamo.call_home_states import Handshake, Refused
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.control import ConnectionInfo, ControlMessage
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_frame import RequestFrame, encode_frame
from dynamo_trio.wire.dynamo.request_plane import RequestClient
from tests.plane.tcp_peer import LOOPBACK, PATH, Bench, open_bench, open_peer, reset

if TYPE_CHECKING:
    from collections.abc import Callable


# --- over sockets ----------------------------------------------------------------------------


async def test_a_request_arrives_with_its_head_and_body() -> None:
    async with open_bench() as bench:
        control = ControlMessage.for_request(bench.peer.reply_to(), JSON)
        control = msgspec.structs.replace(control, metadata={"traceparent": "00-1"})
        assert await bench.peer.ask(bench.peer.frame(b"{}", control=control)) == ACCEPTED
        call = bench.call
        assert (call.head.request_id, call.head.codec, call.payload) == ("id-1", JSON, b"{}")
        assert call.head.metadata == {"traceparent": "00-1"}


async def test_the_address_is_what_a_record_says() -> None:
    async with open_bench() as bench:
        assert bench.address.startswith("127.0.0.1:")
        assert bench.address.endswith("/1f/generate")


async def test_a_refused_message_does_not_disturb_the_order_of_the_others() -> None:
    async with open_bench() as bench:
        peer = bench.peer
        frames = [peer.frame(), peer.frame(path="1f/other"), peer.frame()]
        await peer.send(*frames * 20)
        acks = [await peer.next_ack() for _ in range(60)]
        unknown = Ack("Server overloaded: Unknown endpoint: 1f/other")
        assert acks == [ACCEPTED, unknown, ACCEPTED] * 20
        assert len(bench.endpoint.calls) == 40


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Draining("the worker stops"), "Server overloaded: draining"),
        (Overloaded("it runs 8 requests"), "Server overloaded: it runs 8 requests"),
        (ValueError("a mistake"), "Server overloaded: the worker failed to take the request on"),
    ],
    ids=["draining", "overloaded", "mistake"],
)
async def test_a_refusal_is_told_and_the_connection_kept(error: Exception, text: str) -> None:
    async with open_bench() as bench:
        bench.endpoint.refusal = error
        assert await bench.peer.ask(bench.peer.frame()) == Ack(text)
        bench.endpoint.refusal = None
        assert await bench.peer.ask(bench.peer.frame()) == ACCEPTED


async def test_a_message_that_is_too_large_is_refused_and_the_connection_closed() -> None:
    settings = attrs.evolve(LOOPBACK, max_message=4096)
    async with open_bench(settings) as bench:
        peer = bench.peer
        await peer.send(peer.frame(), peer.frame(bytes(1_000_000)))
        assert await peer.next_ack() == ACCEPTED
        ack = await peer.next_ack()
        assert isinstance(ack, Ack)
        assert ack.text.startswith("Server unavailable: Read error: message too large: 1000")
        assert ack.text.endswith("(max: 4096 bytes)")
        assert await peer.next_ack() == Closed()


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff",  # a path of 65535 bytes
        b"\x00\x02\xff\xfe\x00\x00\x00\x00\x00\x00",  # a path that is not UTF-8
        b"\x00\x01a\xff\xff",  # headers of 65535 bytes
    ],
    ids=["long path", "bad path", "long headers"],
)
async def test_who_breaks_the_form_of_a_frame_is_closed(raw: bytes) -> None:
    async with open_bench() as bench, open_peer(bench.address) as other:
        await bench.peer.stream.send_all(raw)
        assert await bench.peer.next_ack() == Closed()
        assert await other.ask(other.frame()) == ACCEPTED  # nobody else is harmed


async def test_a_payload_that_says_not_where_to_answer_is_unavailable() -> None:
    async with open_bench() as bench:
        for payload in (b"", b"garbage", struct.pack(">QQQ", 1, 0, 0) + b"{"):
            ack = await bench.peer.ask(RequestFrame(PATH, payload))
            assert isinstance(ack, Ack)
            assert ack.text.startswith("Server unavailable: the peer sent a")
        assert not bench.endpoint.calls


def other_id(bench: Bench) -> ControlMessage:
    control = ControlMessage.for_request(bench.peer.reply_to(), MSGPACK)
    return msgspec.structs.replace(control, id="another")


def many_in(bench: Bench) -> ControlMessage:
    control = ControlMessage.for_request(bench.peer.reply_to(), MSGPACK)
    return msgspec.structs.replace(control, request_type="many_in")


def strange_codec(bench: Bench) -> ControlMessage:
    control = ControlMessage.for_request(bench.peer.reply_to(), MSGPACK)
    return msgspec.structs.replace(control, payload_codec="yaml")


@pytest.mark.parametrize("control_of", [other_id, many_in, strange_codec])
async def test_a_request_that_cannot_be_served_is_told_so_at_home(
    control_of: Callable[[Bench], ControlMessage],
) -> None:
    async with open_bench() as bench:
        frame = bench.peer.frame(control=control_of(bench))
        assert await bench.peer.ask(frame) == ACCEPTED
        home = await bench.peer.next_home()
        handshake, refused = await home.events(2)
        assert isinstance(handshake, Handshake)
        assert isinstance(refused, Refused)
        assert refused.error is not None
        assert refused.error.error_type == {"Backend": "InvalidArgument"}
        assert not bench.endpoint.calls


async def test_another_transport_is_refused() -> None:
    async with open_bench() as bench:
        control = ControlMessage.for_request(bench.peer.reply_to(), MSGPACK)
        info = ConnectionInfo(transport="quic", info="{}")
        control = msgspec.structs.replace(control, connection_info=info)
        ack = await bench.peer.ask(bench.peer.frame(control=control))
        assert isinstance(ack, Ack)
        assert ack.text.startswith("Server unavailable: the peer asked for transport 'quic'")


async def test_a_reset_request_connection_ends_no_request() -> None:
    async with open_bench() as bench:
        home = await bench.peer.call()
        reset(bench.peer.stream)
        bench.call.outbox.begin()
        bench.call.outbox.finish(None)
        assert len(await home.events(3)) == 3
        assert bench.call.cancels == 0


async def test_a_path_that_is_no_longer_served_is_unknown() -> None:
    async with open_bench() as bench:
        async with bench.plane.serve("1f/other", bench.endpoint):
            assert await bench.peer.ask(bench.peer.frame(path="1f/other")) == ACCEPTED
        ack = await bench.peer.ask(bench.peer.frame(path="1f/other"))
        assert ack == Ack("Server overloaded: Unknown endpoint: 1f/other")


async def test_a_path_is_served_once() -> None:
    async with open_bench() as bench:
        with pytest.raises(ValueError, match="1f/generate"):
            async with bench.plane.serve(PATH, bench.endpoint):
                raise AssertionError("the path is taken")


async def test_a_peer_that_sent_a_frame_is_silent() -> None:
    async with open_bench() as bench:
        await bench.peer.stream.send_all(b"\x00")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not bench.plane.has_silent_peers
        await bench.peer.stream.send_all(bench.peer.client.send(bench.peer.frame())[1:])
        assert await bench.peer.next_ack() == ACCEPTED
        assert bench.plane.has_silent_peers


async def test_forty_in_parallel_on_one_connection() -> None:
    async with open_bench() as bench:
        peer = bench.peer
        await peer.send(*(peer.frame() for _ in range(40)))
        assert [await peer.next_ack() for _ in range(40)] == [ACCEPTED] * 40
        for call in bench.endpoint.calls:
            call.outbox.begin()
            call.outbox.put(b"\x01")
            call.outbox.finish(None)
        subjects = set()
        for _ in range(40):
            home = await peer.next_home()
            handshake, *rest = await home.events(5)
            assert isinstance(handshake, Handshake)
            subjects.add(handshake.subject)
            assert len(rest) == 4
        assert subjects == {f"subject-{n}" for n in range(40)}


async def test_a_frame_of_thirty_megabytes_is_taken() -> None:
    async with open_bench() as bench:
        body = bytes(30 * 2**20)
        assert await bench.peer.ask(bench.peer.frame(body)) == ACCEPTED
        assert bench.call.payload == body


# --- in virtual time, over memory streams -----------------------------------------------------

FRAME = RequestFrame("p", b"payload", {})


@attrs.define(eq=False)
class Line:
    """A request connection over a pair of memory streams."""

    client: trio.testing.MemorySendStream | trio.abc.Stream
    taken: list[RequestFrame] = attrs.field(factory=list)
    ended_at: float | None = None

    def answer(self, frame: RequestFrame) -> Ack:
        self.taken.append(frame)
        return ACCEPTED


async def run_line(
    nursery: trio.Nursery, settings: TcpSettings
) -> tuple[Line, trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]]:
    client, worker = trio.testing.memory_stream_pair()
    line = Line(client)

    async def serve() -> None:
        await WorkerConnection(worker, line.answer, settings).run()
        line.ended_at = trio.current_time()
        await worker.aclose()

    nursery.start_soon(serve)
    return line, client  # type: ignore[return-value]  # the pair is of stapled streams


async def test_an_idle_connection_may_stay_open(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings())
        for _ in range(3):
            await client.send_all(encode_frame(FRAME))
            await trio.sleep(86_400)
        assert line.taken == [FRAME] * 3
        assert line.ended_at is None
        await client.aclose()


async def test_slow_bytes_are_taken_while_the_frame_is_in_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings(frame_time=60.0))
        for _ in range(3):
            for byte in encode_frame(FRAME):
                await client.send_all(bytes([byte]))
                await trio.sleep(2.0)
        assert line.taken == [FRAME] * 3
        assert line.ended_at is None
        await client.aclose()


async def test_half_a_frame_ends_the_connection_in_time(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    data = encode_frame(FRAME)
    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings(frame_time=60.0))
        await trio.sleep(100)
        await client.send_all(data)
        for byte in data[:-1]:  # a byte now and then does not help
            if line.ended_at is None:
                await client.send_all(bytes([byte]))
                await trio.sleep(7)
        assert line.ended_at == pytest.approx(160.0)
        assert line.taken == [FRAME]
        assert "took over 60 s" in caplog.text


async def test_end_inside_a_frame_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings())
        await client.send_all(b"\x00")
        await client.aclose()
    assert line.ended_at is not None
    assert "ended inside a frame" in caplog.text


async def test_who_takes_no_acknowledgements_is_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    client, worker = trio.testing.lockstep_stream_pair()
    line = Line(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(WorkerConnection(worker, line.answer, TcpSettings()).run)
        await client.send_all(encode_frame(FRAME))
    assert trio.current_time() == pytest.approx(60.0)
    assert line.taken == [FRAME]


async def test_acknowledgements_of_what_came_first_survive_a_fault() -> None:
    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings())
        peer = RequestClient()
        await client.send_all(peer.send(FRAME) + peer.send(FRAME) + b"\xff\xff")
        received = b""
        while data := await client.receive_some():
            received += data
        assert received == bytes(8)
        assert line.taken == [FRAME] * 2


async def test_a_long_pipeline_lets_other_tasks_run() -> None:
    others: list[int] = []

    async def other(line: Line) -> None:
        while line.ended_at is None:
            others.append(len(line.taken))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        line, client = await run_line(nursery, TcpSettings())
        nursery.start_soon(other, line)
        await client.send_all(encode_frame(FRAME) * 2000)
        await client.send_eof()
    assert len(line.taken) == 2000
    assert max(b - a for a, b in pairwise(others)) <= 32
