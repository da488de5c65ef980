"""An alternative runtime for NVIDIA Dynamo on Trio, in which shutdown is right by construction.

The public names are imported when they are first used (PEP 562): ``import dynamo_trio``
stays so cheap that a program can install its signal handlers before anything
heavy, Trio itself among it, is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.client import Client as Client
    from dynamo_trio.config import Config as Config
    from dynamo_trio.context import Context as Context
    from dynamo_trio.decorators import dynamo_endpoint as dynamo_endpoint
    from dynamo_trio.decorators import dynamo_worker as dynamo_worker
    from dynamo_trio.graceful import graceful_shutdown as graceful_shutdown
    from dynamo_trio.graceful import install_signal_handlers as install_signal_handlers
    from dynamo_trio.lifecycle import Hooks as Hooks
    from dynamo_trio.lifecycle import Lifecycle as Lifecycle
    from dynamo_trio.lifecycle import Phase as Phase
    from dynamo_trio.lifecycle import Timetable as Timetable
    from dynamo_trio.plane import RequestHead as RequestHead
    from dynamo_trio.runtime import DistributedRuntime as DistributedRuntime
    from dynamo_trio.runtime import Endpoint as Endpoint
    from dynamo_trio.runtime import open_runtime as open_runtime

__version__ = "0.1.0.dev0"

#: Public name -> the module that defines it. A test holds it equal to the imports above
#: and to ``__all__``.
_HOMES = {
    "Client": "dynamo_trio.client",
    "Config": "dynamo_trio.config",
    "Context": "dynamo_trio.context",
    "DistributedRuntime": "dynamo_trio.runtime",
    "Endpoint": "dynamo_trio.runtime",
    "Hooks": "dynamo_trio.lifecycle",
    "Lifecycle": "dynamo_trio.lifecycle",
    "Phase": "dynamo_trio.lifecycle",
    "RequestHead": "dynamo_trio.plane",
    "Timetable": "dynamo_trio.lifecycle",
    "dynamo_endpoint": "dynamo_trio.decorators",
    "dynamo_worker": "dynamo_trio.decorators",
    "graceful_shutdown": "dynamo_trio.graceful",
    "install_signal_handlers": "dynamo_trio.graceful",
    "open_runtime": "dynamo_trio.runtime",
}

__all__ = [
    "Client",
    "Config",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "Hooks",
    "Lifecycle",
    "Phase",
    "RequestHead",
    "Timetable",
    "__version__",
    "dynamo_endpoint",
    "dynamo_worker",
    "graceful_shutdown",
    "install_signal_handlers",
    "open_runtime",
]

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
