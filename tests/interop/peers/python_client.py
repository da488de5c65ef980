"""A client on NVIDIA's own Python runtime. Run by the interpreter that has it.

    python_client.py NS.COMPONENT.ENDPOINT REQUEST...

Asks for each request (JSON) in turn and prints, as JSON lines, its items and how it ended.
"""

import asyncio  # noqa: TID251 - the runtime of this program wants it
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.runtime import Client, DistributedRuntime, dynamo_worker


def say(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)


async def open_stream(client: Client, request: object) -> AsyncIterator[Any]:
    """Its router may learn of a worker later than ``wait_for_instances`` does."""
    for _ in range(100):
        try:
            return await client.round_robin(request)  # type: ignore[no-any-return]  # untyped
        except Exception as exc:
            if "No workers available" not in str(exc):
                raise
        await asyncio.sleep(0.1)
    raise TimeoutError("there are no workers")


async def ask(client: Client, request: object) -> None:
    try:
        async for item in await open_stream(client, request):
            say("item", item.data())
    except Exception as exc:
        say("error", f"{type(exc).__name__}: {exc}")
    else:
        say("end", None)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    client = await runtime.endpoint(sys.argv[1]).client()
    await client.wait_for_instances()
    for request in sys.argv[2:]:
        await ask(client, json.loads(request))


if __name__ == "__main__":
    uvloop.run(main())
