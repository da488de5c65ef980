"""Folders that are gone when the process is."""

from __future__ import annotations

import logging
import shutil
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio.runtime")

#: How long the removal of a folder may take, in seconds. Past it a thread goes on alone.
REMOVAL = 5.0


@asynccontextmanager
async def temporary_folder(lifecycle: Lifecycle, prefix: str) -> AsyncIterator[Path]:
    """A new folder, removed with all that is in it when the block is left, however it is left.

    What cannot be removed in time is named in the log, and by the report of a stop.
    It stays behind if no block is left: after the watchdog, the last SIGINT or a fast exit.

    Raises:
        OSError: it cannot be made.
    """
    make = partial(tempfile.mkdtemp, prefix=prefix)
    path = Path(await trio.to_thread.run_sync(make))
    try:
        yield path
    finally:
        await _remove(lifecycle, path)


async def _remove(lifecycle: Lifecycle, path: Path) -> None:
    with lifecycle.cleanup(REMOVAL, name=f"remove {path}") as limit:
        # Abandoned at the limit: a file system that hangs must not hold the process.
        if await trio.to_thread.run_sync(_still_there, path, abandon_on_cancel=True):
            logger.warning("temporary folder %s: not all of it can be removed", path)
    if limit.cancelled_caught:
        logger.warning("temporary folder %s: not removed within %g s", path, REMOVAL)


def _still_there(path: Path) -> bool:
    """Remove what can be removed."""
    shutil.rmtree(path, ignore_errors=True)
    return path.exists()
