"""Tells how full a worker is (``kv_metrics``)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.kv.channel import open_channel, random_publisher_id
from dynamo_trio.wire.dynamo.events import KV_METRICS
from dynamo_trio.wire.dynamo.kv_events import KvMetrics, encode_kv_metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.kv.channel import Channel
    from dynamo_trio.runtime import Endpoint

#: Seconds between two messages, at least.
PACE = 0.1
#: Seconds after which the same is told again, for who has come late.
REPEAT = 1.0


@attrs.define(eq=False)
class LoadPublisher:
    """Tells the newest figures, when they change, at a bounded pace."""

    _channel: Channel
    _worker_id: int
    _dp_rank: int
    _latest: KvMetrics | None = None
    _changed: trio.Event = attrs.field(factory=trio.Event)

    def update(
        self,
        *,
        kv_used_blocks: int | None = None,
        active_decode_blocks: int | None = None,
        active_prefill_tokens: int | None = None,
    ) -> None:
        """Note the load, as often as you like. What is None is not told.

        Args:
            kv_used_blocks: blocks of the KV cache that are in use.
            active_decode_blocks: those of them that running requests need.
            active_prefill_tokens: tokens of prompts that are still to be computed.

        Raises:
            ValueError: a count is below zero.
        """
        latest = KvMetrics(
            worker_id=self._worker_id,
            dp_rank=self._dp_rank,
            kv_used_blocks=kv_used_blocks,
            active_decode_blocks=active_decode_blocks,
            active_prefill_tokens=active_prefill_tokens,
        )
        if latest != self._latest:
            self._latest = latest
            self._changed.set()

    async def _tell(self) -> None:
        while True:
            with trio.move_on_after(REPEAT):
                await self._changed.wait()
            self._changed = trio.Event()
            if self._latest is not None:
                self._channel.send(encode_kv_metrics(self._latest))
            await trio.sleep(PACE)


@asynccontextmanager
async def open_load_publisher(
    endpoint: Endpoint, *, dp_rank: int = 0
) -> AsyncIterator[LoadPublisher]:
    """Tell the load of this process's worker behind ``endpoint`` while the block runs.

    Raises:
        PortInUse: nothing can be published on this machine.
    """
    worker_id = endpoint.runtime.instance_id
    async with (
        open_channel(endpoint, KV_METRICS, random_publisher_id()) as channel,
        trio.open_nursery() as nursery,
    ):
        publisher = LoadPublisher(channel, worker_id, dp_rank)
        nursery.start_soon(publisher._tell)
        yield publisher
        nursery.cancel_scope.cancel("the load is no longer told")
