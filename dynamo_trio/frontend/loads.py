"""Keeps :class:`~dynamo_trio.frontend.busy.BusyWorkers` told of loads and capacities."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery import ModelCard, Put
from dynamo_trio.frontend.busy import Capacity
from dynamo_trio.kv.loads import follow_loads, load_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.discovery import Change, Discovery, EndpointId, Watch
    from dynamo_trio.engines import Engine
    from dynamo_trio.events import EventPlane
    from dynamo_trio.frontend.busy import BusyWorkers
    from dynamo_trio.wire.dynamo.kv_events import KvMetrics


@attrs.define(eq=False)
class _Capacities:
    """What the cards say, by endpoint and worker."""

    _known: dict[tuple[EndpointId, int], Capacity] = attrs.field(factory=dict)

    def of(self, endpoint: EndpointId, worker: int) -> Capacity:
        return self._known.get((endpoint, worker), _UNKNOWN)

    def apply(self, change: Change[ModelCard]) -> None:
        card = change.record
        if isinstance(change, Put):
            self._known[card.endpoint, card.instance_id] = _capacity(card)
        else:
            self._known.pop((card.endpoint, card.instance_id), None)

    async def follow(self, watch: Watch[ModelCard], note_change: Callable[[], object]) -> None:
        while True:
            self.apply(await watch.next_change())
            note_change()


_UNKNOWN = Capacity()


def _capacity(card: ModelCard) -> Capacity:
    told = None if card.card_json is None else card.card_json.runtime_config
    return Capacity(
        _count(getattr(told, "total_kv_blocks", None)),
        _count(getattr(told, "max_num_batched_tokens", None)),
    )


def _count(told: object) -> int | None:
    return told if isinstance(told, int) and told > 0 else None


@asynccontextmanager
async def keep_busy_told(
    busy: BusyWorkers, discovery: Discovery, open_events: Callable[[], EventPlane]
) -> AsyncIterator[None]:
    """Tell ``busy`` what workers tell of themselves while the block runs.

    Nothing is listened to before there is a threshold, perhaps set at run time.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep, busy, discovery, open_events)
        yield
        nursery.cancel_scope.cancel("the frontend is closed")


async def _keep(
    busy: BusyWorkers, discovery: Discovery, open_events: Callable[[], EventPlane]
) -> None:
    await busy.wait_wanted()
    async with (
        discovery.watch(ModelCard) as cards,
        follow_loads(discovery, open_events(), busy.note_change) as loads,
    ):
        capacities = _Capacities()
        for card in cards.snapshot.values():
            capacities.apply(Put(card))
        busy.follow(loads.of, capacities.of)
        await capacities.follow(cards, busy.note_change)


def tell_own_load(busy: BusyWorkers, engine: Engine, worker: int) -> None:
    """Tell ``busy`` of the one engine that is in this process, whenever it asks."""

    def loads(_: EndpointId) -> dict[int, dict[int, KvMetrics]]:
        return {worker: {0: load_of(engine, worker)}}

    info = engine.info
    capacity = Capacity(info.kv_blocks_total, info.step_tokens)
    busy.loads, busy.capacity = loads, lambda endpoint, worker: capacity
