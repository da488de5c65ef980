"""Frontend, router and worker in one process, from the first listener to the last farewell.

The nest, from the outside in; each is left only when everything inside it has ended::

    services     the HTTP server (its port answers /live to the very end), lifecycle.run()
      front        what is being answered, though no drain waits for it
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
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio import __version__
from dynamo_trio.console import Banner, url_of
from dynamo_trio.discovery import ModelCard
from dynamo_trio.frontend.assembly import make_frontend
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.loads import tell_own_load
from dynamo_trio.frontend.serve import open_front
from dynamo_trio.program.entry import Body, Start
from dynamo_trio.program.nest import Nest
from dynamo_trio.program.stopping import tell_stop
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.standalone.ask import Asker, AskFailed, write_stdout
from dynamo_trio.standalone.assembly import timetable
from dynamo_trio.tokenizers import Preprocessor, Tokenizer
from dynamo_trio.wire.llm import PreprocessedRequest
from dynamo_trio.worker.assembly import Model
from dynamo_trio.worker.loading import load_engine
from dynamo_trio.worker.model_path import find_model
from dynamo_trio.worker.serve import engine_handler

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.config import Config
    from dynamo_trio.console import Terminal
    from dynamo_trio.engines import Engine
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio.standalone")

#: What else helps whoever has no default model and cannot get it.
SIM_ADVICE = ", --engine sim needs no model"


@attrs.define(eq=False)
class Program:
    """One run of ``python -m dynamo_trio``. ``run`` is called once."""

    start: Start
    frontend: Frontend
    #: The exit code that the program itself has earned. With ``--ask`` only a complete answer
    #: makes it 0.
    code: int = attrs.field(init=False)
    port: int = 0
    nest: Nest = attrs.field(init=False)
    #: Set by a stop that comes before the process is ready; the thread that fetches the model
    #: reads it.
    _hurry: threading.Event = attrs.field(factory=threading.Event)
    #: Around the question of ``--ask``: whoever reads the answer may have stopped reading.
    _asking: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @code.default
    def _code_default(self) -> int:
        return 0 if self.config.ask is None else 1

    @nest.default
    def _nest_default(self) -> Nest:
        return Nest(self.lifecycle, on_early_stop=self._end_the_start)

    @property
    def config(self) -> Config:
        return self.start.config

    @property
    def lifecycle(self) -> Lifecycle:
        return self.start.lifecycle

    @property
    def terminal(self) -> Terminal:
        return self.start.terminal

    async def run(self) -> int:
        """Start, serve until a stop is requested, and stop. Returns an exit code.

        Raises:
            StartupError: as a member of an exception group, when the start fails.
        """
        await self.nest.run(self._listen_and_serve)
        return self.code

    async def _listen_and_serve(self, services: trio.Nursery) -> None:
        if self.config.ask is None:  # else the last line of the terminal may be the answer's
            tell = partial(tell_stop, color=not self.config.no_color)
            services.start_soon(tell, self.lifecycle, self.terminal)
        host, port = self.config.http_host, self.config.http_port
        async with open_front(self.frontend, services, host, port) as self.port:
            await self._start_and_serve()

    async def _start_and_serve(self) -> None:
        path = await find_model(self.start, self._hurry, advice=SIM_ADVICE)
        # Abandoned by a stop: a file system that hangs must not hold it.
        read = partial(Model.read, self.config, path)
        model = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        load = partial(_preprocessor, model.tokenizer)
        async with (
            open_runtime(self.lifecycle) as runtime,
            open_catalog(runtime.discovery, runtime.planes, load) as catalog,
        ):
            self.frontend.catalog = catalog
            await self._serve(runtime, model)

    async def _serve(self, runtime: DistributedRuntime, model: Model) -> None:
        name = model.name
        async with trio.open_nursery() as nursery:
            engine = await load_engine(self.start, nursery, model)
            card = self._card(runtime, engine, name, model.path)
            serving = runtime.endpoint(str(card.endpoint)).serving(
                engine_handler(engine), request_type=PreprocessedRequest, card=card
            )
            tell_own_load(self.frontend.busy, engine, runtime.instance_id)
            async with serving:
                await self.frontend.catalog.wait_for(name)
                self._ready(nursery, name)
                await self.lifecycle.wait_stopped()
                self._asking.cancel("the process has stopped")

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

    # --- ready ------------------------------------------------------------------------------

    def _ready(self, nursery: trio.Nursery, name: str) -> None:
        self.nest.ready()
        self.frontend.ready = True
        if self.config.ask is not None:
            nursery.start_soon(self._ask, self.config.ask, name)
        elif self.config.log_jsonl:
            logger.info("%s", str(self._banner(name)).partition("\n")[0])
        else:
            self.terminal.write(str(self._banner(name)))

    def _banner(self, name: str) -> Banner:
        paths = self.frontend.paths
        return Banner(
            version=__version__,
            host=self.config.http_host,
            port=self.port,
            tls=self.frontend.tls is not None,
            model=name,
            chat_path=paths.chat,
            probes=(paths.health, paths.live, paths.metrics),
            wants_key=self.frontend.keys is not None,
            engine=self.config.engine,
            timetable=self.lifecycle.timetable.describe(),
            pid=os.getpid(),
            seconds=self.start.seconds(),
        )

    async def _ask(self, question: str, name: str) -> None:
        tls = self.frontend.tls is not None
        url = f"{url_of(self.config.http_host, self.port, tls=tls)}{self.frontend.paths.chat}"
        key = None if self.frontend.keys is None else self.frontend.keys.own_key()
        try:
            with self._asking:
                asker = Asker(url, name, write_stdout, self.lifecycle.cleanup, key=key)
                await asker.ask(question)
            if self._asking.cancelled_caught:
                return
        except AskFailed as exc:
            logger.error("no answer: %s", exc)
        else:
            self.code = 0
        self.lifecycle.request_stop("the question is answered")

    # --- stopping ---------------------------------------------------------------------------

    def _end_the_start(self) -> None:
        self._hurry.set()
        if self.config.ask is not None:
            logger.error("no answer: stopped before the question was asked")


async def _preprocessor(tokenizer: Tokenizer, card: ModelCard) -> Preprocessor:
    await trio.lowlevel.checkpoint()  # the tokeniser was loaded before, in a thread
    return Preprocessor(tokenizer, context_length=card.context_length, model=card.name)


async def _run(start: Start) -> int:
    return await Program(start, make_frontend(start.config, start.lifecycle, alone=True)).run()


BODY = Body(timetable, _run)
