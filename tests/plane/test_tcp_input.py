"""The items of a request that streams in over ``tcp``, each side against a peer of the test.

Memory streams and a clock that jumps. What passes between two of ours is in the contract tests.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import (
    Disconnected,
    DynamoException,
    InvalidArgument,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.plane.abc import INITIAL_CREDIT, AcceptedCall
from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.plane.tcp.incoming import IncomingCall
from dynamo_trio.plane.tcp.items_in import PIECE, ItemsIn
from dynamo_trio.plane.tcp.items_out import TELL_TIME, ItemsOut
from dynamo_trio.plane.tcp.server_side import Served, TcpServerSide
from dynamo_trio.plane.tcp.streams import StreamTable, TcpStream
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.ack import ACCEPTED
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import Handshake, Item
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.control import REQUEST, ControlMessage, ReplyTo, encode_payload
from dynamo_trio.wire.dynamo.items_in import Closing, CutOff, ItemReceiver, ItemSender
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.two_part import MAX_MESSAGE
from tests.plane.test_plane_contract import FakeEndpoint, RecordingSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.dynamo.items_in import InEvent

SETTINGS = TcpSettings(rpc_host="127.0.0.1", response_host="lo")
PLACE = ReplyTo(HostPort("client", 1), "items-1", "request-1")
LIMIT = 1_000_000

Clock = trio.testing.MockClock
settled = trio.testing.wait_all_tasks_blocked


def may_send(stream: TcpStream) -> bool:
    return stream.has_credit


# --- the client's side -------------------------------------------------------------------------


@attrs.define(eq=False)
class Client:
    """A stream of a client of ours, and the connection of a worker that the test plays."""

    table: StreamTable
    stream: TcpStream
    items: ItemsOut
    sink: RecordingSink
    worker: trio.abc.Stream
    nursery: trio.Nursery
    wire: ItemReceiver = attrs.field(factory=lambda: ItemReceiver(limit=LIMIT))

    @classmethod
    def make(cls, nursery: trio.Nursery) -> Client:
        items, sink, table = ItemsOut(SETTINGS), RecordingSink(), StreamTable()
        stream = table.add("worker/1f/e", MSGPACK, sink, items=items)
        ours, worker = trio.testing.memory_stream_pair()
        client = cls(table, stream, items, sink, worker, nursery)
        nursery.start_soon(client.serve, ours)
        return client

    async def serve(self, transport: trio.abc.Stream) -> None:
        await IncomingCall(transport, LIMIT).run(self.table, 10.0)
        await trio.aclose_forcefully(transport)

    async def call(self, subject: str | None = None) -> None:
        """The worker calls for items."""
        await self.worker.send_all(self.wire.greet(subject or self.items.subject))

    async def hear(self) -> list[InEvent]:
        """All that the worker hears until the end of the connection."""
        events: list[InEvent] = []
        while not self.wire.closed:
            self.wire.receive_data(await self.worker.receive_some())
            while (event := self.wire.next_event()) is not None:
                events.append(event)
        return events


async def test_items_wait_until_the_worker_calls(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    client.stream.put(b"1")
    await settled()
    await client.call()
    client.stream.put(b"2")
    client.stream.finish_input()
    client.stream.put(b"3")
    assert await client.hear() == [Item(b"1"), Item(b"2"), Closing.COMPLETE]
    assert await client.worker.receive_some() == b""


@pytest.mark.parametrize(
    ("leave", "word"),
    [
        (lambda client: client.stream.stop(), Closing.STOP),
        (lambda client: client.table.remove(client.stream), Closing.KILL),
        (lambda client: client.stream.finish(None), Closing.STOP),
        (lambda client: client.stream.finish(InvalidArgument("x")), Closing.STOP),
        (lambda client: client.stream.give_up(Disconnected("x")), Closing.STOP),
    ],
    ids=["stop", "leave", "answered", "failed", "given up"],
)
async def test_the_closing_word_says_why(
    leave: object, word: Closing, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    await client.call()
    client.stream.put(b"1")
    await settled()
    assert callable(leave)
    leave(client)
    assert await client.hear() == [Item(b"1"), word]
    assert await client.worker.receive_some() == b""


async def test_a_worker_that_calls_late_hears_of_a_stop(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    client.stream.put(b"1")
    client.stream.stop()
    await client.call()
    assert await client.hear() == [Item(b"1"), Closing.STOP]


async def test_nobody_sends_items_to_who_calls_too_late(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    client.table.remove(client.stream)
    await client.call()
    assert await client.hear() == [CutOff()]


async def test_items_go_to_one_caller_only(nursery: trio.Nursery, autojump_clock: Clock) -> None:
    client = Client.make(nursery)
    await client.call()
    await settled()
    ours, second = trio.testing.memory_stream_pair()
    nursery.start_soon(client.serve, ours)
    await second.send_all(ItemReceiver().greet(client.items.subject))
    assert await second.receive_some() == b""
    client.stream.put(b"1")
    client.stream.finish_input()
    assert await client.hear() == [Item(b"1"), Closing.COMPLETE]


async def test_the_subjects_of_answer_and_items_are_not_the_same(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    await client.call(client.stream.subject)
    assert await client.hear() == [CutOff()]
    assert client.sink.ends == []


async def test_a_worker_that_resets_takes_no_more_and_the_answer_goes_on(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    ours, worker = trio.testing.lockstep_stream_pair()
    client = Client.make(nursery)
    nursery.start_soon(client.serve, ours)
    await worker.send_all(client.wire.greet(client.items.subject))
    client.stream.put(b"x" * SETTINGS.high_water)
    assert not may_send(client.stream)
    nursery.start_soon(worker.aclose)
    await client.stream.wait_credit()
    client.stream.put(b"dropped")
    assert may_send(client.stream)
    assert client.sink.ends == []
    assert client.items._unsent == b""


async def test_a_worker_may_close_the_direction_that_it_does_not_use(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    await client.call()
    assert isinstance(client.worker, trio.abc.HalfCloseableStream)
    await client.worker.send_eof()
    await settled()
    client.stream.put(b"1")
    client.stream.finish_input()
    assert await client.hear() == [Item(b"1"), Closing.COMPLETE]


async def test_a_client_that_leaves_does_not_wait_for_a_worker_that_takes_nothing(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    ours, worker = trio.testing.lockstep_stream_pair()
    client = Client.make(nursery)
    async with trio.open_nursery() as serving:
        serving.start_soon(client.serve, ours)
        await worker.send_all(client.wire.greet(client.items.subject))
        client.stream.put(b"1")
        await settled()
        left = trio.current_time()
        client.table.remove(client.stream)
    assert trio.current_time() - left == pytest.approx(TELL_TIME)


async def test_what_waits_is_bounded_by_credit(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    size = 1000
    while may_send(client.stream):
        client.stream.put(b"x" * size)
    assert len(client.items._unsent) <= SETTINGS.high_water + 2 * size
    nursery.start_soon(client.call)
    heard = bytearray()
    async with trio.open_nursery() as waiting:
        waiting.start_soon(client.stream.wait_credit)
        heard += await client.worker.receive_some()
    assert may_send(client.stream)
    assert heard


async def test_an_item_that_no_peer_takes_is_refused_at_once(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    client = Client.make(nursery)
    with pytest.raises(PayloadTooLarge):
        client.stream.put(bytes(MAX_MESSAGE))
    client.stream.put(b"1")
    client.stream.finish_input()
    await client.call()
    assert await client.hear() == [Item(b"1"), Closing.COMPLETE]


# --- the worker's side -------------------------------------------------------------------------


@attrs.define(eq=False)
class Call(AcceptedCall):
    items: list[bytes] = attrs.field(factory=list)
    ends: list[DynamoException | None] = attrs.field(factory=list)
    stopped: int = 0

    def cancel(self) -> None:
        raise AssertionError("nothing here cancels it")

    def stop(self) -> None:
        self.stopped += 1

    def feed(self, payloads: Sequence[bytes]) -> None:
        self.items.extend(payloads)

    def finish_input(self, error: DynamoException | None) -> None:
        self.ends.append(error)


@attrs.define(eq=False)
class Worker:
    """The items of a call of ours, and their client, which the test plays."""

    call: Call
    items: ItemsIn
    client: trio.abc.Stream
    kills: list[None]
    wire: ItemSender = attrs.field(factory=ItemSender)

    @classmethod
    def make(cls) -> Worker:
        ours, client = trio.testing.memory_stream_pair()
        call, kills = Call(), list[None]()

        async def dial(address: HostPort) -> trio.abc.Stream:
            assert address == PLACE.address
            await trio.lowlevel.checkpoint()
            return ours

        items = ItemsIn(
            *(PLACE, call, dial, LIMIT),
            on_kill=lambda: kills.append(None),
            on_settled=lambda: None,
            unreached=Seldom(),
        )
        return cls(call, items, client, kills)

    async def say(self, *events: Item | Closing) -> None:
        await self.client.send_all(b"".join(self.wire.send(event) for event in events))

    async def run(self, *events: Item | Closing, close: bool = False) -> None:
        """To its end, while the client says this."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.items.run)
            if events:
                await self.say(*events)
            if close:
                assert isinstance(self.client, trio.abc.HalfCloseableStream)
                await self.client.send_eof()


