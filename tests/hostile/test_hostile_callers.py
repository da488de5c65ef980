"""The client's call-home port in memory, and a worker that answers in bad faith."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import CannotConnect, ConnectionTimeout, DynamoException
from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.plane.tcp.incoming import IncomingCall
from dynamo_trio.plane.tcp.pipeline import Pipeline
from dynamo_trio.plane.tcp.streams import StreamTable
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.ack import Ack, encode_ack
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from tests.hostile.garbage import NASTY, handshake
from tests.hostile.test_hostile_worker_port import run
from tests.plane.fake_worker import Collector

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 10_000
PROLOGUE = two_part.encode(b'{"error":null}')
ITEM = two_part.encode(
    data=MSGPACK.data_item[0] + MSGPACK.data_only[0] + b"\xa1x" + MSGPACK.data_item[1]
)
END = two_part.encode(data=MSGPACK.complete_final) + two_part.encode(b'"sentinel"')


@attrs.define(eq=False)
class Keeper(Collector):
    """Keeps the payloads as they are: what they hold is not the plane's business."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert not self.ends
        self.batches.append(list(payloads))
        if self.stream is not None:
            self.stream.grant(len(payloads))


@attrs.define(eq=False)
class Home:
    """A table with two streams: one is attacked, and one is not."""

    table: StreamTable = attrs.field(factory=StreamTable)
    most: int = 0
    over: bool = False

    async def call(self, *said: bytes, every: float = 0.0) -> None:
        """One caller that says all this, and leaves."""
        theirs, ours = trio.testing.memory_stream_pair()
        answer = IncomingCall(ours, LIMIT, peer="1.2.3.4:5")

        async def serve() -> None:
            await answer.run(self.table, 10.0)
            self.over = True
            await ours.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for piece in said:
                await trio.sleep(every)
                if self.over:
                    break
                with suppress(trio.BrokenResourceError):
                    await theirs.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
                self.most = max(self.most, answer._end.buffered)
            await theirs.send_eof()


def subject_of(home: Home, sink: Keeper) -> str:
    stream = home.table.add("a", MSGPACK, sink)
    sink.stream = stream
    return stream.subject


@given(st.lists(st.binary(max_size=200), max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_bytes_in_place_of_a_handshake(said: list[bytes]) -> None:
    async def test() -> None:
        home, sink = Home(), Keeper()
        subject_of(home, sink)
        await home.call(*said)
        assert home.over
        assert (sink.items, sink.ends) == ([], [])

    run(test)


answers = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=100),
        st.builds(two_part.encode, st.binary(max_size=50), st.binary(max_size=50)),
        st.sampled_from([PROLOGUE, ITEM, ITEM[:30], END, handshake("x")]),
        st.sampled_from([two_part.encode(b'"stop"'), two_part.encode(b'"sentinel"')]),
        st.binary(max_size=40).map(lambda data: two_part.encode(data=data.join(MSGPACK.data_item))),
    ),
    max_size=12,
)


@given(answers)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_answer_ends_its_stream_and_no_other(said: list[bytes]) -> None:
    async def test() -> None:
        home, sink, other = Home(), Keeper(), Keeper()
        subject, others = subject_of(home, sink), subject_of(home, other)
        await home.call(handshake(subject), *said)
        assert home.over
        assert len(sink.ends) == 1
        assert home.most <= LIMIT
        assert (other.items, other.ends) == ([], [])
        await Home(home.table).call(handshake(others) + PROLOGUE + ITEM * 5 + END)
        assert (len(other.items), other.ends) == (5, [None])

    run(test)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_came_before_the_garbage_is_delivered(garbage: bytes) -> None:
    async def test() -> None:
        home, sink = Home(), Keeper()
        subject = subject_of(home, sink)
        await home.call(handshake(subject) + PROLOGUE + ITEM * 7 + garbage)
        assert len(sink.items) >= 7
        (end,) = sink.ends
        assert isinstance(end, DynamoException)

    run(test)


