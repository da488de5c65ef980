"""Which models can be asked, kept fresh from discovery.

A model card brings a model into the catalogue: its tokeniser is loaded, a client of its
endpoint is opened, and then it is offered. A model whose last card went stays *known*,
so that the answer is "no worker at the moment" (503) and not "no such model" (404).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.client import Client, open_client
from dynamo_trio.discovery import Discovery, ModelCard, Put
from dynamo_trio.errors import ModelNotFound, NoWorker, StartupError
from dynamo_trio.tokenizers import Preprocessor

if TYPE_CHECKING:
    from dynamo_trio.plane import RequestPlane

logger = logging.getLogger("dynamo_trio.frontend")

#: Builds what turns a model's text into tokens and back. May wait, as for a thread.
Loader = Callable[[ModelCard], Awaitable[Preprocessor]]


@attrs.define(eq=False)
class ServedModel:
    """A model that can be asked now."""

    name: str
    context_length: int
    created: int  # Unix seconds, for OpenAI's model object
    preprocessor: Preprocessor
    client: Client
    cards: set[str] = attrs.field(factory=set)  # keys of the cards that hold it up
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.define(eq=False)
class Catalog:
    """All models of this frontend, by name."""

    _models: dict[str, ServedModel] = attrs.field(factory=dict)
    _known: set[str] = attrs.field(factory=set)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def models(self) -> list[ServedModel]:
        """The models with at least one instance behind them."""
        return [m for m in self._models.values() if m.client.instance_ids()]

    def find(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: it was never here.
            NoWorker: it was, but nobody serves it now.
        """
        model = self._models.get(name)
        if model is not None and model.client.instance_ids():
            return model
        if model is not None or name in self._known:
            raise NoWorker(f"model {name!r} has no worker at the moment")
        raise ModelNotFound(f"model {name[:200]!r} does not exist", param="model")

    async def wait_for(self, name: str) -> ServedModel:
        """Wait until the model is offered and has an instance."""
        while name not in self._models:
            await self._changed.park()
        await self._models[name].client.wait_for_instances()
        return self._models[name]

    def offer(self, model: ServedModel) -> None:
        """Put a model on the list."""
        self._models[model.name] = model
        self._known.add(model.name)
        self._changed.unpark_all()

    def card_gone(self, card: ModelCard) -> None:
        """A card was withdrawn; with its last card a model leaves the list."""
        model = self._models.get(card.name)
        if model is None:
            return
        model.cards.discard(card.key)
        if not model.cards:
            del self._models[card.name]
            model.scope.cancel("the last card of the model is gone")

    def card_joins(self, card: ModelCard) -> bool:
        """Does this card belong to a model that is offered already?"""
        model = self._models.get(card.name)
        if model is None:
            return False
        model.cards.add(card.key)
        return True


@attrs.define(eq=False)
class _Follower:
    """Reads the watch of model cards and keeps a catalogue true to it."""

    catalog: Catalog
    discovery: Discovery
    planes: Mapping[str, RequestPlane]
    load: Loader
    nursery: trio.Nursery
    #: Cards whose tokeniser is being loaded; leaving discovery cancels the load's effect.
    loading: dict[str, ModelCard] = attrs.field(factory=dict)

    async def follow(self, watch: Any) -> None:
        for card in watch.snapshot.values():
            self.apply(Put(card))
        while True:
            self.apply(await watch.next_change())

    def apply(self, change: Any) -> None:
        card: ModelCard = change.record
        if not isinstance(change, Put):
            self.loading.pop(card.key, None)
            self.catalog.card_gone(card)
        elif not self.catalog.card_joins(card):
            self.loading[card.key] = card
            self.nursery.start_soon(self.add, card, name=f"model {card.name}")

    async def add(self, card: ModelCard) -> None:
        """Load a model and hold its client open until its last card is gone."""
        try:
            preprocessor = await self.load(card)
        except StartupError as exc:
            logger.error("model %s cannot be offered: %s", card.name, exc)
            return
        if self.loading.pop(card.key, None) is None or self.catalog.card_joins(card):
            return
        async with open_client(card.endpoint, self.discovery, self.planes) as client:
            model = ServedModel(
                card.name, card.context_length, int(time.time()), preprocessor, client, {card.key}
            )
            self.catalog.offer(model)
            with model.scope:
                await trio.sleep_forever()


@asynccontextmanager
async def open_catalog(
    discovery: Discovery, planes: Mapping[str, RequestPlane], load: Loader
) -> AsyncIterator[Catalog]:
    """A catalogue that follows discovery while the block runs."""
    catalog = Catalog()
    async with discovery.watch(ModelCard) as watch, trio.open_nursery() as nursery:
        follower = _Follower(catalog, discovery, planes, load, nursery)
        nursery.start_soon(follower.follow, watch)
        yield catalog
        nursery.cancel_scope.cancel("the frontend is closed")
