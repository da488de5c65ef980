"""One model of the catalogue: which of its cards it is built from, and when to try again.

Theory of operation
-------------------
A model has as many cards as workers, and any of them may be of no use: its files cannot be
had, or are damaged. One task per model, :meth:`ModelKeeper.run`, loads from one card at a
time, so that two hundred workers that come at once cost one tokeniser. A card that fails is
tried again with a growing delay for as long as it is there, and the others before it.

Once a model is offered it stays offered while a card of the same endpoint is there, whether
that card could be loaded or not: its worker serves the same model.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from dynamo_trio.client import Client, open_client
from dynamo_trio.errors import CardUnusable, DynamoException, ModelNotFound, StartupError
from dynamo_trio.models.card_files import files_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.discovery import Discovery, EndpointId, ModelCard
    from dynamo_trio.plane import Planes
    from dynamo_trio.tokenizers import Preprocessor

logger = logging.getLogger("dynamo_trio.frontend")

#: Seconds until a card that failed is tried again: the first time, and at most.
FIRST_RETRY, LAST_RETRY = 1.0, 60.0
#: Seconds for which the last card may be away: a worker puts back at once what a stranger has
#: deleted. Without an instance the model is not offered meanwhile either.
CARD_GAP = 2.0
#: Seconds for which a withdrawn model's client goes on watching: its streams may still run,
#: and must hear of it when their worker is gone.
LINGER = 60.0
#: Seconds between two log lines about how many workers a model has.
TELL_EVERY = 1.0


@attrs.frozen
class Verbatim:
    """In the place of a preprocessor: the worker gets a session's events as its client sent them.

    That is how models are spoken to whose card is of Dynamo's type ``realtime``.
    """

    context_length: int = 0  # tokens; 0: it is the worker's business


@attrs.define(eq=False)
class ServedModel:
    """A model that can be asked now."""

    name: str
    context_length: int  # tokens, prompt and answer together
    created: int  # Unix seconds, for OpenAI's model object
    processing: Preprocessor | Verbatim
    client: Client
    #: The card that it was made from.
    card: ModelCard | None = None
    withdrawn: trio.Event = attrs.field(factory=trio.Event)

    @property
    def speaks_realtime(self) -> bool:
        """Do its workers take the events of ``/v1/realtime`` themselves, and nothing else?"""
        return isinstance(self.processing, Verbatim)

    @property
    def preprocessor(self) -> Preprocessor:
        """Between its text and its tokens.

        Raises:
            ModelNotFound: it has neither, see :attr:`speaks_realtime`.
        """
        if isinstance(self.processing, Verbatim):
            why = f"model {self.name[:200]!r} is served at /v1/realtime only"
            raise ModelNotFound(why, param="model")
        return self.processing

    def require_text(self) -> ServedModel:
        """This model, if it takes text; raises as :attr:`preprocessor` does."""
        _ = self.preprocessor
        return self


class Shelf(Protocol):
    """Where models stand that can be asked."""

    def despair(self, name: str) -> None:
        """A model could not be loaded."""

    def offer(self, model: ServedModel) -> None:
        """Put a model there."""

    def withdraw(self, model: ServedModel) -> None:
        """Take it away."""


@attrs.define(eq=False)
class Sources:
    """What a model is made with."""

    discovery: Discovery
    planes: Planes
    load: Callable[[ModelCard], Awaitable[Preprocessor | Verbatim]]
    nursery: trio.Nursery
    #: As in :func:`~dynamo_trio.client.open_client`.
    inhibited: float


@attrs.define(eq=False)
class _Candidate:
    card: ModelCard
    failures: int = 0
    retry_at: float = -math.inf  # on Trio's clock
    loading: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def failed(self, exc: Exception) -> None:
        """Note that the card could not be loaded."""
        delay = min(FIRST_RETRY * 2**self.failures, LAST_RETRY)
        self.failures = min(self.failures + 1, 10)
        self.retry_at = trio.current_time() + delay
        expected = isinstance(exc, (StartupError, DynamoException))
        logger.error(
            "model %s cannot be offered from the card of %s: %s; next attempt in %g s",
            *(self.card.name, self.card.key, exc, delay),
            exc_info=None if expected else exc,
        )


@attrs.define(eq=False)
class ModelKeeper:
    """Keeps one model offered while its cards allow it. ``put`` and ``remove`` are sync."""

    name: str
    shelf: Shelf
    sources: Sources
    _candidates: dict[str, _Candidate] = attrs.field(factory=dict)
    _changed: trio.Event = attrs.field(factory=trio.Event)
    #: The card that left last belongs to another model now.
    _moved: bool = False
    #: The card from which the model was made that is offered now.
    _offered: ModelCard | None = None

    def put(self, card: ModelCard) -> None:
        """A card of this model is there, or its content has changed."""
        known = self._candidates.get(card.key)
        if known is not None and known.card == card:
            return
        if known is not None:
            known.loading.cancel("the card has changed")
        if self._offered is not None and self._offered.endpoint == card.endpoint:
            _warn_if_different(self._offered, card)
        self._candidates[card.key] = _Candidate(card)
        self._notify()

    def remove(self, key: str, *, moved: bool) -> None:
        """A card is gone, or has ``moved`` to another model."""
        self._moved = moved
        gone = self._candidates.pop(key, None)
        if gone is not None:
            gone.loading.cancel("the card is gone")
            self._notify()

    async def run(self) -> None:
        """Load, offer and withdraw, until no card is left. There is one when it begins."""
        while self._candidates:
            candidate = await self._next()
            if candidate is None:
                continue
            processing = await self._load(candidate)
            if candidate.failures:
                self.shelf.despair(self.name)
            if processing is not None:
                self._offered = candidate.card
                await self._offer(candidate.card, processing)
                self._offered = None

    async def _next(self) -> _Candidate | None:
        """The card whose turn it is, once it is; None if the cards have changed meanwhile."""
        best = min(self._candidates.values(), key=lambda candidate: candidate.retry_at)
        with trio.move_on_at(best.retry_at):
            await self._changed.wait()
            return None
        return best

    async def _load(self, candidate: _Candidate) -> Preprocessor | Verbatim | None:
        candidate.loading = trio.CancelScope()  # one for each attempt: no scope is entered twice
        with candidate.loading:
            try:
                return await self.sources.load(candidate.card)
            except Exception as exc:
                candidate.failed(exc)
        return None

    async def _offer(self, card: ModelCard, processing: Preprocessor | Verbatim) -> None:
        model = await self.sources.nursery.start(self._hold_client, card, processing)
        self.shelf.offer(model)
        logger.info("model %s is offered; it has %s", self.name, _workers(model))
        await self._wait_forsaken(model)
        self.shelf.withdraw(model)
        model.withdrawn.set()
        logger.info("model %s is gone: no card of a worker at %s is left", self.name, card.endpoint)

    async def _wait_forsaken(self, model: ServedModel) -> None:
        """Until no card of the model's endpoint is left, and the same has not come back soon."""
        while self._has_card(model.client.endpoint):
            await self._changed.wait()
            if self._is_gap(model):
                with trio.move_on_after(CARD_GAP):
                    await self._changed.wait()
                if not self._is_back():
                    return

    def _has_card(self, endpoint: EndpointId) -> bool:
        return any(c.card.endpoint == endpoint for c in self._candidates.values())

    def _is_gap(self, model: ServedModel) -> bool:
        """Is no card there although there is a worker, whose card has not merely moved?"""
        return not (self._candidates or self._moved) and bool(model.client.instance_ids())

    def _is_back(self) -> bool:
        cards = [candidate.card for candidate in self._candidates.values()]
        return self._offered is not None and any(
            _content(card) == _content(self._offered) for card in cards
        )

    async def _hold_client(
        self,
        card: ModelCard,
        processing: Preprocessor | Verbatim,
        *,
        task_status: trio.TaskStatus[ServedModel],
    ) -> None:
        """A task of its own: the client outlives the model, see :data:`LINGER`."""
        sources, length = self.sources, processing.context_length
        opening = open_client(
            card.endpoint, sources.discovery, sources.planes, inhibited=sources.inhibited
        )
        async with opening as client:
            model = ServedModel(self.name, length, int(time.time()), processing, client, card)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_tell_of_workers, model)
                task_status.started(model)
                await model.withdrawn.wait()
                nursery.cancel_scope.cancel("the model is gone")
            await trio.sleep(LINGER)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def _tell_of_workers(model: ServedModel) -> None:
    """Of each change of their number, but not more often than an operator can read."""
    told = len(model.client.instance_ids())
    while True:
        await model.client.wait_changed()
        while (count := len(model.client.instance_ids())) != told:
            text = "model %s has %s, after %d" + ("" if count else "; its requests are refused")
            logger.info(text, model.name, _workers(model), told)
            told = count
            await trio.sleep(TELL_EVERY)


def _workers(model: ServedModel) -> str:
    """How many there are, in words."""
    count = len(model.client.instance_ids())
    return f"{count or 'no'} worker{'s' if count > 1 else ''} at {model.client.endpoint}"


def _warn_if_different(offered: ModelCard, card: ModelCard) -> None:
    """Tell of workers that serve two different models under one name."""
    if _content(card) != _content(offered):
        logger.warning(
            "the card of %s has other files than that of %s, which %s is served with: token ids"
            " may mean other words there",
            *(card.key, offered.key, card.name),
        )


def _content(card: ModelCard) -> frozenset[tuple[str, str]]:
    if card.card_json is None:
        return frozenset()
    try:
        return frozenset((file.name, file.digest) for file in files_of(card.card_json))
    except CardUnusable:
        return frozenset()
