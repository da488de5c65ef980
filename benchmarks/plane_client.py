"""A client process that does nothing but ask: it opens streams and counts what comes.

One command a line on standard input, one answer a line on standard output, in JSON:

``{"do": "run", "streams": 32, "tokens": 128}``
    Opens the streams together and waits until all have ended.
``{"do": "hold", "streams": 1000, "tokens": 128}``
    Opens them and answers when each has its first token; they stay open until "release".
``{"do": "release"}``
    Leaves them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio import Client, DistributedRuntime, RequestHead, dynamo_worker
from dynamo_trio.wire.llm import PreprocessedRequest, StopConditions, output_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane import ClientStream
    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.llm import LLMEngineOutput

#: Tokens of a prompt.
PROMPT = list(range(2, 34))
ENDPOINT = "dynamo.backend.generate"


@attrs.define(eq=False)
class CountingSink:
    """Counts tokens and gives their credit back at once, as a frontend does."""

    tokens: int = 0
    error: DynamoException | None = None
    begun: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    stream: ClientStream | None = None
    _owed: int = 0
    _read: Callable[[bytes], LLMEngineOutput] | None = None

    def expect(self, codec: Codec) -> None:
        self._read = output_reader(codec)

    def attach(self, stream: ClientStream) -> None:
        self.stream = stream
        self._took(0)

    def feed(self, payloads: Sequence[bytes]) -> None:
        assert self._read is not None
        for payload in payloads:
            self.tokens += len(self._read(payload).token_ids)
        self._took(len(payloads))

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        self.tokens += len(token_ids)
        self._took(len(token_ids))

    def finish(self, error: DynamoException | None) -> None:
        self.error = error
        self.ended.set()

    def _took(self, items: int) -> None:
        self._owed += items
        if items:
            self.begun.set()
        if self.stream is not None and self._owed:
            owed, self._owed = self._owed, 0
            self.stream.grant(owed)


@attrs.define(eq=False)
class Asker:
    """Streams of one client, and those that are held open."""

    client: Client
    nursery: trio.Nursery
    count: int = 0
    held: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, streams: int, tokens: int) -> dict[str, int]:
        sinks = [CountingSink() for _ in range(streams)]
        async with trio.open_nursery() as nursery:
            for sink in sinks:
                nursery.start_soon(self._stream, sink, tokens)
        return {"tokens": sum(sink.tokens for sink in sinks), "failed": _failed(sinks)}

    async def hold(self, streams: int, tokens: int) -> dict[str, int]:
        sinks = [CountingSink() for _ in range(streams)]
        self.held = await self.nursery.start(self._hold, sinks, tokens)
        for sink in sinks:
            await sink.begun.wait()
        return {"open": streams, "failed": _failed(sinks)}

    async def release(self) -> dict[str, int]:
        self.held.cancel()
        await trio.sleep(0.5)
        return {}

    async def _hold(
        self,
        sinks: Sequence[CountingSink],
        tokens: int,
        *,
        task_status: trio.TaskStatus[trio.CancelScope],
    ) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery.cancel_scope)
            for sink in sinks:
                nursery.start_soon(self._stream, sink, tokens)

    async def _stream(self, sink: CountingSink, tokens: int) -> None:
        self.count += 1
        request = PreprocessedRequest(
            token_ids=PROMPT,
            stop_conditions=StopConditions(max_tokens=tokens, ignore_eos=True),
        )
        head = RequestHead(f"bench-{self.count}")
        async with self.client.open_stream(self.client.pick(), head, request, sink) as stream:
            sink.attach(stream)
            await sink.ended.wait()


def _failed(sinks: Sequence[CountingSink]) -> int:
    return sum(sink.error is not None for sink in sinks)


async def serve(asker: Asker) -> None:
    """Carry out commands until there are no more."""
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        command: dict[str, Any] = json.loads(line)
        answer = await getattr(asker, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    async with runtime.endpoint(ENDPOINT).client() as client:
        await client.wait_for_instances()
        print(json.dumps({"ready": True}), flush=True)
        async with trio.open_nursery() as nursery:
            await serve(Asker(client, nursery))
    runtime.shutdown()


if __name__ == "__main__":
    trio.run(main)
