"""A worker of your own: its endpoint, and around it what makes a process that stops right.

Run it and send it SIGTERM, or press Ctrl-C. As an example must end, it signals itself.
"""
# ruff: noqa: E402 - the handlers come before everything that takes time

from __future__ import annotations

from dynamo_trio.process import signals

signals.install()  # the first statement: from here on a signal is kept, and kills nobody

import os
import signal
from typing import TYPE_CHECKING

import trio

from dynamo_trio import Client, Context, Lifecycle, Timetable, open_runtime
from dynamo_trio.errors import DynamoException
from dynamo_trio.process import ProcessContext, run_process

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


async def count(request: dict[str, int], context: Context) -> AsyncGenerator[int, None]:
    """The handler: an item every 50 ms. A cut, or a client that leaves, ends it where it waits."""
    try:
        for number in range(request["to"]):
            await trio.sleep(0.05)
            yield number
    finally:
        with context.cleanup(1.0):  # without this, a wait in `finally` would be cancelled too
            await trio.sleep(0.01)  # give something back, say
            print("cleaned up:", context.id())


async def ask(client: Client, name: str, to: int) -> None:
    """A client. There is one in this process because an example is alone."""
    received = 0
    try:
        async with client.generate({"to": to}, Context(name), item_type=int) as answer:
            async for _number in answer:
                received += 1
        print(f"{name}: complete, {received} items")
    except DynamoException as exc:
        print(f"{name}: cut after {received} items: {exc}")


async def main(process: ProcessContext) -> None:
    lifecycle = Lifecycle(Timetable(grace=0.1, drain=0.5))
    process.attach(lifecycle)  # signals, watchdog and report now know it
    async with trio.open_nursery() as services:
        services.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            endpoint = runtime.endpoint("example.backend.count")
            async with endpoint.client() as client, endpoint.serving(count):
                await client.wait_for_instances()
                services.start_soon(ask, client, "short", 6)
                services.start_soon(ask, client, "long", 1000)
                await trio.sleep(0.2)  # both are under way
                os.kill(os.getpid(), signal.SIGTERM)
                await lifecycle.wait_stopped()


if __name__ == "__main__":
    run_process(main)
