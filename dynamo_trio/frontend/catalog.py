"""Which models can be asked, kept fresh from discovery.

A model card brings a model into the catalogue: its tokeniser is loaded, a client of its
endpoint is opened, and then it is offered (:mod:`dynamo_trio.frontend.keeper`). While it is loaded
for the first time it is *expected*, and a model whose last card went stays *known*: in both cases
the answer is "no worker at the moment" (503) and not "no such model" (404). So a frontend that has
just started turns nobody away for good who asks for a model that its workers serve.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.client import INHIBITED
from dynamo_trio.discovery import Discovery, ModelCard, Put
from dynamo_trio.errors import ModelNotFound, NoWorker
from dynamo_trio.frontend.keeper import ModelKeeper, ServedModel, Sources, Verbatim
from dynamo_trio.plane import Planes
from dynamo_trio.tokenizers import Preprocessor

if TYPE_CHECKING:
    from dynamo_trio.plane import RequestPlane

__all__ = ["Catalog", "Loader", "ServedModel", "Verbatim", "open_catalog"]

#: Builds what turns a model's text into tokens and back, or says that its worker is to get what
#: the client sends. May wait, as for a thread. What it raises is logged, and it is called again
#: later.
Loader = Callable[[ModelCard], Awaitable[Preprocessor | Verbatim]]


@attrs.define(eq=False)
class Catalog:
    """All models of this frontend, by name."""

    _models: dict[str, ServedModel] = attrs.field(factory=dict)
    _known: set[str] = attrs.field(factory=set)
    #: Models with a card, of which it is not known yet whether it is of any use.
    _expected: set[str] = attrs.field(factory=set)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def models(self) -> list[ServedModel]:
        """The models with at least one instance behind them."""
        return [m for m in self._models.values() if m.client.instance_ids()]

    def find(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: it was never here.
            NoWorker: it was, but nobody serves it now, or it is about to be.
        """
        model = self._models.get(name)
        if model is not None and model.client.instance_ids():
            return model
        if name in self._expected:
            raise NoWorker(f"model {name!r} is being loaded")
        if self.knows(name):
            raise NoWorker(f"model {name!r} has no worker at the moment")
        raise ModelNotFound(f"model {name[:200]!r} does not exist", param="model")

    def knows(self, name: str) -> bool:
        """Is, or was, there a model of that name?"""
        return name in self._known

    def known(self) -> list[str]:
        """The names of all models that are, or were, there."""
        return sorted(self._known)

    async def wait_for(self, name: str) -> ServedModel:
        """Wait until the model is offered and has an instance."""
        while True:
            model = self._models.get(name)
            if model is None:
                await self._changed.park()
                continue
            await model.client.wait_for_instances()
            if self._models.get(name) is model:
                return model

    def expect(self, name: str) -> None:
        """A model has a card; whether it can be offered turns out soon."""
        self._expected.add(name)

    def despair(self, name: str) -> None:
        """It cannot, for now."""
        self._expected.discard(name)

    def offer(self, model: ServedModel) -> None:
        """Put a model on the list."""
        self._expected.discard(model.name)
        self._models[model.name] = model
        self._known.add(model.name)
        self._changed.unpark_all()

    def withdraw(self, model: ServedModel) -> None:
        """Take it off the list."""
        if self._models.get(model.name) is model:
            del self._models[model.name]


@attrs.define(eq=False)
class _Follower:
    """Reads the watch of model cards and tells each model's keeper of its own."""

    catalog: Catalog
    sources: Sources
    #: Models of other namespaces are left out; None takes all.
    namespace: str | None
    #: Invariant: a keeper is in here exactly while its task runs.
    keepers: dict[str, ModelKeeper] = attrs.field(factory=dict)
    #: Key of each card -> the model that it belongs to.
    names: dict[str, str] = attrs.field(factory=dict)

    def begin(self, watch: Any) -> None:
        """Take what is there."""
        for card in watch.snapshot.values():
            self.apply(Put(card))

    async def follow(self, watch: Any) -> None:
        """Take each change."""
        while True:
            self.apply(await watch.next_change())

    def apply(self, change: Any) -> None:
        card: ModelCard = change.record
        if self.namespace not in (None, card.endpoint.namespace):
            return
        before = self.names.pop(card.key, None)
        is_there = isinstance(change, Put)
        if before is not None and not (is_there and before == card.name):
            self.keepers[before].remove(card.key, moved=is_there)
        if is_there:
            self.names[card.key] = card.name
            self._keeper(card.name).put(card)

    def _keeper(self, name: str) -> ModelKeeper:
        if name not in self.keepers:
            self.keepers[name] = ModelKeeper(name, self.catalog, self.sources)
            self.catalog.expect(name)
            self.sources.nursery.start_soon(self._keep, name, name=f"model {name}")
        return self.keepers[name]

    async def _keep(self, name: str) -> None:
        await self.keepers[name].run()
        del self.keepers[name]
        self.catalog.despair(name)


@asynccontextmanager
async def open_catalog(
    discovery: Discovery,
    planes: Planes | Mapping[str, RequestPlane],
    load: Loader,
    *,
    namespace: str | None = None,
    inhibited: float = INHIBITED,
) -> AsyncIterator[Catalog]:
    """A catalogue that follows discovery while the block runs.

    ``namespace``: models of other namespaces are left out; None takes all. ``inhibited``: as in
    :func:`~dynamo_trio.client.open_client`.
    """
    catalog = Catalog()
    async with discovery.watch(ModelCard) as watch, trio.open_nursery() as nursery:
        sources = Sources(discovery, Planes.of(planes), load, nursery, inhibited)
        follower = _Follower(catalog, sources, namespace)
        follower.begin(watch)  # nobody is to ask before that
        nursery.start_soon(follower.follow, watch)
        yield catalog
        nursery.cancel_scope.cancel("the frontend is closed")
