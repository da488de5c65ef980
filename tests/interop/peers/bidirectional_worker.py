"""A worker on NVIDIA's own Python runtime whose requests stream in. Run by its interpreter.

    bidirectional_worker.py NAMESPACE

``NAMESPACE.backend.talk`` echoes each item, and does what an item with ``then`` says.
"""

import asyncio  # noqa: TID251 - the runtime of this program wants it
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

[NAMESPACE] = sys.argv[1:]


def say(text: str) -> None:
    print(f"bidirectional_worker: {text}", flush=True)


async def talk(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async for item in requests:
        match item.get("then"):
            case None:
                yield {"echo": item}
            case "raise":
                raise RuntimeError("as it was told to")
            case "hand over":
                raise GeneratorExit
            case "end":
                return
            case "count":
                yield {"size": len(item["text"])}
                await asyncio.sleep(item["seconds"])
    stopped = context.is_stopped()
    say(f"the input has ended, stopped={stopped}")
    yield {"bye": stopped}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint(f"{NAMESPACE}.backend.talk")
    say("ready")
    await endpoint.serve_bidirectional_endpoint(talk)


if __name__ == "__main__":
    uvloop.run(main())
