"""The worker: an engine behind an endpoint, alone in its process.

``hold_engine`` and ``engine_handler`` are for workers with an engine of their own. They are
imported when they are first used, so that the program can install its signal handlers before
anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.worker.hold import hold_engine as hold_engine
    from dynamo_trio.worker.serve import engine_handler as engine_handler

__all__ = ["engine_handler", "hold_engine"]

_HOMES = {"engine_handler": "serve", "hold_engine": "hold"}

if not TYPE_CHECKING:  # a type checker must see the imports above, not this

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
