"""A worker that speaks OpenAI's Realtime API itself: it transcribes, so to speak, what it is sent.

`python examples/realtime_worker.py serve` serves the model `ear` to any frontend, NVIDIA's too,
that finds it by the same variables (`DYN_DISCOVERY_BACKEND` and so on); a client of that frontend
opens `/v1/realtime` and selects the model. Without an argument the program asks itself, and ends.
"""
# ruff: noqa: E402 - the handlers come before everything that takes time

from __future__ import annotations

from dynamo_trio.process import signals

signals.install()  # the first statement: from here on a signal is kept, and kills nobody

import base64
import binascii
import itertools
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import trio

from dynamo_trio import dynamo_worker, open_runtime
from dynamo_trio.models import make_realtime_card
from dynamo_trio.process import run_process

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dynamo_trio.process import ProcessContext
    from dynamo_trio.request_stream import RequestStream
    from dynamo_trio.runtime import DistributedRuntime

Event = dict[str, Any]
ENDPOINT = "example.ear.talk"
BYTES_PER_SECOND = 24_000 * 2  # PCM16, as the API has it
TRANSCRIPTION = "conversation.item.input_audio_transcription"


class Session:
    """What one client has said, and what it is answered."""

    def __init__(self) -> None:
        self.events = itertools.count(1)
        self.turns = itertools.count(1)
        self.audio = bytearray()

    def event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "event_id": f"event_{next(self.events)}", **fields}

    def error(self, message: str, code: str = "invalid_event") -> Event:
        return self.event(
            "error", error={"type": "invalid_request_error", "code": code, "message": message}
        )

    async def answer(self, event: Event) -> AsyncGenerator[Event, None]:
        match event.get("type"):
            case "session.update":
                yield self.event("session.updated", session=event.get("session"))
            case "input_audio_buffer.append":
                try:
                    self.audio += base64.b64decode(event.get("audio", ""), validate=True)
                except (TypeError, binascii.Error):
                    yield self.error("audio must be base64")
            case "input_audio_buffer.clear":
                self.audio.clear()
                yield self.event("input_audio_buffer.cleared")
            case "input_audio_buffer.commit":
                async with aclosing(self.transcribe(f"item_{next(self.turns)}")) as answer:
                    async for said in answer:
                        yield said
            case kind:
                yield self.error(f"{kind!r} is not supported", "unsupported_event")

    async def transcribe(self, item: str) -> AsyncGenerator[Event, None]:
        """Three words for each second; an engine would know better ones."""
        about = {"item_id": item, "content_index": 0}
        words = ["la"] * (3 * len(self.audio) // BYTES_PER_SECOND)
        self.audio.clear()
        yield self.event("input_audio_buffer.committed", item_id=item, previous_item_id=None)
        for word in words:
            await trio.sleep(0.01)
            yield self.event(f"{TRANSCRIPTION}.delta", delta=word + " ", logprobs=None, **about)
        text, usage = " ".join(words), {"type": "duration", "seconds": len(words) / 3}
        yield self.event(f"{TRANSCRIPTION}.completed", transcript=text, usage=usage, **about)


async def talk(requests: RequestStream) -> AsyncGenerator[Event, None]:
    """The handler: a session, from its first event until its client closes it."""
    session = Session()
    async for event in requests:
        async with aclosing(session.answer(event)) as answer:
            async for said in answer:
                yield said


@dynamo_worker()
async def serve(runtime: DistributedRuntime) -> None:
    """Until SIGTERM. Sessions that another worker can take over then do not hold it up."""
    endpoint = runtime.endpoint(ENDPOINT)
    card = make_realtime_card(
        name="ear", endpoint=endpoint.id, instance_id=endpoint.connection_id()
    )
    async with endpoint.serving_bidirectional(talk, card=card):
        await trio.sleep_forever()


async def ask() -> None:
    """What a frontend does with a session."""
    second = base64.b64encode(bytes(BYTES_PER_SECOND)).decode()
    async with open_runtime() as runtime:
        endpoint = runtime.endpoint(ENDPOINT)
        async with endpoint.serving_bidirectional(talk), endpoint.client() as client:
            await client.wait_for_instances()
            async with client.bidirectional() as stream:
                await stream.send({"type": "session.update", "session": {"type": "transcription"}})
                for _ in range(2):
                    await stream.send({"type": "input_audio_buffer.append", "audio": second})
                await stream.send({"type": "input_audio_buffer.commit"})
                stream.end_input()
                async for event in stream:
                    print(event["type"], event.get("transcript", ""))


async def main(process: ProcessContext) -> None:
    if sys.argv[1:] == ["serve"]:
        await serve(process)
    else:
        await ask()


if __name__ == "__main__":
    run_process(main)
