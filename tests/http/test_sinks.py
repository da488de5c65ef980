"""The two sinks and the response owner, by themselves: virtual time, a send that the test holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import stream_response
from dynamo_trio.http.sinks import QueueSink, RawSink, SinkOutcome, Wake
from dynamo_trio.lifecycle.admission import Admission, CutReason
from tests.http.routes import farewell_to

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Message
    from dynamo_trio.http.sinks import BodySink

LIMITS = HttpLimits(
    write_time=30, farewell_time=1, high_water=1000, low_water=100, max_unsent=10_000
)


@attrs.define(eq=False)
class Client:
    """Takes ASGI messages; while ``blocked`` a send waits, as for a client that reads nothing."""

    messages: list[Message] = attrs.field(factory=list)
    blocked: bool = False
    gone: bool = False
    in_time: trio.Event = attrs.field(factory=trio.Event)

    async def send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        if self.gone:
            raise OSError("the client left")
        if self.blocked:
            await trio.sleep_forever()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def ended(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


def new_admission() -> Admission:
    return Admission("test", trio.current_time())


async def own(sink: BodySink, admission: Admission, outcomes: list[SinkOutcome | None]) -> None:
    async def work() -> None:
        await sink.start(200, [])
        await sink.serve()

    farewell = partial(farewell_to, admission)
    outcomes.append(await stream_response(sink, admission, work, farewell=farewell))


@attrs.define(eq=False)
class Owned:
    """A response with its owner in a task of the test."""

    client: Client
    sink: BodySink
    admission: Admission
    outcomes: list[SinkOutcome | None] = attrs.field(factory=list)


def owned(nursery: trio.Nursery, client: Client | None = None) -> Owned:
    client = client or Client()
    response = Owned(client, QueueSink(client.send, LIMITS), new_admission())
    nursery.start_soon(own, response.sink, response.admission, response.outcomes)
    return response


async def test_wake_never_loses_a_set(autojump_clock: MockClock) -> None:
    wake = Wake()
    wake.set()
    wake.set()
    await wake.wait()
    with trio.move_on_after(1) as waited:
        await wake.wait()
    assert waited.cancelled_caught
    wake.set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await wake.wait()
    await wake.wait()  # the cancelled wait has not used it up


async def test_what_is_fed_is_sent_and_the_end_is_sent_once(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        response.sink.feed(b"before the head ")
        await trio.testing.wait_all_tasks_blocked()
        response.sink.feed(b"")
        response.sink.feed(b"after it")
        assert response.sink.finish(SinkOutcome.STOP)
        assert not response.sink.finish(SinkOutcome.ERROR)
        response.sink.feed(b"late")
    assert response.client.body == b"before the head after it"
    assert response.client.ended
    assert response.outcomes == [SinkOutcome.STOP]
    assert response.sink.late == 1
    assert response.sink.complete


async def test_an_error_that_was_said_ends_the_body_properly(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        response.sink.feed(b"error event")
        response.sink.finish(SinkOutcome.ERROR)
    assert response.client.ended
    assert response.outcomes == [SinkOutcome.ERROR]


async def test_a_cut_says_farewell(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        response.sink.feed(b"text ")
        await trio.testing.wait_all_tasks_blocked()
        response.admission.cut(CutReason.DRAIN_LIMIT)
    assert response.client.body == b"text bye"
    assert response.client.ended
    assert response.outcomes == [SinkOutcome.CUT]


@pytest.mark.parametrize("cut_first", [True, False])
async def test_an_end_in_the_tick_of_a_cut_is_the_end(
    cut_first: bool, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        await trio.testing.wait_all_tasks_blocked()
        steps = [
            partial(response.admission.cut, CutReason.DRAIN_LIMIT),
            partial(response.sink.finish, SinkOutcome.STOP),
        ]
        for step in steps if cut_first else reversed(steps):
            step()
    assert response.outcomes == [SinkOutcome.STOP]
    assert response.client.body == b""
    assert response.client.ended


async def test_a_client_that_left_hears_no_farewell(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        response.sink.feed(b"text")
        await trio.testing.wait_all_tasks_blocked()
        response.admission.cut(CutReason.CLIENT_LEFT)
    assert response.client.body == b"text"
    assert not response.client.ended
    assert response.outcomes == [SinkOutcome.GONE]


async def test_a_send_that_raises_means_that_the_client_left(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        await trio.testing.wait_all_tasks_blocked()
        response.client.gone = True
        response.sink.feed(b"text")
    assert response.outcomes == [SinkOutcome.GONE]
    assert not response.sink.pending


async def test_a_cut_ends_a_send_that_is_stuck_within_the_time_of_a_farewell(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        await trio.testing.wait_all_tasks_blocked()
        response.client.blocked = True
        response.sink.feed(b"text")
        await trio.sleep(10)
        response.admission.cut(CutReason.DRAIN_LIMIT)
    assert trio.current_time() == 11
    assert response.outcomes == [SinkOutcome.GONE]
    assert not response.client.ended


async def test_a_cut_while_the_rest_is_flushed_ends_the_flush(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        await trio.testing.wait_all_tasks_blocked()
        response.client.blocked = True
        response.sink.feed(b"text")
        response.sink.finish(SinkOutcome.STOP)
        await trio.sleep(10)
        response.admission.cut(CutReason.DRAIN_LIMIT)
    assert trio.current_time() == 11
    assert response.outcomes == [SinkOutcome.STOP]
    assert not response.sink.complete
    assert not response.client.ended


async def test_a_client_that_takes_nothing_is_given_up(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery, Client(blocked=True))
        await trio.sleep(1)
        response.sink.feed(b"text")
    assert trio.current_time() == LIMITS.write_time
    assert response.outcomes == [SinkOutcome.GONE]


async def test_the_source_is_told_to_pause_and_to_go_on(autojump_clock: MockClock) -> None:
    calls: list[float] = []
    client = Client()
    sink = QueueSink(client.send, LIMITS)
    sink.on_low_water = lambda: calls.append(trio.current_time())
    writable: list[bool] = []
    await sink.start(200, [])
    for size in (999, 1, 1):
        sink.feed(b"x" * size)
        writable.append(sink.writable)
    assert calls == []
    for _ in range(2):
        await sink.drain()
        assert calls == [0]
        writable.append(sink.writable)
        sink.feed(b"x" * 10)
    assert writable == [True, False, False, True, True]


async def test_a_source_that_does_not_pause_is_cut_off(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        response = owned(nursery)
        await trio.testing.wait_all_tasks_blocked()
        response.client.blocked = True
        for _ in range(20):
            response.sink.feed(b"x" * 1000)
    assert trio.current_time() <= LIMITS.write_time
    assert response.outcomes == [SinkOutcome.OVERFLOW]
    assert not response.client.ended
    assert response.sink.late == 9


async def test_a_response_whose_head_never_left_is_left_to_the_caller(
    autojump_clock: MockClock,
) -> None:
    client, admission = Client(), new_admission()
    sink = QueueSink(client.send, LIMITS)
    detached: list[bool] = []
    trio.lowlevel.spawn_system_task(cut_later, admission)
    outcome = await stream_response(
        sink,
        admission,
        trio.sleep_forever,
        farewell=lambda: b"bye",
        detach=lambda: detached.append(True),
    )
    assert outcome is None
    assert detached
    assert client.messages == []


async def cut_later(admission: Admission) -> None:
    await trio.sleep(1)
    admission.cut(CutReason.DRAIN_LIMIT)


async def test_an_error_of_the_work_passes_and_detaches(autojump_clock: MockClock) -> None:
    detached: list[bool] = []
    sink = QueueSink(Client().send, LIMITS)

    async def work() -> None:
        raise RuntimeError("no worker")

    with pytest.raises(RuntimeError, match="no worker"):
        await stream_response(
            sink,
            new_admission(),
            work,
            farewell=lambda: b"bye",
            detach=lambda: detached.append(True),
        )
    assert detached
    sink.feed(b"late")
    assert sink.late == 1


async def test_detaching_follows_the_soft_scope_without_a_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """Whoever ran in between would still find the sink in the link's table."""
    admission, order = new_admission(), list[str]()
    sink = QueueSink(Client().send, LIMITS)

    async def work() -> None:
        await sink.start(200, [])
        try:
            await sink.serve()
        finally:
            order.append("left")

    async def run_all_the_time() -> None:
        while "detached" not in order:
            order.append("other")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_all_the_time)
        nursery.start_soon(cut_now, admission)
        detach = partial(order.append, "detached")
        await stream_response(sink, admission, work, farewell=lambda: b"bye", detach=detach)
    assert order[order.index("left") + 1] == "detached"


