"""An engine of :mod:`dynamo_trio.engines` as a source of events."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.kv.load import LoadPublisher, open_load_publisher
from dynamo_trio.kv.loads import load_of
from dynamo_trio.kv.publisher import KvPublisher, open_kv_publisher
from dynamo_trio.wire.dynamo.kv_events import Cleared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dynamo_trio.engines import Engine, KvEvent
    from dynamo_trio.runtime import Endpoint

logger = logging.getLogger("dynamo_trio.kv")


@asynccontextmanager
async def publish_engine(
    endpoint: Endpoint, engine: Engine, *, kv_events: bool = True
) -> AsyncIterator[None]:
    """Tell the engine's load, and what is in its KV cache, while the block runs.

    The cache only with ``kv_events``, and if the core tells of it (``info.kv_events``). Enter
    it before the first request: what the cache got before is not known.

    Raises:
        PortInUse: nothing can be published on this machine.
    """
    async with AsyncExitStack() as stack:
        if kv_events and engine.info.kv_events:
            publisher = await stack.enter_async_context(open_kv_publisher(endpoint))
            stack.callback(engine.on_kv_events(_Feed(publisher).take))
        load = await stack.enter_async_context(open_load_publisher(endpoint))
        tell = partial(_tell_load, engine, load)
        stack.callback(engine.on_step(tell))
        tell()
        yield


def _tell_load(engine: Engine, load: LoadPublisher, _deltas: object = None) -> None:
    told = load_of(engine, 0)
    load.update(
        kv_used_blocks=told.kv_used_blocks,
        active_decode_blocks=told.active_decode_blocks,
        active_prefill_tokens=told.active_prefill_tokens,
    )


@attrs.define(eq=False)
class _Feed:
    """A core that tells nonsense must not end its engine: routers then know nothing of it."""

    publisher: KvPublisher
    broken: bool = False

    def take(self, events: Sequence[KvEvent]) -> None:
        if self.broken:
            return
        try:
            self.publisher.publish(events)
        except Exception:
            self.broken = True
            logger.exception("the engine's KV events make no sense; no more of them are told")
            self.publisher.publish([Cleared()])
