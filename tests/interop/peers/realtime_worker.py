"""A worker on NVIDIA's own Python runtime for ``/v1/realtime``. Run by its interpreter.

    realtime_worker.py FOLDER NAME NAMESPACE

It echoes audio as if it were a transcript, and does what some audio says.
"""

import asyncio  # noqa: TID251 - the runtime of this program wants it
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

FOLDER, NAME, NAMESPACE = sys.argv[1:]
TRANSCRIPTION = "conversation.item.input_audio_transcription"


def say(text: str) -> None:
    print(f"realtime_worker: {text}", flush=True)


async def talk(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    text = ""
    async for event in requests:
        say(f"heard {event['type']}")
        match event["type"], event.get("audio"):
            case "session.update", _:
                yield {"type": "session.updated", "session": event["session"], "pid": os.getpid()}
            case _, "RAISE000":
                raise RuntimeError("as it was told to")
            case _, "END0":
                return
            case "input_audio_buffer.append", audio:
                text += audio
            case "input_audio_buffer.commit", _:
                yield {"type": f"{TRANSCRIPTION}.completed", "transcript": text}
            case _:
                yield {"type": "echo", "event": event}
    say(f"the input has ended, stopped={context.is_stopped()} killed={context.is_killed()}")


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint(f"{NAMESPACE}.backend.generate")
    await register_model(
        ModelInput.Text,
        ModelType.Realtime,
        endpoint,
        FOLDER,
        NAME,
        worker_type=WorkerType.Aggregated,
        needs=[],
    )
    say("ready")
    await asyncio.gather(endpoint.serve_bidirectional_endpoint(talk))


if __name__ == "__main__":
    uvloop.run(main())
