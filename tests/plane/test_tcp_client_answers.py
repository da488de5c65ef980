"""A client's answers: who may call home, what each ending means, and what the worker is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio import errors
from dynamo_trio.plane.abc import INITIAL_CREDIT
from dynamo_trio.plane.tcp.incoming import MAX_GREETING, IncomingCall
from dynamo_trio.plane.tcp.streams import StreamTable, TcpStream
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.annotated import Annotated, annotate_error
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.dynamo.wire_errors import WireError
from tests.plane.fake_worker import (
    ENDING,
    PATIENCE,
    Caller,
    Collector,
    item,
    open_bench,
    reset,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.dynamo.call_home_states import UpEvent

CODECS = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
CLOSING = pytest.mark.parametrize("close", ["fin", "reset"])


def close_now(stream: trio.abc.Stream, how: str) -> None:
    assert isinstance(stream, trio.SocketStream)
    if how == "reset":
        reset(stream)
    else:
        stream.socket.close()


# --- over sockets ----------------------------------------------------------------------------


@CODECS
async def test_a_whole_answer_comes_as_it_is_sent(codec: Codec) -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call(codec)
        await caller.items({"token_ids": [1]}, {"token_ids": [2]})
        await caller.say(*ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == [{"token_ids": [1]}, {"token_ids": [2]}]
        assert await caller.wishes() == []  # only closed


async def test_what_is_there_is_fed_in_one_call() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        await request.call_home(Accepted(), *(item(n) for n in range(50)), *ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.batches == [list(range(50))]


async def test_the_call_home_may_come_before_the_acknowledgement() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.call_home(Accepted(), item(1))
        await until(lambda: asked.sink.items == [1])
        assert not asked.opened.is_set()
        await request.connection.acknowledge()
        await asked.open()


#: After the handshake: what the worker says, with raw bytes for what it may not say; then it
#: closes. What the client gets: items, and the class of the end (None: whole).
ROWS: dict[str, tuple[Sequence[UpEvent | bytes], list[object], type[DynamoException] | None]] = {
    "complete and sentinel": ([Accepted(), item(1), CompleteFinal(), Sentinel()], [1], None),
    "complete": ([Accepted(), item(1), CompleteFinal()], [1], None),
    "nothing but the end": ([Accepted(), *ENDING], [], None),
    "sentinel only": ([Accepted(), item(1), Sentinel()], [1], errors.Disconnected),
    "mid-stream": ([Accepted(), item(1)], [1], errors.Disconnected),
    "before the prologue": ([], [], errors.Disconnected),
    "refused in words": ([Refused("no")], [], errors.CannotConnect),
    "refused as invalid": (
        [Refused.because(errors.InvalidArgument("no"))],
        [],
        errors.InvalidArgument,
    ),
    "refused as shut down": (
        [Refused.because(errors.EngineShutdown("bye"))],
        [],
        errors.EngineShutdown,
    ),
    "refused as unknown": ([Refused.because(ValueError("oops"))], [], errors.CannotConnect),
    "half a message": ([Accepted(), item(1), b"\x00" * 5], [1], errors.Disconnected),
    "a header that is none": (
        [Accepted(), item(1), two_part.encode(header=b'"hello"')],
        [1],
        errors.RemoteProtocolError,
    ),
    "both parts": (
        [Accepted(), item(1), two_part.encode(header=b"x", data=b"x")],
        [1],
        errors.RemoteProtocolError,
    ),
    "an item before the prologue": (
        [two_part.encode(data=b"\x81\xaecomplete_final\xc3")],
        [],
        errors.RemoteProtocolError,
    ),
    "no prologue": ([two_part.encode(header=b"[]")], [], errors.RemoteProtocolError),
    "an undecodable envelope": (
        [Accepted(), item(1), two_part.encode(data=b"\xc1")],
        [1],
        errors.UnreadableItem,
    ),
    "an item that is none": (
        [Accepted(), item(1), Item(b"\x93\1\2\3")],
        [1],
        errors.UnreadableItem,
    ),
    "an empty envelope": (
        [Accepted(), item(1), two_part.encode(data=b"\x81\xaecomplete_final\xc2")],
        [1],
        errors.UnreadableItem,
    ),
    "a message too large": (
        [Accepted(), item(1), b"\0" * 8 + b"\xff" * 8 + b"\0" * 8],
        [1],
        errors.MessageTooLarge,
    ),
    "the last item and the end in one": (
        [Accepted(), two_part.encode(data=b"\x82\xa4data\x81\xa4data\x01\xaecomplete_final\xc3")],
        [1],
        None,
    ),
}


async def say_row(caller: Caller, script: Sequence[UpEvent | bytes]) -> None:
    said = [part if isinstance(part, bytes) else caller.end.send(part) for part in script]
    await caller.stream.send_all(b"".join(said))


@pytest.mark.parametrize("row", ROWS)
async def test_each_ending_is_what_it_means(row: str) -> None:
    script, items, kind = ROWS[row]
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        caller = await request.call_home()
        await say_row(caller, script)
        caller.stream.socket.shutdown(1)  # type: ignore[attr-defined]  # the worker's FIN
        end = await asked.sink.end()
        assert type(end) is (type(None) if kind is None else kind)
        assert asked.sink.items == items
        killed = [Kill()] if isinstance(end, errors.ProtocolError) else []
        assert await caller.wishes() == killed


ERRORS: list[tuple[str | dict[str, str], type[DynamoException]]] = [
    ("Disconnected", errors.Disconnected),
    ("ConnectionTimeout", errors.ConnectionTimeout),
    ("ResponseTimeout", errors.ConnectionTimeout),
    ("WorkerOverloaded", errors.Overloaded),
    ({"Backend": "EngineShutdown"}, errors.EngineShutdown),
    ({"Backend": "StreamIncomplete"}, errors.StreamIncomplete),
    ({"Backend": "InvalidArgument"}, errors.InvalidArgument),
    ({"Backend": "Cancelled"}, errors.Cancelled),
    ("Cancelled", errors.Cancelled),
    ("Unknown", errors.Unknown),
    ({"Backend": "Unknown"}, errors.Unknown),
    ("SomethingNew", errors.Unknown),
]


@CODECS
@pytest.mark.parametrize(("wire", "kind"), ERRORS)
async def test_an_item_that_is_an_error_ends_the_stream_with_it(
    wire: str | dict[str, str], kind: type[DynamoException], codec: Codec
) -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call(codec)
        error = Annotated(event="error", error=WireError(error_type=wire, message="the message"))
        await caller.items(1)
        await caller.say(Item(codec.encode(error)), item("not read", codec), *ENDING)
        end = await asked.sink.end()
        assert (type(end), str(end)) == (kind, "the message")
        assert asked.sink.items == [1]
        assert await caller.wishes() == []  # it ends in good order


async def test_items_that_only_comment_are_left_out() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        comment = Item(MSGPACK.encode(Annotated(event="note", comment=["hello"])))
        await caller.say(comment, item(1), comment, *ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == [1]


@CLOSING
@pytest.mark.parametrize("phase", ["before the prologue", "streaming", "complete"])
async def test_a_connection_that_ends_is_judged_by_its_phase(phase: str, close: str) -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        await asked.open()
        caller = await request.call_home()
        if phase != "before the prologue":
            await caller.say(Accepted())
            await caller.items(1)
            await until(lambda: asked.sink.items == [1])
        if phase == "complete":
            await caller.say(CompleteFinal())
            await asked.sink.end()
        close_now(caller.stream, close)
        end = await asked.sink.end()
        assert type(end) is (type(None) if phase == "complete" else errors.Disconnected)


# --- who may call home -----------------------------------------------------------------------


async def test_nobody_answers_a_request_that_is_not_waited_for() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        stranger = await request.dial()
        await stranger.say(Handshake("no such subject"), Accepted())
        assert await stranger.wishes() == []
        await request.connection.acknowledge()
        caller = await request.call_home(Accepted(), item(1), *ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == [1]
        assert await caller.wishes() == []


async def test_the_first_call_counts_and_a_second_is_closed() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        first = await request.call_home(Accepted(), item(1))
        await until(lambda: asked.sink.items == [1])
        second = await request.call_home(Accepted(), item("wrong"), *ENDING)
        assert await second.wishes() == []
        await first.say(item(2), *ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == [1, 2]


async def test_a_call_for_a_request_that_was_given_up_is_closed() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        await asked.open()
        await asked.leave()
        late = await request.call_home(Accepted(), item(1))
        assert await late.wishes() == []
        assert (asked.sink.batches, asked.sink.ends) == ([], [])


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        two_part.encode(header=b"{}"),
        two_part.encode(header=b'{"subject":"s","stream_type":"request"}'),
        two_part.encode(data=b"x"),
        two_part.encode(header=b" " * (MAX_GREETING + 1))[:-1],
        b"",
    ],
    ids=["http", "no subject", "another stream", "data", "long", "nothing"],
)
async def test_who_is_no_worker_is_closed_and_harms_nobody(words: bytes) -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        address = await bench.plane.client._server.address()
        stream = await trio.open_tcp_stream(address.host, address.port)
        async with stream:
            await stream.send_all(words)
            if not words:
                await stream.send_eof()
            assert await Caller(stream).wishes() == []
        await caller.say(item(1), *ENDING)
        assert await asked.sink.end() is None


# --- what the worker is told -----------------------------------------------------------------


async def test_leaving_says_kill_and_closes() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await caller.items(1)
        await until(lambda: asked.sink.items == [1])
        await asked.leave()
        assert await caller.wishes() == [Kill()]
        assert asked.sink.ends == []
        assert len(bench.plane.client.streams) == 0


async def test_leaving_in_the_middle_of_a_flood_feeds_nothing_late() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()

        async def flood() -> None:
            try:
                while True:
                    await caller.items(*range(100))
            except trio.BrokenResourceError:
                pass

        bench.nursery.start_soon(flood)
        await until(lambda: len(asked.sink.items) > 500)
        await asked.leave()
        seen = len(asked.sink.items)
        await trio.sleep(0.05)
        assert len(asked.sink.items) == seen
        assert asked.sink.ends == []


async def test_stop_is_said_once_and_what_still_comes_is_taken() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await asked.open()
        asked.stream.stop()
        asked.stream.stop()
        assert await caller.next_wish() == Stop()
        await caller.items(1)
        await caller.say(*ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == [1]
        assert await caller.wishes() == []


@CLOSING
async def test_a_worker_that_was_told_to_stop_just_closes(close: str) -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await asked.open()
        asked.stream.stop()
        assert await caller.next_wish() == Stop()
        close_now(caller.stream, close)
        assert await asked.sink.end() is None


async def test_stop_that_was_wished_early_is_said_with_the_call() -> None:
    async with open_bench() as bench:
        asked = bench.ask()
        request = await bench.next_request()
        await request.connection.acknowledge()
        await asked.open()
        asked.stream.stop()
        caller = await request.call_home()
        assert await caller.next_wish() == Stop()
        await caller.say(Refused.because(errors.InvalidArgument("no")))
        assert type(await asked.sink.end()) is errors.InvalidArgument


async def test_stop_and_then_leaving() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await asked.open()
        asked.stream.stop()
        await asked.leave()
        # Both wishes may have been one before the first was told.
        assert (await caller.wishes())[-1] == Kill()


async def test_stopping_what_has_ended_says_nothing() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await asked.open()
        await caller.say(*ENDING)
        assert await asked.sink.end() is None
        asked.stream.stop()
        await asked.leave()
        assert await caller.wishes() == []


# --- back-pressure ---------------------------------------------------------------------------


async def test_without_credit_nothing_is_fed_and_the_worker_is_held_back() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call(grants=False)
        other, quick = bench.ask(), await bench.next_request()
        await asked.open()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for _ in range(1000):
                await caller.items("x" * 50_000)
                sent += 1
            await caller.say(*ENDING)

        bench.nursery.start_soon(flood)
        await until(lambda: len(asked.sink.items) == INITIAL_CREDIT)
        await trio.sleep(0.2)
        held_at = sent
        assert INITIAL_CREDIT <= held_at < 1000
        # It holds back only itself.
        quick_caller = await quick.accept()
        await quick_caller.say(item("quick"), *ENDING)
        assert await other.sink.end() is None
        assert sent == held_at
        assert len(asked.sink.items) == INITIAL_CREDIT
        asked.stream.grant(10)
        await until(lambda: len(asked.sink.items) == INITIAL_CREDIT + 10)
        asked.stream.grant(10_000)
        assert await asked.sink.end() is None
        assert len(asked.sink.items) == 1000


async def test_a_reader_without_credit_may_still_stop_and_leave() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call(grants=False)
        await asked.open()
        await caller.items(*range(INITIAL_CREDIT + 1))
        await until(lambda: len(asked.sink.items) == INITIAL_CREDIT)
        asked.stream.stop()
        assert await caller.next_wish() == Stop()
        await asked.leave()
        assert await caller.wishes() == [Kill()]
        assert len(asked.sink.items) == INITIAL_CREDIT


async def test_credit_that_is_granted_inside_feed_counts_at_once() -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        await asked.open()
        await caller.say(*(item(n) for n in range(10 * INITIAL_CREDIT)), *ENDING)
        assert await asked.sink.end() is None
        assert asked.sink.items == list(range(10 * INITIAL_CREDIT))


# --- mistakes of ours ------------------------------------------------------------------------


async def test_a_sink_that_raises_harms_only_its_own_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_bench() as bench:
        asked, caller = await bench.call()
        asked.sink.codec = JSON  # its decoder will raise
        await caller.items("no JSON")
        assert type(await asked.sink.end()) is errors.Unknown
        assert "a mistake of ours" in caplog.text
        assert await caller.wishes() == []
        again = bench.ask()
        request = await bench.next_request()
        await (await request.accept()).say(*ENDING)
        assert await again.sink.end() is None


# --- over memory, in virtual time ------------------------------------------------------------


@attrs.define(eq=False)
class Line:
    """One call home over memory streams; the test is the worker."""

    caller: Caller
    table: StreamTable
    stream: TcpStream
    sink: Collector
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, transport: trio.abc.Stream) -> None:
        await IncomingCall(transport, 10_000).run(self.table, 10.0)
        self.ended.set()
        await trio.aclose_forcefully(transport)


@pytest.fixture
async def line(nursery: trio.Nursery) -> Line:
    client, worker = trio.testing.memory_stream_pair()
    table, sink = StreamTable(), Collector()
    line = Line(Caller(worker), table, table.add("worker:1/x", MSGPACK, sink), sink)
    nursery.start_soon(line.run, client)
    return line


async def ended(line: Line) -> float:
    """When the connection's task had ended."""
    with trio.fail_after(1000):
        await line.ended.wait()
    return trio.current_time()


