"""Many slow clients, one link reader, soft cuts, farewells, keep-alive: every byte is its own's.

One task (the link reader) feeds the responses of all clients with non-blocking writes past
hypercorn, into socket buffers that are far too small, while streams end, are cut, or both in
the same instant. Each line of a body carries the number of its stream and a counter, so a
client can tell a byte that is missing, doubled, or another response's.

Three mutants, each of which leaves one of the rules out, must not survive the scenario.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import h11
import pytest
import trio

from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, stream_response
from dynamo_trio.http.sinks import BodySink, RawSink, SinkOutcome
from dynamo_trio.lifecycle.admission import Admission, CutReason, Gate
from tests.http.harness import Http1Client, Running, running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.http.asgi import Receive, Scope, Send

CLIENTS, RESPONSES = 20, 15
ENOUGH = 5  # violations; a mutant is not watched any longer
LIMITS = HttpLimits(farewell_time=5.0)  # so that a busy machine does not abort what is only slow
SMALL_BUFFER = 4608


class Owner(Protocol):
    """The shape of ``stream_response``."""

    async def __call__(
        self,
        sink: BodySink,
        admission: Admission,
        work: Callable[[], Awaitable[object]],
        *,
        farewell: Callable[[], bytes | None],
        detach: Callable[[], object],
    ) -> SinkOutcome | None: ...


@attrs.define(eq=False)
class Stream:
    """One stream on the link, and what is going to happen to it."""

    number: int
    sink: BodySink
    admission: Admission
    lines: int
    padding: int
    cut_at: float  # the line before which it is cut; infinite: never
    race: int  # how the end and a cut meet: 0 not, 1 end first, 2 cut first
    sent: int = 0

    def step(self) -> None:
        """What the link brings for this stream in one read."""
        if self.sent >= self.cut_at:
            self.admission.cut(CutReason.DRAIN_LIMIT)
        if self.sent < self.lines:
            self.sink.feed(b"%d:%d:%s\n" % (self.number, self.sent, b"x" * self.padding))
        elif self.sent == self.lines:
            self.finish()
        else:  # a source that has not heard yet that nobody listens any more
            self.sink.feed(b"%d:%d:late\n" % (self.number, self.sent))
        self.sent += 1

    def finish(self) -> None:
        if self.race == 2:
            self.admission.cut(CutReason.DRAIN_LIMIT)
        self.sink.feed(b"%d:END\n" % self.number)
        self.sink.finish(SinkOutcome.STOP)
        if self.race == 1:
            self.admission.cut(CutReason.DRAIN_LIMIT)


@attrs.frozen
class Seen:
    """What a client got of one response."""

    body: bytes
    whole: bool


@attrs.define(eq=False)
class Scenario:
    seed: int
    owner: Owner = stream_response
    sink_type: type[RawSink] = RawSink
    gate: Gate = attrs.field(factory=lambda: Gate("http"))
    link: dict[int, Stream] = attrs.field(factory=dict)
    numbers: itertools.count[int] = attrs.field(factory=itertools.count)
    ends: dict[int, tuple[SinkOutcome | None, bool]] = attrs.field(factory=dict)
    seen: dict[int, Seen] = attrs.field(factory=dict)
    violations: list[str] = attrs.field(factory=list)
    limit: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(deadline=math.inf))
    partial_sends: int = 0
    reused: int = 0
    connections: int = 0

    # --- the server ---------------------------------------------------------------

    async def read_link(self) -> None:
        while True:
            await trio.sleep(0.0005)
            for stream in list(self.link.values()):
                stream.step()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        number = next(self.numbers)
        exchange = exchange_of(scope)
        assert exchange is not None
        raw = exchange.raw_socket()
        if raw is None:
            return  # a client of a mutant's server that has given up
        sink = self.sink_type(send, LIMITS, exchange, socket=raw)
        with self.gate.admit(str(number)) as admission:
            outcome = await self.owner(
                sink,
                admission,
                partial(self.work, number, sink, admission),
                farewell=lambda: b"%d:FAREWELL\n" % number,
                detach=lambda: self.link.pop(number, None),
            )
        self.partial_sends += sink.partial
        self.ends[number] = (outcome, sink.complete)

    async def work(self, number: int, sink: BodySink, admission: Admission) -> None:
        self.link[number] = self.plan(number, sink, admission)
        await sink.start(200, [(b"x-stream", b"%d" % number)])
        await sink.serve()

    def plan(self, number: int, sink: BodySink, admission: Admission) -> Stream:
        dice = random.Random(self.seed * 1000 + number)
        lines = dice.randint(2, 25)
        cut_at = dice.uniform(0, lines) if dice.random() < 0.6 else math.inf
        race = dice.choice((0, 1, 2))
        return Stream(number, sink, admission, lines, dice.randint(10, 3000), cut_at, race)

    # --- the clients --------------------------------------------------------------

    async def client(self, server: Running, name: int) -> None:
        dice = random.Random(self.seed * 77 + name)
        left = RESPONSES
        while left:
            self.connections += 1
            async with await server.connect(receive_buffer=SMALL_BUFFER) as stream:
                left -= await self.session(Http1Client(SlowStream(stream, dice)), left)

    async def session(self, client: Http1Client, most: int) -> int:
        """Ask again and again on one connection; returns how many responses it gave."""
        for count in range(most):
            try:
                await client.send("POST", "/", b"x" * 100)
                whole = await self.read_response(client)
            except (h11.ProtocolError, trio.BrokenResourceError) as exc:
                self.complain(f"between two responses: {exc!r}")
                return count + 1
            self.reused += count > 0 and whole
            if not whole:
                return count + 1
        return most

    async def read_response(self, client: Http1Client) -> bool:
        head = await client.next_event()
        assert isinstance(head, h11.Response), head
        number = int(dict(head.headers)[b"x-stream"])
        body, whole = b"", False
        try:
            while isinstance(event := await client.next_event(), h11.Data):
                body += event.data
            whole = isinstance(event, h11.EndOfMessage)
        except (h11.ProtocolError, trio.BrokenResourceError) as exc:
            if "peer" not in str(exc) and not isinstance(exc, trio.BrokenResourceError):
                self.complain(f"stream {number}: {exc!r}")
        self.seen[number] = Seen(body, whole)
        return whole

    # --- the judge ----------------------------------------------------------------

    def complain(self, violation: str) -> None:
        self.violations.append(violation)
        if len(self.violations) >= ENOUGH:
            self.limit.cancel()

    def judge(self) -> None:
        for number, seen in self.seen.items():
            outcome, complete = self.ends.get(number, (None, False))
            for complaint in complaints(number, seen, outcome, complete):
                self.violations.append(f"stream {number} ({outcome}): {complaint}")

    async def run(self) -> None:
        self.limit.deadline = trio.current_time() + 60
        with self.limit:
            async with running(self.app, LIMITS, send_buffer=SMALL_BUFFER) as server:
                server.nursery.start_soon(self.read_link)
                async with trio.open_nursery() as nursery:
                    for name in range(CLIENTS):
                        nursery.start_soon(self.client, server, name)
                await server.wait_until(lambda: self.gate.count == 0)
        if self.limit.cancelled_caught:
            self.violations.append("not all clients were served")
        self.judge()


def complaints(number: int, seen: Seen, outcome: SinkOutcome | None, complete: bool) -> list[str]:
    """What is wrong with a response, given how the server says that it ended."""
    lines = seen.body.split(b"\n")
    last = lines.pop()
    ends = [line for line in lines if b":END" in line or b":FAREWELL" in line]
    expected: dict[SinkOutcome | None, bytes] = {
        SinkOutcome.STOP: b"%d:END" % number,
        SinkOutcome.CUT: b"%d:FAREWELL" % number,
    }
    found = []
    for counter, line in enumerate(line for line in lines if line not in ends):
        if not line.startswith(b"%d:%d:" % (number, counter)):
            found.append(f"line {counter} is {line[:20]!r}")
            break
    if seen.whole != complete:
        found.append(f"whole for the client: {seen.whole}, for the server: {complete}")
    if seen.whole and (last or not ends or lines[-1:] != ends or ends != [expected.get(outcome)]):
        found.append(f"it ends in {ends!r} and {last[:20]!r}")
    return found


@attrs.define(eq=False)
class SlowStream(trio.abc.HalfCloseableStream):
    """A client that reads little at a time, and not at once."""

    _stream: trio.SocketStream
    _dice: random.Random

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep(self._dice.choice((0, 0, 0, 0.001, 0.004)))
        return await self._stream.receive_some(self._dice.randint(200, 4000))

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 30))]
)
async def test_every_response_gets_exactly_its_own_bytes(seed: int) -> None:
    scenario = Scenario(seed)
    await scenario.run()
    assert scenario.violations == []
    outcomes = [outcome for outcome, _ in scenario.ends.values()]
    assert len(scenario.seen) == CLIENTS * RESPONSES == len(outcomes)
    # The scenario has reached what it is for.
    assert outcomes.count(SinkOutcome.CUT) >= 100
    assert outcomes.count(SinkOutcome.STOP) >= 100
    assert scenario.partial_sends >= 200
    assert scenario.connections < CLIENTS * 2  # so nearly all answers came on a kept connection


# --- the mutants --------------------------------------------------------------------


class NeverClosedSink(RawSink):
    """Mutant 1, with an owner that does not detach: what comes late is still written."""

    def feed(self, data: bytes) -> None:
        self._put(data)


async def never_detached(
    sink: BodySink,
    admission: Admission,
    work: Callable[[], Awaitable[object]],
    *,
    farewell: Callable[[], bytes | None],
    detach: Callable[[], object],
) -> SinkOutcome | None:
    return await stream_response(sink, admission, work, farewell=farewell)


class FarewellAnyway(RawSink):
    """Helps mutant 2: says the farewell whatever the outcome is."""

    def say(self, farewell: bytes) -> None:
        self._put(farewell)


async def decided_by_cancelled_caught(
    sink: BodySink,
    admission: Admission,
    work: Callable[[], Awaitable[object]],
    *,
    farewell: Callable[[], bytes | None],
    detach: Callable[[], object],
) -> SinkOutcome | None:
    """Mutant 2: the cancel scope, not the outcome, says how the response ended."""
    with admission.scope:
        await work()
    detach()
    assert isinstance(sink, FarewellAnyway)
    if admission.scope.cancelled_caught:
        sink.say(farewell() or b"")
        sink.finish(SinkOutcome.CUT)
    return await sink.end()


class HastySink(RawSink):
    """Mutant 3: lets hypercorn write the terminator while bytes are still in the buffer."""

    async def end(self, farewell: bytes | None = None) -> SinkOutcome:
        self._say_farewell(farewell)
        left, self._unsent = self._unsent, bytearray()
        await self._terminate()
        self._unsent = left
        self._write_unsent()
        assert self.outcome is not None
        return self.outcome


@pytest.mark.parametrize(
    ("owner", "sink_type"),
    [
        pytest.param(never_detached, NeverClosedSink, id="not detached, not closed"),
        pytest.param(decided_by_cancelled_caught, FarewellAnyway, id="cancelled_caught decides"),
        pytest.param(stream_response, HastySink, id="terminator before the buffer is empty"),
    ],
)
async def test_the_scenario_catches_the_mutant(owner: Owner, sink_type: type[RawSink]) -> None:
    scenario = Scenario(5, owner, sink_type)
    await scenario.run()
    assert len(scenario.violations) >= 3
