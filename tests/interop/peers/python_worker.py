"""A worker on NVIDIA's own Python runtime. Run by the interpreter that has it.

    python_worker.py MODEL_FOLDER MODEL_NAME NAMESPACE

``NAMESPACE.backend.generate`` serves the model: its answer to any prompt is the alphabet.
``NAMESPACE.backend.act`` does what its request says.
"""

import asyncio  # noqa: TID251 - the runtime of this program wants it
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

Json = dict[str, Any]
FOLDER, NAME, NAMESPACE = sys.argv[1:]
VOCABULARY = json.loads((Path(FOLDER) / "tokenizer.json").read_text())["model"]["vocab"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def say(text: str) -> None:
    print(f"python_worker: {text}", flush=True)


async def generate(request: Json, context: Context) -> AsyncIterator[Json]:
    count = request["stop_conditions"]["max_tokens"]
    for number in range(count):
        if context.is_stopped():
            say("stopped")
            return
        yield {"token_ids": [VOCABULARY[LETTERS[number % len(LETTERS)]]]}
        await asyncio.sleep(0.01)
    yield {"token_ids": [], "finish_reason": "length"}


async def act(request: Json, context: Context) -> AsyncIterator[Json]:
    for number in range(request.get("items", 0)):
        yield {"number": number, "echo": request.get("echo")}
    match request.get("then"):
        case "raise":
            raise RuntimeError("as it was told to")
        case "hand over":
            raise GeneratorExit
        case "wait":
            await context.async_killed_or_stopped()
            say("stopped")


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    served = runtime.endpoint(f"{NAMESPACE}.backend.generate")
    acting = runtime.endpoint(f"{NAMESPACE}.backend.act")
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        served,
        FOLDER,
        NAME,
        worker_type=WorkerType.Aggregated,
    )
    say("ready")
    await asyncio.gather(served.serve_endpoint(generate), acting.serve_endpoint(act))


if __name__ == "__main__":
    uvloop.run(main())
