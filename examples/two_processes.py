"""A worker and a client as two processes, by the library alone: discovery, planes and events.

They share a folder, in which they find each other. Started without arguments, this program is
the client, and starts itself once more as the worker.
"""
# ruff: noqa: E402 - the handlers come before everything that takes time

from __future__ import annotations

from dynamo_trio.process import signals

signals.install()  # the first statement: from here on a signal is kept, and kills nobody

import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from dynamo_trio import Lifecycle, Timetable, open_runtime
from dynamo_trio.discovery import FileSettings, open_file_discovery
from dynamo_trio.events.sockets import ZmqEvents
from dynamo_trio.kv import Block, Stored, follow_fleet, open_kv_publisher, open_load_publisher
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.process import ProcessContext, run_process
from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dynamo_trio.kv import KvFleet
    from dynamo_trio.runtime import DistributedRuntime, Endpoint

HOST = "127.0.0.1"  # None in the settings below: the address by which other machines reach this
ENDPOINT = "example.backend.count"
#: The tokens of a prompt, in blocks of four.
PROMPT, BLOCK = list(range(12)), 4


@asynccontextmanager
async def open_network(
    folder: Path, lifecycle: Lifecycle | None = None
) -> AsyncIterator[DistributedRuntime]:
    """What both processes need. What is opened first is closed last."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        discovery = await enter(open_file_discovery(FileSettings(folder)))
        mux = await enter(open_mux_plane(MuxSettings(host=HOST)))
        tcp = await enter(open_tcp_plane(TcpSettings(rpc_host=HOST, response_host=HOST)))
        network = open_runtime(
            lifecycle,
            discovery=discovery,
            planes=[mux, tcp],  # served on both; a client takes the first that a worker offers
            events=ZmqEvents(HOST),
        )
        yield await enter(network)


# --- the worker -------------------------------------------------------------------------------


async def count(request: dict[str, int]) -> AsyncGenerator[int, None]:
    for number in range(request["to"]):
        yield number


async def work(folder: Path, process: ProcessContext) -> None:
    """Serve, and tell what is cached and how full the worker is, until SIGTERM."""
    lifecycle = Lifecycle(Timetable(grace=5.0, drain=5.0))
    process.attach(lifecycle)
    async with trio.open_nursery() as services, open_network(folder, lifecycle) as runtime:
        services.start_soon(lifecycle.run)
        endpoint = runtime.endpoint(ENDPOINT)
        async with open_kv_publisher(endpoint) as cache, open_load_publisher(endpoint) as load:
            hashes = tokens_hashes(PROMPT, BLOCK)
            blocks = map(Block, chain_hashes(hashes, None), hashes)
            cache.publish([Stored(None, blocks=tuple(blocks))])
            load.update(kv_used_blocks=len(hashes))
            async with endpoint.serving(count):
                await lifecycle.wait_stopped()


# --- the client -------------------------------------------------------------------------------


async def ask(endpoint: Endpoint) -> None:
    async with endpoint.client() as client:
        await client.wait_for_instances()
        for instance in client.instances():
            print("found a worker on", " and ".join(instance.transports))
        async with client.round_robin({"to": 5}, item_type=int) as answer:
            print("its answer:", [number async for number in answer])


async def look(fleet: KvFleet) -> None:
    """Wait until the fleet has told of itself."""
    hashes = tokens_hashes(PROMPT, BLOCK)
    while not (fleet.loads and any(fleet.overlaps(hashes).values())):
        await fleet.wait_changed()
    (blocks,), (load,) = fleet.overlaps(hashes).values(), fleet.loads.values()
    print(f"it has {blocks} of {len(hashes)} blocks of the prompt; in use: {load.kv_used_blocks}")
    for follower in fleet.caches.values():
        print("newest change of its cache:", follower.view.last_event_id)


async def demonstrate() -> None:
    with tempfile.TemporaryDirectory(prefix="two-processes-") as name:
        async with trio.open_nursery() as processes:
            command = [sys.executable, __file__, name]
            worker = await processes.start(partial(trio.run_process, command))
            with trio.fail_after(60):
                async with open_network(Path(name)) as runtime:
                    endpoint = runtime.endpoint(ENDPOINT)
                    async with follow_fleet(endpoint) as fleet:
                        await ask(endpoint)
                        await look(fleet)
                    worker.terminate()  # SIGTERM: it leaves in order, and says so in a report
                    await worker.wait()


async def main(process: ProcessContext) -> None:
    if len(sys.argv) > 1:
        await work(Path(sys.argv[1]), process)
    else:
        await demonstrate()


if __name__ == "__main__":
    run_process(main)