async def test_a_byte_a_second_is_no_handshake(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home()
    await home.call(*(bytes([byte]) for byte in handshake("x")), every=1.0)
    assert home.over
    assert trio.current_time() == pytest.approx(10.0, abs=2.0)
    assert caplog.messages == [
        "a call home from 1.2.3.4:5 is closed: it did not say within 10 s which request it answers"
    ]


async def test_half_a_handshake_is_told(caplog: pytest.LogCaptureFixture) -> None:
    await Home().call(handshake("x")[:30])
    assert caplog.messages == ["a call home from 1.2.3.4:5 is closed: it left inside its handshake"]


async def test_slow_answers_are_taken(autojump_clock: trio.testing.MockClock) -> None:
    home, sink = Home(), Keeper()
    subject = subject_of(home, sink)
    said = PROLOGUE + ITEM * 3 + END
    await home.call(handshake(subject), *(bytes([byte]) for byte in said), every=1.0)
    assert (len(sink.items), sink.ends) == (3, [None])


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
async def test_many_callers_for_nobody(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """They are closed at once, without a word in the log: a given up request looks the same."""
    caplog.set_level(logging.INFO, "dynamo_trio")
    home, sink = Home(), Keeper()
    subject = subject_of(home, sink)
    for number in range(count):
        await Home(home.table).call(handshake(f"{subject[:-5]}{number:05}"))
    await home.call(handshake(subject) + PROLOGUE + ITEM + END)
    assert (len(sink.items), sink.ends) == (1, [None])
    assert caplog.messages == []


async def test_the_second_caller_for_a_stream_gets_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    home, sink = Home(), Keeper()
    subject = subject_of(home, sink)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(home.call, handshake(subject) + PROLOGUE, ITEM, END, every=1.0))
        await trio.sleep(1.5)
        await Home(home.table).call(handshake(subject) + PROLOGUE + ITEM * 9 + END)
    assert (len(sink.items), sink.ends) == (1, [None])


async def test_a_long_handshake_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    home = Home()
    head = (200_000).to_bytes(8, "big") + bytes(16)
    await home.call(head, *([b"x" * 3000] * 50))
    assert home.over
    assert home.most < 10_000
    assert len(caplog.messages) == 1


# --- a worker that acknowledges in bad faith --------------------------------------------------


@attrs.define(eq=False)
class Acks:
    """A connection to a worker that says what it is told, whatever is asked."""

    said: Sequence[bytes]
    every: float = 0.0
    closes: bool = True
    most: int = 0

    async def ask(self, count: int = 3) -> list[Ack | DynamoException]:
        ours, theirs = trio.testing.memory_stream_pair()

        async def dial() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            return ours

        pipeline = Pipeline(dial, TcpSettings(), "w")
        found: list[Ack | DynamoException] = []

        async def wait() -> None:
            try:
                found.append(await pipeline.put(RequestFrame("1/a", b"")).wait())
            except DynamoException as exc:
                found.append(exc)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pipeline.run)
            for _ in range(count):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            for piece in self.said:
                await trio.sleep(self.every)
                if pipeline.closed:
                    break
                with suppress(trio.BrokenResourceError):
                    await theirs.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
                self.most = max(self.most, pipeline._client.buffered)
            if self.closes:
                await theirs.send_eof()
        assert pipeline.closed
        assert pipeline.outstanding == 0
        return found


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(bytes(4))), max_size=8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_acknowledgements(said: list[bytes]) -> None:
    async def test() -> None:
        acks = Acks(said)
        found = await acks.ask()
        assert len(found) == 3
        assert acks.most < 20_000

    run(test)


async def test_a_byte_a_second_is_no_acknowledgement(
    autojump_clock: trio.testing.MockClock,
) -> None:
    said = encode_ack(Ack("Server overloaded: full"))
    found = await Acks([bytes([byte]) for byte in said], every=1.0).ask(1)
    assert isinstance(found[0], ConnectionTimeout)
    assert trio.current_time() < 10


async def test_more_acknowledgements_than_requests(caplog: pytest.LogCaptureFixture) -> None:
    found = await Acks([bytes(4) * 1000]).ask(2)
    assert found == [Ack(), Ack()]
    assert "acknowledged more requests than it was sent" in caplog.text
    assert len(caplog.messages) == 1


async def test_a_giant_acknowledgement(caplog: pytest.LogCaptureFixture) -> None:
    acks = Acks([b"\xff\xff\xff\xff", *([b"x" * 1000] * 100)])
    assert isinstance((await acks.ask(1))[0], DynamoException)
    assert acks.most < 2000
    assert len(caplog.messages) == 1


async def test_a_refusal_with_an_odd_text() -> None:
    (ack,) = await Acks([encode_ack(Ack(NASTY))]).ask(1)
    assert ack == Ack(NASTY)


async def test_a_worker_that_hangs_up_at_once() -> None:
    found = await Acks([]).ask(2)
    assert {type(error) for error in found} == {CannotConnect}