async def test_the_worker_greets_and_says_nothing_more(autojump_clock: Clock) -> None:
    worker = Worker.make()
    await worker.run(Item(b"1"), Item(b"2"), Closing.COMPLETE)
    assert (worker.call.items, worker.call.ends) == ([b"1", b"2"], [None])
    end = ClientEnd()
    end.receive_data(await worker.client.receive_some())
    assert end.next_event() == Handshake(PLACE.subject, REQUEST)
    assert await worker.client.receive_some() == b""
    assert worker.items.settled


async def test_stop(autojump_clock: Clock) -> None:
    worker = Worker.make()
    await worker.run(Item(b"1"), Closing.STOP)
    assert (worker.call.items, worker.call.stopped, worker.call.ends) == ([b"1"], 1, [])
    assert worker.kills == []


async def test_kill(autojump_clock: Clock) -> None:
    worker = Worker.make()
    await worker.run(Item(b"1"), Closing.KILL)
    assert (worker.call.items, len(worker.kills), worker.call.ends) == ([b"1"], 1, [])


async def test_items_that_break_off_are_no_end(autojump_clock: Clock) -> None:
    worker = Worker.make()
    await worker.run(Item(b"1"), close=True)
    [end] = worker.call.ends
    assert isinstance(end, Disconnected)
    assert worker.call.items == [b"1"]


