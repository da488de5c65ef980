"""The frontend's application under an ASGI server that is not its own: hypercorn's, or anycorn.

``python frontend_under_another_server.py [hypercorn | anycorn]``; the settings are those of
``python -m dynamo_trio.frontend``, by environment variable. As an example must show something and
end, it brings a worker of its own, asks it a question, and signals itself.
"""
# ruff: noqa: E402 - the handlers come before everything that takes time

from __future__ import annotations

from dynamo_trio.process import signals

signals.install()  # the first statement: from here on a signal is kept, and kills nobody

import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import trio

from dynamo_trio.config.programs import FRONTEND
from dynamo_trio.console import configure_logging
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.assembly import make_frontend, timetable
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.loads import keep_busy_told
from dynamo_trio.lifecycle import Lifecycle
from dynamo_trio.process import ProcessContext, run_process
from dynamo_trio.program.nest import Nest
from dynamo_trio.program.network import open_discovery, open_listening, open_planes
from dynamo_trio.testing import make_model_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.config import Config
    from dynamo_trio.frontend.state import Frontend

# --- the frontend -----------------------------------------------------------------------------


def foreign_server(name: str) -> Callable[..., Any]:
    """``serve`` of the server, with its own settings: port, TLS and limits are its affair."""
    if name == "anycorn":
        import anycorn
        import anycorn.config

        settings: Any = anycorn.config.Config()
        serve: Any = anycorn.serve
    else:
        import hypercorn.config
        import hypercorn.trio

        settings, serve = hypercorn.config.Config(), hypercorn.trio.serve
    settings.bind = ["127.0.0.1:0"]
    settings.graceful_timeout = 1.0  # for connections that are left when all else has ended
    return partial(serve, config=settings)


async def run_frontend(config: Config, process: ProcessContext, server_name: str) -> None:
    """Serve until a stop is requested, and stop as ``python -m dynamo_trio.frontend`` does."""
    lifecycle = Lifecycle(timetable(config))
    process.attach(lifecycle)  # signals, watchdog and report now know it
    frontend, nest = make_frontend(config, lifecycle), Nest(lifecycle)

    async def inside(services: trio.Nursery) -> None:
        async with open_network(config, frontend):
            # Silent workers are noticed, and new API keys read, if keys there are.
            services.start_soon(lifecycle.supervise, frontend.stalls.run)
            if frontend.keys is not None:
                services.start_soon(lifecycle.supervise, frontend.keys.follow)
            # Its listener must stay open through the drain: so it is told to end behind it.
            serve = foreign_server(server_name)
            serving = partial(serve, App(frontend), shutdown_trigger=lifecycle.wait_stopped)
            (address,) = await services.start(lifecycle.supervise, serving)
            nest.ready()
            frontend.ready = True
            services.start_soon(demonstrate, address, frontend)
            await lifecycle.wait_stopped()
            await frontend.calls.wait_answered()  # of what no drain waits for, as /health

    await nest.run(inside)  # a stop that comes before it is ready ends the start


@asynccontextmanager
async def open_network(config: Config, frontend: Frontend) -> AsyncIterator[None]:
    """The store, the ways to workers, and the models that these serve; closed in this order."""
    cleanup = frontend.lifecycle.cleanup
    load = card_loader(config.cache_dir, model_dir=config.model_path)
    async with (
        open_discovery(config, cleanup) as discovery,
        open_planes(config, cleanup, asks=True) as planes,
        open_catalog(
            discovery,
            planes,
            load,
            namespace=config.namespace,
            inhibited=config.inhibited_duration,
        ) as frontend.catalog,
        keep_busy_told(frontend.busy, discovery, open_listening),
    ):
        yield


# --- what an example needs ----------------------------------------------------------------------


async def demonstrate(address: str, frontend: Frontend) -> None:
    """Ask, and ask again while it drains."""
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        while "demo" not in (await client.get("/v1/models")).text:  # noqa: ASYNC110 - over HTTP
            await trio.sleep(0.05)
        messages = [{"role": "user", "content": "Hello!"}]
        question = {"model": "demo", "messages": messages, "max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=question) as answer:
            lines = answer.aiter_lines()
            print("it answers:", await anext(lines))
            os.kill(os.getpid(), signal.SIGTERM)
            await frontend.lifecycle.wait_stop_requested()
            async with httpx.AsyncClient(base_url=address) as other:
                print("new requests get", (await other.get("/v1/models")).status_code)
                print("/live still says", (await other.get("/live")).status_code)
            last = [line async for line in lines if line][-1]
            print("the answer that was under way ends with", last)


@asynccontextmanager
async def a_worker(folder: Path) -> AsyncIterator[None]:
    """A worker with a simulated engine, which this process finds through a folder."""
    os.environ |= {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "found"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    }
    model = make_model_folder(folder / "model")
    command = [
        sys.executable,
        "-m",
        "dynamo_trio.worker",
        "--engine",
        "sim",
        "--model-name",
        "demo",
    ]
    async with trio.open_nursery() as processes:
        run = partial(trio.run_process, [*command, "--model-path", str(model)])
        worker = await processes.start(run)
        yield
        worker.terminate()


async def main(process: ProcessContext) -> None:
    with tempfile.TemporaryDirectory(prefix="another-server-") as name:
        async with a_worker(Path(name)):
            config = FRONTEND.read_config([])
            configure_logging(config.log)
            await run_frontend(config, process, *sys.argv[1:] or ["hypercorn"])


if __name__ == "__main__":
    run_process(main)
