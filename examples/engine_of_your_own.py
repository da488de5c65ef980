"""An engine of your own, behind any frontend that finds it: a worker in one file.

The engine answers with its prompt. A real worker ends at `serve_until_stopped`; as an example
must end, this one starts a frontend, asks it once, and stops.
"""
# ruff: noqa: E402 - the handlers come before everything that takes time

from __future__ import annotations

from dynamo_trio.process import signals

signals.install()  # the first statement: from here on a signal is kept, and kills nobody

import os
import socket
import sys
import tempfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import trio

from dynamo_trio import dynamo_worker
from dynamo_trio.engines import CoreInfo, Delta, Request, Stats
from dynamo_trio.models import RuntimeConfig, make_card
from dynamo_trio.process import ProcessContext, run_process
from dynamo_trio.testing import make_model_folder
from dynamo_trio.wire.llm import PreprocessedRequest
from dynamo_trio.worker import engine_handler, hold_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio import DistributedRuntime
    from dynamo_trio.discovery import ModelCard
    from dynamo_trio.engines import Engine

ENDPOINT, MODEL = "example.backend.generate", "echo"


class EchoCore:
    """The engine: a plain object, called from one thread, one call at a time."""

    def __init__(self) -> None:
        self.info = CoreInfo(
            model=MODEL, context_tokens=1024, max_running=4, kv_block_tokens=16, kv_blocks_total=256
        )
        #: Request -> the tokens that it will still be given.
        self._left: dict[str, deque[int]] = {}

    def load(self, progress: Callable[[float], None]) -> None:
        progress(1.0)  # a real one reads its weights here, and says how far it has come

    def add(self, request: Request) -> None:
        self._left[request.request_id] = deque(request.token_ids[: request.limit])

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> Sequence[Delta]:
        """One token for each request; the last delta of a request says why it ends."""
        return [self._advance(request_id, left) for request_id, left in [*self._left.items()]]

    def _advance(self, request_id: str, left: deque[int]) -> Delta:
        token = left.popleft()
        if left:
            return Delta(request_id, (token,))
        del self._left[request_id]
        return Delta(request_id, (token,), "stop")

    def has_work(self) -> bool:
        return bool(self._left)

    def stats(self) -> Stats:
        return Stats(running=len(self._left), kv_blocks_total=self.info.kv_blocks_total)

    def owed_seconds(self) -> float:
        return 0.0  # its steps take the time that they take

    def interrupt(self) -> None:
        """Its calls are short: nothing to cut."""

    def close(self) -> None:
        self._left.clear()


@dynamo_worker()
async def worker(runtime: DistributedRuntime, folder: Path) -> None:
    """Load, then be found, then serve; a stop undoes it in the other order."""
    lifecycle = runtime.lifecycle
    async with trio.open_nursery() as services:
        hold = partial(hold_engine, lifecycle, EchoCore())
        engine: Engine = await services.start(lifecycle.supervise, hold)
        services.start_soon(demonstrate, runtime)
        await serve_until_stopped(runtime, engine, await read_card(runtime, engine, folder))


async def read_card(runtime: DistributedRuntime, engine: Engine, folder: Path) -> ModelCard:
    """What frontends must know of the model. It reads files: in a thread."""
    make = partial(
        make_card,
        folder,
        name=MODEL,
        endpoint=runtime.endpoint(ENDPOINT).id,
        instance_id=runtime.instance_id,
        context_length=engine.info.context_tokens,
        kv_cache_block_size=engine.info.kv_block_tokens,
        runtime_config=RuntimeConfig(
            total_kv_blocks=engine.info.kv_blocks_total, max_num_seqs=engine.info.max_running
        ),
        base_url=runtime.status_url,
    )
    return await trio.to_thread.run_sync(make, abandon_on_cancel=True)


async def serve_until_stopped(runtime: DistributedRuntime, engine: Engine, card: ModelCard) -> None:
    serving = runtime.endpoint(ENDPOINT).serving(
        engine_handler(engine), request_type=PreprocessedRequest, card=card
    )
    async with serving:
        await runtime.lifecycle.wait_stopped()


# --- only for the example -------------------------------------------------------------------


async def demonstrate(runtime: DistributedRuntime) -> None:
    """Start a frontend, ask it, end it, and stop this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dynamo_trio.frontend", f"--http-port={port}"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.run_process, command, check=False))
        print(await ask(f"http://127.0.0.1:{port}/v1"))
        nursery.cancel_scope.cancel("the example is over")  # which sends it SIGTERM
    runtime.shutdown()


async def ask(url: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Is anybody there?"}]}
    async with httpx.AsyncClient(base_url=url) as http:
        while MODEL not in await models(http):  # noqa: ASYNC110 - the frontend tells nobody
            await trio.sleep(0.1)
        answer = await http.post("/chat/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


async def models(http: httpx.AsyncClient) -> list[str]:
    try:
        return [model["id"] for model in (await http.get("/models")).json()["data"]]
    except httpx.TransportError:
        return []  # the frontend does not listen yet


async def main(process: ProcessContext) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {  # a worker takes them from whoever starts it
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": f"{folder}/store",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_HTTP_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
            "DYN_LOG": "warn",
        }
        model = Path(folder, "model")  # of a real model: what `huggingface-cli download` left
        make_model_folder(model, context_length=1024)
        await worker(process, model)


if __name__ == "__main__":
    run_process(main)
