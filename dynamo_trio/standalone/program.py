"""Frontend, router and worker in one process, from the first listener to the last farewell.

The nest, from the outside in; each is left only when everything inside it has ended::

    services     the HTTP server (its port answers /live to the very end), lifecycle.run()
      runtime      discovery and request planes
        catalogue    the models that can be asked: the router's view of the workers
          engine       closed once, after the last request
            endpoint     the requests

A stop goes the other way round: the HTTP front drains to its end, the endpoint is
withdrawn and closed, then the engine is closed, and the port last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio import __version__
from dynamo_trio.console import Banner, InFlight, Terminal, describe_inflight, progress, url_of
from dynamo_trio.discovery import ModelCard
from dynamo_trio.errors import FetchError
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.http.server import open_listeners, serve_http
from dynamo_trio.lifecycle import Lifecycle, Phase
from dynamo_trio.models import FetchCancelled, default_model
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.standalone import assembly
from dynamo_trio.standalone.ask import Asker, AskFailed, write_stdout
from dynamo_trio.tokenizers import Preprocessor, Tokenizer
from dynamo_trio.wire.llm import PreprocessedRequest
from dynamo_trio.worker.hold import hold_engine
from dynamo_trio.worker.serve import engine_handler

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.config import Config
    from dynamo_trio.engines import Engine, StepCore
    from dynamo_trio.frontend.state import Frontend

logger = logging.getLogger("dynamo_trio.standalone")

#: How often the terminal's status line is told anew what a drain waits for, in seconds.
TELL_EVERY = 0.25

#: What helps whoever has no default model and cannot get it.
NO_MODEL = (
    "To start without it: --model-path FILE.gguf serves a file of your own,"
    " --engine sim needs no model."
)


@attrs.define(eq=False)
class Program:
    """One run of ``python -m dynamo_trio``. ``run`` is called once."""

    config: Config
    terminal: Terminal
    lifecycle: Lifecycle
    frontend: Frontend
    #: When the process began, by time.monotonic().
    began: float
    #: The exit code that the program itself has earned. With ``--ask`` only a complete answer
    #: makes it 0.
    code: int = attrs.field(init=False)
    port: int = 0
    # Both are set off by a stop that comes before the process is ready; the event is read
    # by the thread that fetches the model.
    _hurry: threading.Event = attrs.field(factory=threading.Event)
    _startup: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: Around the question of ``--ask``: whoever reads the answer may have stopped reading.
    _asking: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @code.default
    def _code_default(self) -> int:
        return 0 if self.config.ask is None else 1

    async def run(self) -> int:
        """Start, serve until a stop is requested, and stop. Returns an exit code.

        Raises:
            StartupError: as a member of an exception group, when the start fails.
        """
        async with trio.open_nursery() as services:
            services.start_soon(self.lifecycle.run)
            services.start_soon(self._attend_stop)
            with self._startup:
                await self._listen(services)
                await self._start_and_serve()
            await self.lifecycle.wait_stopped()
            services.cancel_scope.cancel("everything inside has ended")
        return self.code

    async def _listen(self, services: trio.Nursery) -> None:
        listeners = await open_listeners(self.config.http_host, self.config.http_port)
        self.port = listeners[0].socket.getsockname()[1]
        serve = partial(serve_http, App(self.frontend), listeners, limits=self.frontend.limits)
        server = await services.start(self.lifecycle.supervise, serve)
        self.lifecycle.on_abort(partial(server.abort_all, "the process stops"))
        logger.info("listening on %s", url_of(self.config.http_host, self.port))

    async def _start_and_serve(self) -> None:
        path = await self._model_path()
        # Abandoned by a stop: a file system that hangs must not hold it.
        read = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
        tokenizer = await read(assembly.tokenizer, self.config, path)
        load = partial(_preprocessor, tokenizer)
        async with (
            open_runtime(self.lifecycle) as runtime,
            open_catalog(runtime.discovery, runtime.planes, load) as catalog,
        ):
            self.frontend.catalog = catalog
            await self._serve(runtime, path, tokenizer)

    async def _serve(
        self, runtime: DistributedRuntime, path: Path | None, tokenizer: Tokenizer
    ) -> None:
        name = assembly.model_name(self.config, path)
        build = partial(assembly.build_core, self.config, path, name, tokenizer)
        core = await trio.to_thread.run_sync(build)
        async with trio.open_nursery() as nursery:
            engine = await self._load(nursery, core, name)
            card = self._card(runtime, engine, name, path)
            serving = runtime.endpoint(str(card.endpoint)).serving(
                engine_handler(engine), request_type=PreprocessedRequest, card=card
            )
            async with serving:
                await self.frontend.catalog.wait_for(name)
                self._ready(nursery, name)
                await self.lifecycle.wait_stopped()
                self._asking.cancel("the process has stopped")

    async def _load(self, nursery: trio.Nursery, core: StepCore, name: str) -> Engine:
        close = self.lifecycle.timetable.engine_close
        limits = assembly.engine_limits(self.config, close)
        with progress(self.terminal, f"loading {name}") as bar:
            hold = partial(hold_engine, self.lifecycle, core, limits=limits, progress=bar.update)
            engine: Engine = await nursery.start(self.lifecycle.supervise, hold)
        return engine

    def _card(
        self, runtime: DistributedRuntime, engine: Engine, name: str, path: Path | None
    ) -> ModelCard:
        return ModelCard(
            name,
            self.config.endpoint_name,
            runtime.instance_id,
            model_path=path,
            context_length=engine.info.context_tokens,
            kv_cache_block_size=engine.info.kv_block_tokens,
        )

    async def _model_path(self) -> Path | None:
        path = self.config.model_path
        if self.config.engine == "sim" or path is not None:
            return path
        with progress(self.terminal, "getting the model", counts_bytes=True) as bar:
            fetch = partial(default_model, self.config.cache_dir, bar.update, cancel=self._hurry)
            try:
                return await trio.to_thread.run_sync(fetch)
            except FetchCancelled:
                # The start is cancelled: it ends here.
                await trio.lowlevel.checkpoint()  # noqa: ASYNC120 - meant to raise Cancelled instead
                raise
            except FetchError as exc:
                raise FetchError(f"{exc}\n{NO_MODEL}") from exc

    # --- ready ------------------------------------------------------------------------------

    def _ready(self, nursery: trio.Nursery, name: str) -> None:
        self.frontend.ready = True
        if self.config.ask is not None:
            nursery.start_soon(self._ask, self.config.ask, name)
        elif self.config.log_jsonl:
            logger.info("%s", str(self._banner(name)).partition("\n")[0])
        else:
            self.terminal.write(str(self._banner(name)))

    def _banner(self, name: str) -> Banner:
        return Banner(
            version=__version__,
            host=self.config.http_host,
            port=self.port,
            model=name,
            engine=self.config.engine,
            timetable=self.lifecycle.timetable.describe(),
            pid=os.getpid(),
            seconds=time.monotonic() - self.began,
        )

    async def _ask(self, question: str, name: str) -> None:
        url = f"{url_of(self.config.http_host, self.port)}/v1/chat/completions"
        try:
            with self._asking:
                await Asker(url, name, write_stdout).ask(question)
            if self._asking.cancelled_caught:
                return
        except AskFailed as exc:
            logger.error("no answer: %s", exc)
        else:
            self.code = 0
        self.lifecycle.request_stop("the question is answered")

    # --- stopping ---------------------------------------------------------------------------

    async def _attend_stop(self) -> None:
        """End a start where it stands; tell a person what a drain waits for."""
        await self.lifecycle.wait_stop_requested()
        if not self.frontend.ready:
            self._end_the_start()
        if self.config.ask is not None:
            return  # the last line of the terminal may be the answer's
        try:
            while self.lifecycle.phase < Phase.STOPPED:
                left = self._describe_left()
                self.terminal.set_status(partial(str, left) if left else None)
                await trio.sleep(TELL_EVERY)
        finally:
            self.terminal.set_status(None)

    def _end_the_start(self) -> None:
        self._hurry.set()
        self._startup.cancel("a stop was requested during the start")
        if self.config.ask is not None:
            logger.error("no answer: stopped before the question was asked")

    def _describe_left(self) -> str | None:
        now = trio.current_time()
        running = [InFlight(a.label, now - a.admitted_at) for a in self.lifecycle.http.admissions()]
        if not running:
            return None  # nothing that a person could wait for: it is over in a moment
        return describe_inflight(running, left=self.lifecycle.remaining()).partition("\n")[0]


async def _preprocessor(tokenizer: Tokenizer, card: ModelCard) -> Preprocessor:
    await trio.lowlevel.checkpoint()  # the tokeniser was loaded before, in a thread
    return Preprocessor(tokenizer, context_length=card.context_length, model=card.name)
