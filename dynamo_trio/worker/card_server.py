"""Gives the files of this worker's model cards to frontends, and no other file."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import attrs
import trio

from dynamo_trio.models.card_builder import served_files
from dynamo_trio.models.card_files import LIMITS, read_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.discovery import ModelCard


@attrs.define(eq=False)
class _Copy:
    """A file's content while somebody is being sent it."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    content: bytes | None = None
    users: int = 0


@attrs.define(eq=False)
class CardServer:
    """The files of the cards that were offered, by decoded URL path.

    However many frontends ask at once for the same file, it is in memory once.
    """

    #: Only what stands here is ever opened: no part of a path comes from a request.
    _files: dict[str, Path] = attrs.field(factory=dict)
    _copies: dict[Path, _Copy] = attrs.field(factory=dict)

    def offer(self, card: ModelCard) -> None:
        """Give out the files of a card."""
        self._files.update({unquote(url): path for url, path in served_files(card).items()})

    def find(self, url_path: str) -> Path | None:
        """The file behind a decoded URL path, if it belongs to a card."""
        return self._files.get(url_path)

    @asynccontextmanager
    async def content(self, path: Path) -> AsyncIterator[bytes]:
        """What :meth:`find` found, read anew unless it is being sent to others.

        Raises:
            FileUnusable: it cannot be read any more.
        """
        copy = self._copies.setdefault(path, _Copy())
        copy.users += 1
        try:
            async with copy.lock:
                if copy.content is None:
                    copy.content = await _read(path)
            yield copy.content
        finally:
            copy.users -= 1
            if not copy.users:
                del self._copies[path]


async def _read(path: Path) -> bytes:
    return await trio.to_thread.run_sync(read_file, path, LIMITS[path.name], abandon_on_cancel=True)
