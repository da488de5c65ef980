"""Workers that left discovery: who is doubted, who is asked, and who is given up."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.plane.tcp.incoming import IncomingCall
from dynamo_trio.plane.tcp.pool import RequestPool
from dynamo_trio.plane.tcp.silence import SilenceWatch
from dynamo_trio.plane.tcp.streams import StreamTable, TcpStream
from dynamo_trio.wire.dynamo.ack import unknown_endpoint
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.call_home_states import Accepted, Handshake, Kill
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from tests.plane.fake_worker import ENDING, Caller, Collector, RequestEnd

WORKER = TcpTarget(HostPort("worker", 1), "1f/generate")
OTHER = TcpTarget(HostPort("other", 1), "2f/generate")


@attrs.define(eq=False)
class Worker:
    """Answers questions, unless it is dead (nobody listens) or frozen (nobody answers)."""

    nursery: trio.Nursery
    state: str = "alive"
    #: When it was asked, and for which path.
    asked: list[tuple[float, str]] = attrs.field(factory=list)

    async def dial(self, address: HostPort) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self.state == "dead":
            raise ConnectionRefusedError("nobody there")
        client, worker = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self._serve, RequestEnd(worker))
        return client

    async def _serve(self, end: RequestEnd) -> None:
        while (event := end.server.next_event()) is None:
            end.server.receive_data(await end.stream.receive_some(1024))
        assert isinstance(event, RequestFrame)
        self.asked.append((trio.current_time(), event.path))
        if self.state == "alive":
            await end.acknowledge(unknown_endpoint(event.path))


@attrs.define(eq=False)
class Open:
    """One open stream of a worker."""

    stream: TcpStream
    sink: Collector
    caller: Caller | None

    @property
    def end(self) -> str:
        """The name of what ended it."""
        return type(self.sink.ends[0]).__name__ if self.sink.ends else "open"

    async def speak(self, *values: object) -> None:
        assert self.caller is not None
        await self.caller.items(*values)
        await trio.testing.wait_all_tasks_blocked()


@attrs.define(eq=False)
class Bench:
    nursery: trio.Nursery
    worker: Worker
    watch: SilenceWatch
    table: StreamTable

    async def open(self, target: TcpTarget = WORKER, *, called_home: bool = True) -> Open:
        sink = Collector()
        stream = self.table.add(str(target), MSGPACK, sink)
        sink.stream = stream
        opened = Open(stream, sink, None)
        if called_home:
            client, worker = trio.testing.memory_stream_pair()
            opened.caller = Caller(worker)
            self.nursery.start_soon(IncomingCall(client, 10_000).run, self.table, 10.0)
            await opened.caller.say(Handshake(stream.subject), Accepted())
            await opened.speak("first")
        return opened


@pytest.fixture
async def bench(nursery: trio.Nursery) -> Bench:
    worker, table = Worker(nursery), StreamTable()
    pool = RequestPool(TcpSettings(), worker.dial, nursery)
    return Bench(nursery, worker, SilenceWatch(table, pool, nursery), table)


Clock = trio.testing.MockClock


async def test_a_worker_that_speaks_is_not_asked(bench: Bench, autojump_clock: Clock) -> None:
    opened = await bench.open()
    bench.watch.begin(WORKER)
    for number in range(20):
        await trio.sleep(3)
        await opened.speak(number)
    assert bench.worker.asked == []
    assert opened.end == "open"


async def test_a_silent_worker_that_answers_keeps_its_streams(
    bench: Bench, autojump_clock: Clock
) -> None:
    opened = await bench.open()
    began = trio.current_time()
    bench.watch.begin(WORKER)
    await trio.sleep(1000)
    assert opened.end == "open"
    assert [path for _, path in bench.worker.asked[:2]] == ["1f/dynamo-trio-are-you-there"] * 2
    times = [at - began for at, _ in bench.worker.asked[:3]]
    assert times == pytest.approx([5, 10, 15])
    await opened.speak("still here")
    assert opened.caller is not None
    await opened.caller.say(*ENDING)
    assert await opened.sink.end() is None
    assert opened.sink.items == ["first", "still here"]


@pytest.mark.parametrize(("state", "after"), [("frozen", 10.0), ("dead", 5.0)])
async def test_a_silent_worker_that_does_not_answer_is_given_up(
    bench: Bench, autojump_clock: Clock, state: str, after: float, caplog: pytest.LogCaptureFixture
) -> None:
    opened, elsewhere = await bench.open(), await bench.open(OTHER)
    bench.worker.state = state
    bench.watch.begin(WORKER)
    await trio.sleep(after - 0.1)
    assert opened.end == "open"
    await trio.sleep(0.2)
    assert opened.end == "Disconnected"
    assert elsewhere.end == "open"
    assert opened.caller is not None
    assert await opened.caller.next_wish() == Kill()
    assert "is silent" in caplog.text
    await trio.sleep(1000)
    assert elsewhere.end == "open"
    assert len(bench.worker.asked) <= 1  # nobody is left to ask for


async def test_only_the_silent_streams_of_a_frozen_worker_are_given_up(
    bench: Bench, autojump_clock: Clock
) -> None:
    silent, speaking = await bench.open(), await bench.open()
    bench.worker.state = "frozen"
    bench.watch.begin(WORKER)
    await trio.sleep(7)
    await speaking.speak("I live")
    await trio.sleep(4)
    assert silent.end == "Disconnected"
    assert speaking.end == "open"


async def test_a_word_while_the_question_is_open_saves_the_stream(
    bench: Bench, autojump_clock: Clock
) -> None:
    opened = await bench.open()
    bench.worker.state = "frozen"
    bench.watch.begin(WORKER)
    await trio.sleep(9)
    await opened.speak("thawed")
    bench.worker.state = "alive"
    await trio.sleep(100)
    assert opened.end == "open"


async def test_a_stream_that_waits_for_its_own_client_is_not_doubted(
    bench: Bench, autojump_clock: Clock
) -> None:
    opened = await bench.open()
    opened.sink.grants = False
    await opened.speak(*range(100))
    bench.worker.state = "dead"
    bench.watch.begin(WORKER)
    await trio.sleep(100)
    assert opened.end == "open"
    opened.stream.grant(1000)
    await trio.sleep(11)
    assert opened.end == "Disconnected"
    assert len(opened.sink.items) == 101


async def test_a_request_whose_worker_has_not_called_home_is_treated_alike(
    bench: Bench, autojump_clock: Clock
) -> None:
    waiting = await bench.open(called_home=False)
    bench.worker.state = "dead"
    bench.watch.begin(WORKER)
    await trio.sleep(4.9)
    assert waiting.end == "open"
    await trio.sleep(0.2)
    assert waiting.end == "Disconnected"


async def test_a_request_that_is_never_called_home_for_is_given_up_in_the_end(
    bench: Bench, autojump_clock: Clock
) -> None:
    waiting, streaming = await bench.open(called_home=False), await bench.open()
    bench.watch.begin(WORKER)
    await trio.sleep(29)
    assert waiting.end == "open"
    await trio.sleep(2)
    assert waiting.end == "Disconnected"
    await trio.sleep(100)
    assert streaming.end == "open"


async def test_an_instance_without_streams_is_not_watched(
    bench: Bench, autojump_clock: Clock
) -> None:
    bench.watch.begin(WORKER)
    opened = await bench.open()
    await trio.sleep(100)
    assert bench.worker.asked == []
    bench.watch.begin(WORKER)
    bench.watch.begin(WORKER)  # twice is once
    await trio.sleep(7)
    assert len(bench.worker.asked) == 1
    bench.table.remove(opened.stream)
    await trio.sleep(100)
    assert len(bench.worker.asked) == 1


async def test_a_process_that_was_itself_frozen_does_not_judge(
    bench: Bench, autojump_clock: Clock
) -> None:
    opened = await bench.open()
    bench.worker.state = "frozen"
    bench.watch.begin(WORKER)
    await trio.sleep(6)
    assert len(bench.worker.asked) == 1
    autojump_clock.jump(60)
    await trio.sleep(1)
    assert opened.end == "open"
    bench.worker.state = "alive"
    await trio.sleep(100)
    assert opened.end == "open"
