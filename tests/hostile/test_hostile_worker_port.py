"""The worker's request port in memory: any bytes, at any speed, and what they may cost."""

from __future__ import annotations

import logging
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.plane.tcp.server_side import Served, TcpServerSide
from dynamo_trio.plane.tcp.worker_connection import WorkerConnection
from dynamo_trio.wire.dynamo.ack import ACCEPTED
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.request_plane import RequestServer
from tests.hostile.garbage import NASTY, request
from tests.plane.fake_worker import until
from tests.plane.tcp_peer import PATH, FakeEndpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.wire.dynamo.ack import Ack

LIMIT = 10_000
SETTINGS = TcpSettings(rpc_host="127.0.0.1", max_message=LIMIT)
#: Where nobody listens; in these tests nobody dials.
NOWHERE = HostPort("127.0.0.1", 9)


@attrs.define(eq=False)
class Line:
    """One connection, and the most that it ever held."""

    frames: list[RequestFrame] = attrs.field(factory=list)
    most: int = 0
    over: bool = False

    async def run(self, *pieces: bytes, every: float = 0.0, hears: bool = True) -> bytes:
        """Say the pieces, ``every`` so many seconds, and leave; returns what came back."""
        theirs, ours = trio.testing.memory_stream_pair()
        connection = WorkerConnection(ours, self._answer, SETTINGS, peer="1.2.3.4:5")
        heard = bytearray()

        async def serve() -> None:
            await connection.run()
            self.over = True
            await ours.aclose()

        async def hear() -> None:
            while hears and (piece := await theirs.receive_some()):
                heard.extend(piece)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(hear)
            for piece in pieces:
                await trio.sleep(every)
                if self.over:
                    break
                with suppress(trio.BrokenResourceError):
                    await theirs.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
                self.most = max(self.most, connection._wire.buffered)
            if not self.over:
                await theirs.send_eof()
        return bytes(heard)

    def _answer(self, frame: RequestFrame) -> Ack:
        self.frames.append(frame)
        return ACCEPTED


def run(test: Callable[[], Awaitable[None]]) -> None:
    """A Trio run of its own, for Hypothesis."""
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


FRAME = request(PATH, NOWHERE)
pieces = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.sampled_from([FRAME, FRAME[:40], FRAME[40:], b"\0" * 8, b"\0\0\0\0\xff\xff\xff\xff"]),
    ),
    max_size=20,
)


@given(pieces)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_bytes_end_the_connection_and_nothing_else(said: list[bytes]) -> None:
    async def test() -> None:
        line = Line()
        heard = await line.run(*said)
        assert line.over
        assert line.most <= LIMIT
        assert len(heard) >= 4 * len(line.frames)  # every request was answered

    run(test)


@given(st.binary(max_size=12), st.integers(1, 200))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_frames_before_the_garbage_are_answered(garbage: bytes, count: int) -> None:
    async def test() -> None:
        line = Line()
        heard = await line.run(FRAME * count + garbage)
        assert len(line.frames) >= count
        assert heard[: 4 * count] == bytes(4 * count)

    run(test)