async def cut_now(admission: Admission) -> None:
    for _ in range(10):
        await trio.lowlevel.checkpoint()
    admission.cut(CutReason.DRAIN_LIMIT)


# --- the raw sink on a real socket ----------------------------------------------------------


def raw_pair() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    ours, theirs = trio.socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4608)
    return ours, theirs


async def test_the_raw_sink_writes_nothing_before_its_head_has_left() -> None:
    ours, theirs = raw_pair()
    with ours, theirs:
        client = Client()
        sink = RawSink(client.send, LIMITS, socket=ours)
        sink.feed(b"early")
        with trio.move_on_after(0.01) as nothing:
            await theirs.recv(100)
        assert nothing.cancelled_caught
        await sink.start(200, [])
        assert await theirs.recv(100) == b"5\r\nearly\r\n"
        sink.feed(b"x" * 17)
        assert await theirs.recv(100) == b"11\r\n" + b"x" * 17 + b"\r\n"
        assert not sink.pending


async def test_an_empty_piece_does_not_end_the_body() -> None:
    """A chunk of no bytes is the last one (RFC 9112, 7.1)."""
    ours, theirs = raw_pair()
    with ours, theirs:
        sink = RawSink(Client().send, LIMITS, socket=ours)
        await sink.start(200, [])
        sink.feed(b"")
        assert sink.offer(b"", b"", b"") is None
        sink.feed(b"x")
        assert await theirs.recv(100) == b"1\r\nx\r\n"


