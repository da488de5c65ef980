"""A frontend as a process.

The nest, from the outside in; each is left only when everything inside it has ended::

    services     the HTTP server (its port answers /live to the very end), lifecycle.run()
      front        what is being answered, though no drain waits for it
        discovery    the store
          planes       the request planes
            catalogue    the models that can be asked

A stop drains the HTTP server first, while all of it is still there: a request that was
admitted can still be routed, and finish.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio import __version__
from dynamo_trio.frontend import assembly
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.loads import keep_busy_told
from dynamo_trio.frontend.serve import open_front
from dynamo_trio.frontend.teardown import Teardown
from dynamo_trio.metrics.planes import PlaneMetrics
from dynamo_trio.program.entry import Body, Start
from dynamo_trio.program.nest import Nest
from dynamo_trio.program.network import open_discovery, open_listening, open_planes
from dynamo_trio.program.stopping import tell_stop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.plane import Planes

logger = logging.getLogger("dynamo_trio.frontend")


@attrs.define(eq=False)
class Program:
    """One run of ``python -m dynamo_trio.frontend``. ``run`` is called once."""

    start: Start
    frontend: Frontend
    nest: Nest = attrs.field(init=False)

    @nest.default
    def _nest_default(self) -> Nest:
        return Nest(self.start.lifecycle)

    async def run(self) -> int:
        """Start, serve until a stop is requested, and stop. Returns an exit code.

        Raises:
            StartupError: as a member of an exception group, when the start fails.
        """
        await self.nest.run(self._inside)
        return 0

    async def _inside(self, services: trio.Nursery) -> None:
        config, cleanup = self.start.config, Teardown(self.start.lifecycle).cleanup
        tell = partial(tell_stop, color=not config.no_color)
        services.start_soon(tell, self.start.lifecycle, self.start.terminal)
        load = card_loader(config.cache_dir, model_dir=config.model_path)
        async with (
            open_front(self.frontend, services, config.http_host, config.http_port, cleanup),
            open_discovery(config, cleanup) as discovery,
            open_planes(config, cleanup, asks=True) as planes,
            self._show(planes),
            open_catalog(
                discovery,
                planes,
                load,
                namespace=config.namespace,
                inhibited=config.inhibited_duration,
            ) as self.frontend.catalog,
            keep_busy_told(self.frontend.busy, discovery, open_listening),
        ):
            self._ready()
            await self.start.lifecycle.wait_stopped()

    @asynccontextmanager
    async def _show(self, planes: Planes) -> AsyncIterator[None]:
        """Let ``/metrics`` tell of the planes while the block runs."""
        collector, registry = PlaneMetrics(planes), self.frontend.metrics.registry
        registry.register(collector)
        try:
            yield
        finally:
            registry.unregister(collector)

    def _ready(self) -> None:
        """Without a model too, as Dynamo's frontend: they come and go."""
        self.nest.ready()
        self.frontend.ready = True
        logger.info(
            "dynamo_trio frontend %s is ready after %.1f s", __version__, self.start.seconds()
        )


async def _run(start: Start) -> int:
    return await Program(start, assembly.make_frontend(start.config, start.lifecycle)).run()


BODY = Body(assembly.timetable, _run)