async def test_a_caller_that_says_nothing_is_closed(
    line: Line, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    began = trio.current_time()
    await line.caller.stream.send_all(b"\x00")
    assert await ended(line) - began == pytest.approx(10.0)
    assert "within 10 s" in caplog.text
    assert not line.stream.over


async def test_a_worker_may_think_for_hours(
    line: Line, autojump_clock: trio.testing.MockClock
) -> None:
    await line.caller.say(Handshake(line.stream.subject))
    await trio.sleep(10_000)
    await line.caller.say(Accepted())
    await trio.sleep(10_000)
    await line.caller.say(item(1), *ENDING)
    assert await line.sink.end() is None
    assert line.sink.items == [1]


async def test_the_sentinel_is_waited_for_a_moment(
    line: Line, autojump_clock: trio.testing.MockClock
) -> None:
    await line.caller.say(Handshake(line.stream.subject), Accepted(), CompleteFinal())
    assert await line.sink.end() is None
    began = trio.current_time()
    assert await ended(line) - began == pytest.approx(1.0)


async def test_the_sentinel_ends_the_wait(
    line: Line, autojump_clock: trio.testing.MockClock
) -> None:
    await line.caller.say(Handshake(line.stream.subject), Accepted(), CompleteFinal())
    assert await line.sink.end() is None
    began = trio.current_time()
    await trio.sleep(0.5)
    line.table.remove(line.stream)  # the client leaves, which is nothing to wait for or tell
    await line.caller.say(Sentinel())
    assert await ended(line) - began == pytest.approx(0.5)
    assert await line.caller.wishes() == []


async def test_after_an_error_the_worker_may_end_in_good_order(
    line: Line, autojump_clock: trio.testing.MockClock
) -> None:
    error = Item(annotate_error(MSGPACK, errors.EngineShutdown("bye")))
    await line.caller.say(Handshake(line.stream.subject), Accepted(), error)
    assert type(await line.sink.end()) is errors.EngineShutdown
    began = trio.current_time()
    await trio.sleep(0.5)
    await line.caller.say(*ENDING)
    assert await ended(line) - began == pytest.approx(0.5)


async def test_a_greeting_that_is_too_long_is_not_waited_for(
    line: Line, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    began = trio.current_time()
    await line.caller.stream.send_all(two_part.encode(header=b" " * (MAX_GREETING + 1))[:-1])
    assert await ended(line) == began
    assert "too long" in caplog.text


async def test_a_worker_that_takes_nothing_is_not_told_for_long(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    client, worker = trio.testing.lockstep_stream_pair()
    table, sink = StreamTable(), Collector()
    line = Line(Caller(worker), table, table.add("worker:1/x", MSGPACK, sink), sink)
    nursery.start_soon(line.run, client)
    await line.caller.say(Handshake(line.stream.subject), Accepted(), item(1))
    began = trio.current_time()
    line.stream.stop()
    assert await line.sink.end() is None
    assert await ended(line) - began == pytest.approx(1.0)


async def test_messages_above_the_limit_are_not_kept(line: Line) -> None:
    await line.caller.say(Handshake(line.stream.subject), Accepted(), item("x" * 20_000))
    with trio.fail_after(PATIENCE):
        assert type(await line.sink.end()) is errors.MessageTooLarge


async def test_bytes_one_by_one_make_the_same_answer(line: Line) -> None:
    script: list[UpEvent] = [Handshake(line.stream.subject), Accepted(), item(1), item(2), *ENDING]
    for byte in b"".join(line.caller.end.send(event) for event in script):
        await line.caller.stream.send_all(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
    assert await line.sink.end() is None
    assert line.sink.items == [1, 2]
