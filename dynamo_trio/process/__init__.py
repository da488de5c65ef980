"""A process around the event loop: signals, watchdog, exit code, shutdown report.

Only entry points use it. Importing it, or any module of it, installs nothing. Its names
are imported when they are first used, so that ``dynamo_trio.process.signals`` can be
imported, and its handler installed, before anything that takes time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.process.exit_codes import ExitCode as ExitCode
    from dynamo_trio.process.exit_codes import strongest as strongest
    from dynamo_trio.process.run import ProcessContext as ProcessContext
    from dynamo_trio.process.run import run_process as run_process

_HOMES = {
    "ExitCode": "dynamo_trio.process.exit_codes",
    "strongest": "dynamo_trio.process.exit_codes",
    "ProcessContext": "dynamo_trio.process.run",
    "run_process": "dynamo_trio.process.run",
}

__all__ = ["ExitCode", "ProcessContext", "run_process", "strongest"]

if not TYPE_CHECKING:  # a type checker must see the imports above, not this

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # the next use finds it without this function
        return value