async def test_a_client_that_breaks_a_rule(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker.make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.items.run)
        await worker.client.send_all(two_part.encode(header=b'"go"'))
    [end] = worker.call.ends
    assert isinstance(end, RemoteProtocolError)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_client_that_cannot_be_called(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker.make()

    async def refused(_: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError("refused")

    worker.items._dial = refused
    await worker.items.run()
    [end] = worker.call.ends
    assert isinstance(end, Disconnected)
    assert "its items cannot be had at client:1: refused" in caplog.text


async def test_no_more_is_read_than_there_is_credit(autojump_clock: Clock) -> None:
    worker, size = Worker.make(), 10 * PIECE
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.items.run)
        for _ in range(20):
            await worker.say(Item(bytes(size)))
        await settled()
        cost = 1 + size // PIECE
        assert len(worker.call.items) == -(-INITIAL_CREDIT // cost)
        assert worker.items._wire._reader.buffered <= size + 2 * PIECE
        while len(worker.call.items) < 20:
            worker.items.grant(1)
            await settled()
        await worker.say(Closing.COMPLETE)
        await settled()
        assert worker.call.ends == []  # it waits behind them, like everything else
        worker.items.grant(6)
    assert worker.call.ends == [None]


async def test_grants_beyond_what_was_fed_are_nothing(autojump_clock: Clock) -> None:
    worker = Worker.make()
    worker.items.grant(1_000_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.items.run)
        await worker.say(*[Item(b"x")] * (INITIAL_CREDIT + 10))
        await settled()
        assert len(worker.call.items) == INITIAL_CREDIT
        worker.items.close()


@pytest.mark.parametrize("early", [True, False])
async def test_a_call_that_ends_takes_no_more(early: bool, autojump_clock: Clock) -> None:
    worker = Worker.make()
    async with trio.open_nursery() as nursery:
        if not early:
            nursery.start_soon(worker.items.run)
            await worker.say(Item(b"1"))
            await settled()
        worker.items.close()
        if early:
            nursery.start_soon(worker.items.run)
    assert worker.call.ends == []
    assert worker.items.settled


# --- requests that cannot be -------------------------------------------------------------------


async def test_a_request_that_streams_in_has_no_body(nursery: trio.Nursery) -> None:
    """The real worker drops it without a word; ours calls home and says why."""
    side, endpoint = TcpServerSide(SETTINGS, nursery), FakeEndpoint()
    side._served["1f/e"] = Served(endpoint)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    place = attrs.evolve(PLACE, address=HostPort("127.0.0.1", port))
    control = ControlMessage.for_request(place, MSGPACK, place)
    frame = RequestFrame("1f/e", encode_payload(control, MSGPACK.encode("body")))
    assert side.answer(frame) is ACCEPTED
    async with await listener.accept() as connection:
        with trio.fail_after(20):
            heard = bytearray()
            while b"with a body" not in heard:
                heard += await connection.receive_some()
    assert endpoint.calls == []
    await listener.aclose()
    nursery.cancel_scope.cancel()


async def test_a_flood_of_requests_for_clients_that_never_answer_holds_no_connection(
    nursery: trio.Nursery,
) -> None:
    """Each asks for items from a place that accepts and says nothing; then they are cancelled."""
    side, endpoint = TcpServerSide(SETTINGS, nursery), FakeEndpoint()
    side._served["1f/e"] = Served(endpoint)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    place = attrs.evolve(PLACE, address=HostPort("127.0.0.1", listener.socket.getsockname()[1]))
    frame = RequestFrame(
        "1f/e", encode_payload(ControlMessage.for_request(place, MSGPACK, place), b"")
    )
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert side.answer(frame) is ACCEPTED
    accepted = [await listener.accept() for _ in range(40)]
    assert len(endpoint.calls) == 20
    for call in endpoint.calls:
        call.outbox.finish(InvalidArgument("enough"))
    for connection in accepted:
        await trio.aclose_forcefully(connection)
    with trio.fail_after(20):
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 - no event says so
            await trio.sleep(0.01)
    await listener.aclose()
    nursery.cancel_scope.cancel()
