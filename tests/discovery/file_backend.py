"""The file backend on a fake clock: nothing runs in threads."""

from __future__ import annotations

import errno
import os
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

from dynamo_trio.discovery import FileSettings, files
from dynamo_trio.discovery.file import FileStore, Runner, open_file_store
from dynamo_trio.discovery.spelling import spell, store_key
from dynamo_trio.discovery.stored import StoredDiscovery, open_stored_discovery
from dynamo_trio.wire.dynamo.keys import file_name
from tests.discovery.backends import instance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from dynamo_trio.discovery import Record

T = TypeVar("T")

NOW = 1_700_000_000.0
TTL = 10.0
KEY = store_key(instance(1))


def wall() -> float:
    return NOW + trio.current_time()


async def inline(call: Callable[[], T], /) -> T:
    """In place of a thread, so that the fake clock does not run away meanwhile."""
    await trio.lowlevel.checkpoint()
    return call()


@asynccontextmanager
async def store_in(root: Path, run: Runner = inline) -> AsyncIterator[FileStore]:
    async with open_file_store(FileSettings(root), wall=wall, run=run) as store:
        yield store


@asynccontextmanager
async def discovery_in(root: Path, run: Runner = inline) -> AsyncIterator[StoredDiscovery]:
    async with store_in(root, run) as store, open_stored_discovery(store) as discovery:
        yield discovery


def path_of(root: Path, record: Record) -> Path:
    at = store_key(record)
    return root / at.bucket / file_name(at.key)


def age(path: Path) -> float:
    return wall() - path.stat().st_mtime


def strangers_file(root: Path, record: Record, modified: float) -> Path:
    path = path_of(root, record)
    files.write(path, spell(record), modified)
    return path


@contextmanager
def full() -> Iterator[None]:
    """No space is left: nothing can be made, but what is there can be touched."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(files, "write", refuse)
        broken.setattr(files, "probe", refuse)
        yield


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]
