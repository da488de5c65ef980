"""Where the model is; the default model is fetched on first use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.console import progress
from dynamo_trio.errors import FetchError
from dynamo_trio.models import FetchCancelled, default_model

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from dynamo_trio.program.entry import Start

#: What helps whoever has no default model and cannot get it.
NO_MODEL = "To start without it: --model-path FILE.gguf serves a file of your own"


async def find_model(start: Start, hurry: threading.Event, *, advice: str = "") -> Path | None:
    """The path of the settings, or that of the default model; None: the engine needs none.

    Args:
        start: of the process.
        hurry: set it to end a fetch that is under way; the caller cancels this then.
        advice: what else helps when the default model cannot be had.

    Raises:
        StartupError: the default model cannot be had.
    """
    config = start.config
    if config.engine == "sim" or config.model_path is not None:
        return config.model_path
    with progress(start.terminal, "getting the model", counts_bytes=True) as bar:
        fetch = partial(default_model, config.cache_dir, bar.update, cancel=hurry)
        try:
            return await trio.to_thread.run_sync(fetch)
        except FetchCancelled:
            # The start is cancelled: it ends here.
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120 - meant to raise Cancelled instead
            raise
        except FetchError as exc:
            raise FetchError(f"{exc}\n{NO_MODEL}{advice}.") from exc
