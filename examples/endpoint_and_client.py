"""An endpoint, a client, and a stop that lets the answer in flight come to its end.

Everything is in this process: discovery and request plane are in memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.runtime import open_runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dynamo_trio.client import Client


async def count(request: dict[str, int]) -> AsyncGenerator[int, None]:
    """The handler: one item every 50 ms. A cut or a client that leaves ends it where it waits."""
    for number in range(request["to"]):
        await trio.sleep(0.05)
        yield number


async def ask(client: Client) -> None:
    async with client.generate({"to": 6}, item_type=int) as answer:
        async for number in answer:
            print("got", number)


async def main() -> None:
    lifecycle = Lifecycle(Timetable(grace=0.1, drain=5.0))
    async with open_runtime(lifecycle) as runtime:
        endpoint = runtime.endpoint("example.backend.count")
        async with endpoint.serving(count), endpoint.client() as client:
            await client.wait_for_instances()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lifecycle.run)
                nursery.start_soon(partial(ask, client))
                await trio.sleep(0.1)  # the answer is under way
                lifecycle.request_stop("the example is over")
    print(lifecycle.report().to_json())
    assert lifecycle.exit_code() == 0


if __name__ == "__main__":
    trio.run(main)
