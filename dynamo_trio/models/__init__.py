"""Model cards, and the default model: fetched once, checked, kept in a cache folder.

``python -m dynamo_trio.models fetch|path|verify|clean`` does by hand what the first start
of a worker does by itself. The names are imported when they are first used, so that the
program can install its signal handlers before anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.models.card_builder import make_card as make_card
    from dynamo_trio.models.default import DEFAULT_MODEL as DEFAULT_MODEL
    from dynamo_trio.models.default import cached_model as cached_model
    from dynamo_trio.models.default import default_model as default_model
    from dynamo_trio.models.fetch import FetchCancelled as FetchCancelled
    from dynamo_trio.models.fetch import ensure as ensure
    from dynamo_trio.models.realtime_card import make_realtime_card as make_realtime_card
    from dynamo_trio.models.store import Store as Store
    from dynamo_trio.models.wheel import WheelModel as WheelModel
    from dynamo_trio.wire.dynamo.card import RuntimeConfig as RuntimeConfig

__all__ = [
    "DEFAULT_MODEL",
    "FetchCancelled",
    "RuntimeConfig",
    "Store",
    "WheelModel",
    "cached_model",
    "default_model",
    "ensure",
    "make_card",
    "make_realtime_card",
]

_HOMES = {
    "DEFAULT_MODEL": "models.default",
    "FetchCancelled": "models.fetch",
    "RuntimeConfig": "wire.dynamo.card",
    "Store": "models.store",
    "WheelModel": "models.wheel",
    "cached_model": "models.default",
    "default_model": "models.default",
    "ensure": "models.fetch",
    "make_card": "models.card_builder",
    "make_realtime_card": "models.realtime_card",
}

if not TYPE_CHECKING:  # a type checker must see the imports above, not this

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"dynamo_trio.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
