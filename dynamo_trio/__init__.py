"""An alternative runtime for NVIDIA Dynamo on Trio, in which shutdown is right by construction.

The public names are imported when they are first used (PEP 562): ``import dynamo_trio``
stays so cheap that a program can install its signal handlers before anything
heavy, Trio itself among it, is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.config import Config as Config

__version__ = "0.1.0.dev0"

#: Public name -> the module that defines it. A test holds it equal to the imports above
#: and to ``__all__``.
_HOMES = {
    "Config": "dynamo_trio.config",
}

__all__ = ["Config", "__version__"]

if not TYPE_CHECKING:  # a type checker must see the imports above, not this

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # the next use finds it without this function
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
