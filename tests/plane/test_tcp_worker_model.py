"""Any order of what a call does and what its client does: an answer ends once, and rightly.

What must hold: nothing raises; the connection ends; the call is cancelled at most once, and
only if the client left before the end; a client that stayed has seen all that was said, in
order; and nothing is left unsettled.
"""

from __future__ import annotations

from itertools import count

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import DynamoException, EngineShutdown
from dynamo_trio.plane.tcp.call_home import CallHome
from dynamo_trio.plane.tcp.settings import TcpSettings
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.annotated import read_item
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    CompleteFinal,
    Handshake,
    Item,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.control import ReplyTo
from tests.plane.tcp_peer import FakeCall

CALL = ["begin", "put", "put", "big", "finish", "fail", "wake"]
CLIENT = ["stop", "kill", "fin", "nonsense"]
WAIT = ["tick", "tick", "wait"]

REPLY_TO = ReplyTo(HostPort("10.0.0.1", 7000), "subject", "id")
LEFT = {"kill", "fin", "nonsense"}


class Scenario:
    """One answer, played from a list of operations."""

    def __init__(self, operations: list[str], dial_time: float) -> None:
        self.operations, self.dial_time = operations, dial_time
        self.client, self.worker = trio.testing.memory_stream_pair()
        self.settled: list[CallHome] = []
        self.answer = CallHome(REPLY_TO, MSGPACK, self._dial, TcpSettings(), self.settled.append)
        self.call = FakeCall(None, b"", self.answer)  # type: ignore[arg-type]  # it has no head
        self.answer.call = self.call
        self.end = ClientEnd()
        self.numbers = count()
        self.said: list[bytes] = []
        self.heard: list[bytes] = []
        self.begun = False
        self.left = self.stopped = self.finished = self.over = False
        self.events: list[object] = []

    async def _dial(self, _: HostPort) -> trio.abc.Stream:
        await trio.sleep(self.dial_time)
        return self.worker

    async def play(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            nursery.start_soon(self._listen)
            for operation in self.operations:
                await self._do(operation)
            await trio.sleep(self.dial_time + 1)
            self._finish(None)
        self._judge()

    async def _run(self) -> None:
        with trio.fail_after(1000):
            await self.answer.run()
        self.over = True

    async def _listen(self) -> None:
        try:
            while data := await self.client.receive_some():
                self._take(data)
                if Sentinel() in self.events:
                    await self.client.aclose()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    def _take(self, data: bytes | bytearray) -> None:
        self.end.receive_data(data)
        while (event := self.end.next_event()) is not None:
            if isinstance(event, Handshake):
                self.end.accept(MSGPACK)
            self.events.append(event)

    async def _do(self, operation: str) -> None:
        if operation == "tick":
            await trio.testing.wait_all_tasks_blocked()
        elif operation == "wait":
            await trio.sleep(0.5)
        elif operation in CLIENT:
            await self._as_client(operation)
        elif operation in ("finish", "fail"):
            self._finish(EngineShutdown("over") if operation == "fail" else None)
        elif operation == "wake":
            self.answer.wake()
        elif operation == "begin":
            self._begin()
        else:
            self._put(100_000 if operation == "big" else 10)

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.answer.begin()

    def _put(self, size: int) -> None:
        self._begin()
        payload = MSGPACK.encode(f"{next(self.numbers)}" + "x" * size)
        if not self.finished and not self.call.cancels:
            self.said.append(payload)
        self.answer.put(payload)

    def _finish(self, error: DynamoException | None) -> None:
        self.finished = True
        self.begun = True  # a call begins nothing behind its end
        self.answer.finish(error)

    async def _as_client(self, operation: str) -> None:
        if self.left or self.over:
            return
        self.left = operation in LEFT
        self.stopped = self.stopped or operation == "stop"
        try:
            if operation == "fin":
                await self.client.aclose()
            elif operation == "nonsense":
                await self.client.send_all(b"\xff" * 40)
            else:
                wish = Stop() if operation == "stop" else Kill()
                await self.client.send_all(self.end.send(wish))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the worker has closed already

    def _judge(self) -> None:
        assert self.over
        assert self.settled == [self.answer]
        assert self.call.cancels <= (1 if self.left else 0)
        assert self.answer.has_credit
        assert not self.answer._unsent  # nothing is kept for nobody
        if self.left:
            return
        items = [event for event in self.events if isinstance(event, Item)]
        values = []
        for item in items:
            try:
                values.append(read_item(MSGPACK, item.data))
            except EngineShutdown:
                values.append(None)
        assert [value for value in values if value is not None] == self.said
        whole = CompleteFinal() in self.events
        refused = any(isinstance(event, Refused) for event in self.events)
        assert whole or refused or self.stopped
        assert not (whole and refused)


OPERATIONS = st.lists(st.sampled_from(CALL + CLIENT + WAIT), max_size=14)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.sampled_from([0.0, 0.2, 3.0]))
def test_an_answer_ends_once_and_rightly(operations: list[str], dial_time: float) -> None:
    async def main() -> None:
        await Scenario(operations, dial_time).play()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