async def test_the_raw_sink_keeps_what_the_socket_does_not_take() -> None:
    ours, theirs = raw_pair()
    with ours, theirs:
        client = Client()
        sink = RawSink(client.send, attrs.evolve(LIMITS, max_unsent=10**6), socket=ours)
        await sink.start(200, [])
        sink.feed(b"x" * 100_000)
        sink.feed(b"y")
        assert sink.pending
        assert sink.partial == 1
        assert not sink.writable
        sink.finish(SinkOutcome.STOP)
        got = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.end)
            while not got.endswith(b"1\r\ny\r\n"):
                assert not client.ended  # the terminator waits for the last byte
                got += await theirs.recv(1000)
        assert got == b"186a0\r\n" + b"x" * 100_000 + b"\r\n1\r\ny\r\n"
        assert client.ended


@pytest.mark.parametrize("how", ["closed here", "closed there"])
async def test_a_raw_write_to_nobody_means_that_the_client_left(how: str) -> None:
    ours, theirs = raw_pair()
    with ours, theirs:
        sink = RawSink(Client().send, LIMITS, socket=ours)
        await sink.start(200, [])
        (ours if how == "closed here" else theirs).close()
        sink.feed(b"x")
        sink.feed(b"x")
        assert sink.outcome is SinkOutcome.GONE
        await sink.attention.wait()
        assert sink.late == 1


async def test_a_raw_drain_ends_when_the_socket_is_closed_under_it() -> None:
    ours, theirs = raw_pair()
    with ours, theirs:
        sink = RawSink(Client().send, attrs.evolve(LIMITS, max_unsent=10**6), socket=ours)
        await sink.start(200, [])
        sink.feed(b"x" * 100_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.drain)
            await trio.testing.wait_all_tasks_blocked()
            ours.close()
        assert sink.outcome is SinkOutcome.GONE


@pytest.mark.parametrize(
    ("status", "headers"), [(503, []), (200, [(b"Content-Length", b"5")])], ids=["503", "length"]
)
async def test_the_raw_sink_refuses_what_has_no_chunks(
    status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    ours, theirs = raw_pair()
    with ours, theirs:
        sink = RawSink(Client().send, LIMITS, socket=ours)
        with pytest.raises(ValueError, match="raw response"):
            await sink.start(status, headers)
