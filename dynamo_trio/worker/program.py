"""A worker as a process: from its status port to its registration, and back.

The nest, from the outside in; each is left only when everything inside it has ended::

    services     the status server (its port answers /live to the very end), lifecycle.run()
      discovery    the store: kept alive, and left last of all that others can see
        planes       the request planes
          runtime
            engine       loaded before anybody can find it, closed after the last request
              events       others can hear of its cache and load from before the first request on
                endpoint     card and instance are registered, requests run

A stop goes the other way round: the instance is withdrawn, the grace period is served out,
the endpoint is closed and drained; then everything is left from the inside out.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio import __version__
from dynamo_trio.kv import publish_engine
from dynamo_trio.program.entry import Body, Start
from dynamo_trio.program.limits import worker_timetable
from dynamo_trio.program.nest import Nest
from dynamo_trio.program.stopping import tell_stop
from dynamo_trio.wire.llm import PreprocessedRequest
from dynamo_trio.worker.canary import canary_payload
from dynamo_trio.worker.loading import load_engine
from dynamo_trio.worker.model_path import find_model
from dynamo_trio.worker.publish import read_card, read_model
from dynamo_trio.worker.serve import engine_handler
from dynamo_trio.worker.status import WorkerStatus
from dynamo_trio.worker.status_server import open_worker_runtime, serve_status

if TYPE_CHECKING:
    from dynamo_trio.config import Config
    from dynamo_trio.lifecycle import Lifecycle
    from dynamo_trio.runtime import DistributedRuntime
    from dynamo_trio.worker.assembly import Model

logger = logging.getLogger("dynamo_trio.worker")


@attrs.define(eq=False)
class Program:
    """One run of ``python -m dynamo_trio.worker``. ``run`` is called once."""

    start: Start
    status: WorkerStatus = attrs.field(init=False)
    #: Set by a stop that comes before the worker is ready; the thread that fetches the model
    #: reads it.
    _hurry: threading.Event = attrs.field(factory=threading.Event)
    nest: Nest = attrs.field(init=False)

    @status.default
    def _status_default(self) -> WorkerStatus:
        return WorkerStatus(self.lifecycle, began=self.start.began)

    @nest.default
    def _nest_default(self) -> Nest:
        return Nest(self.lifecycle, on_early_stop=self._hurry.set)

    @property
    def config(self) -> Config:
        return self.start.config

    @property
    def lifecycle(self) -> Lifecycle:
        return self.start.lifecycle

    async def run(self) -> int:
        """Start, serve until a stop is requested, and stop. Returns an exit code.

        Raises:
            StartupError: as a member of an exception group, when the start fails.
        """
        await self.nest.run(self._inside)
        return 0

    async def _inside(self, services: trio.Nursery) -> None:
        tell = partial(tell_stop, color=not self.config.no_color)
        services.start_soon(tell, self.lifecycle, self.start.terminal)
        await serve_status(self.status, services, self.config)
        path = await find_model(self.start, self._hurry)
        model = await read_model(self.config, path)
        async with open_worker_runtime(self.config, self.status) as runtime:
            await self._serve(runtime, model)

    async def _serve(self, runtime: DistributedRuntime, model: Model) -> None:
        payload = canary_payload(runtime.canary, model.tokenizer)
        async with trio.open_nursery() as nursery:
            engine = await load_engine(self.start, nursery, model)
            card = await read_card(
                self.config, engine.info, model, runtime.instance_id, runtime.status_url
            )
            serving = runtime.endpoint(str(card.endpoint)).serving(
                engine_handler(engine),
                request_type=PreprocessedRequest,
                card=card,
                health_check_payload=payload,
            )
            telling = publish_engine(
                runtime.endpoint(str(card.endpoint)), engine, kv_events=self.config.kv_events
            )
            async with telling, serving:
                self._ready(model)
                await self.lifecycle.wait_stopped()

    def _ready(self, model: Model) -> None:
        self.nest.ready()
        logger.info(
            "dynamo_trio worker %s is ready after %.1f s: model %s, engine %s",
            __version__,
            self.start.seconds(),
            model.name,
            self.config.engine,
        )


async def _run(start: Start) -> int:
    return await Program(start).run()


BODY = Body(worker_timetable, _run)