async def test_a_byte_a_second_is_given_a_minute(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line()
    await line.run(*(bytes([byte]) for byte in FRAME), every=1.0)
    assert line.over
    assert trio.current_time() == pytest.approx(SETTINGS.frame_time, abs=2.0)
    assert line.frames == []
    assert caplog.messages == [
        "a request connection from 1.2.3.4:5 is closed: a frame or acknowledgement took over 60 s"
    ]


async def test_slow_frames_that_are_in_time_are_served(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [FRAME[at : at + 20] for at in range(0, len(FRAME), 20)]
    line = Line()
    await line.run(*(parts * 5), every=1.0)
    assert len(line.frames) == 5
    assert caplog.messages == []


async def test_idle_connections_may_stay(autojump_clock: trio.testing.MockClock) -> None:
    line = Line()
    await line.run(FRAME, FRAME, every=100_000.0)
    assert len(line.frames) == 2


async def test_giant_lengths_are_refused_before_anything_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for head in (
        b"\xff\xff",
        b"\0\1a\xff\xff",
        b"\0\1a\0\0\xff\xff\xff\xff",
        b"\0\1a\0\0\0\0\x27\x10",
    ):
        line = Line()
        await line.run(head, *([b"x" * 1000] * 100))
        assert line.over
        assert line.most <= 16
        assert line.frames == []


async def test_the_log_names_the_reason_in_one_line(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    for said in (b"\xff\xff", FRAME[:10], b"\0\2\xff\xfe\0\0\0\0\0\0", b"\0\0\0\0\xff\xff\xff\xff"):
        caplog.clear()
        await Line().run(said)
        assert len(caplog.records) == 1
        assert caplog.records[0].levelno == logging.WARNING
        assert caplog.records[0].exc_info is None
        assert "a request connection from 1.2.3.4:5 is closed: " in caplog.text


# --- the requests themselves ------------------------------------------------------------------


@attrs.define(eq=False)
class Side:
    """The server side of a plane that can be asked without a connection."""

    side: TcpServerSide
    endpoint: FakeEndpoint

    def ask(self, frame: bytes) -> Ack:
        server = RequestServer()
        server.receive_data(frame)
        event = server.next_event()
        return self.side.answer(event)  # type: ignore[arg-type]  # the frame is whole


async def open_side(nursery: trio.Nursery) -> Side:
    side = TcpServerSide(TcpSettings(rpc_host="127.0.0.1"), nursery)
    endpoint = FakeEndpoint()
    side._served[PATH] = Served(endpoint)
    return Side(side, endpoint)


async def test_odd_ids_names_and_metadata(caplog: pytest.LogCaptureFixture) -> None:
    """They reach the endpoint as they are, and the log only cut to a size."""
    caplog.set_level(logging.DEBUG, "dynamo_trio")
    metadata = {f"{NASTY}{n}": NASTY for n in range(2000)}
    long = "i" * 100_000
    async with trio.open_nursery() as nursery:
        side = await open_side(nursery)
        for request_id in (NASTY, "", long):
            frame = request(PATH, NOWHERE, subject=NASTY, request_id=request_id)
            assert side.ask(frame) is ACCEPTED
        assert side.ask(request(PATH, NOWHERE, metadata=metadata)) is ACCEPTED
        heads = [call.head for call in side.endpoint.calls]
        assert [head.request_id for head in heads] == [NASTY, "", long, "i"]
        assert heads[-1].metadata == metadata
        await until(lambda: not side.side._answers)  # nobody is there: all are dialled in vain
    assert [call.cancels for call in side.endpoint.calls] == [1, 1, 1, 1]
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize(
    "host",
    ["..", "a..b", "é" * 100, "a" * 300, "\ud800".encode("utf-8", "replace").decode(), "%", "a\0b"],
)
async def test_a_reply_address_that_is_no_host(host: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio")
    async with trio.open_nursery() as nursery:
        side = await open_side(nursery)
        assert side.ask(request(PATH, HostPort(host, 1))) is ACCEPTED
        await until(lambda: not side.side._answers)  # nobody is there: all are dialled in vain
    assert side.endpoint.calls[0].cancels == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.records[0].exc_info is None


async def test_the_same_id_a_thousand_times(caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        side = await open_side(nursery)
        frame = request(PATH, NOWHERE, subject="same", request_id="same")
        assert {side.ask(frame) for _ in range(1000)} == {ACCEPTED}
        assert len(side.endpoint.calls) == 1000
        await until(lambda: not side.side._answers)  # nobody is there: all are dialled in vain
    assert {call.cancels for call in side.endpoint.calls} == {1}


async def test_refusals_do_not_flood_the_log(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trio")
    async with trio.open_nursery() as nursery:
        side = await open_side(nursery)
        for _ in range(10_000):
            assert "Unknown endpoint" in side.ask(b"\0" * 8).text
        await trio.sleep(1)
        side.ask(request("other", NOWHERE))
    assert caplog.messages == [
        "refused a request for '', which is not served here",
        "refused a request for 'other', which is not served here (and 9999 more before it)",
    ]


@given(st.binary(max_size=200))
@settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_any_payload_is_refused_in_words(payload: bytes) -> None:
    async def test() -> None:
        async with trio.open_nursery() as nursery:
            side = await open_side(nursery)
            ack = side.side.answer(RequestFrame(PATH, payload))
            assert ack.text.startswith("Server unavailable: ")
            assert side.endpoint.calls == []

    run(test)


async def test_a_header_costs_little_more_than_its_bytes() -> None:
    """A control message is small by rule, so the largest map in it is bounded too."""
    fields = {f"k{n}": "" for n in range(15_000)}
    frame = request(PATH, NOWHERE, metadata=fields)
    async with trio.open_nursery() as nursery:
        side = await open_side(nursery)
        tracemalloc.start()
        try:
            assert side.ask(frame) is ACCEPTED
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        nursery.cancel_scope.cancel()
    assert peak < 30 * len(frame)
