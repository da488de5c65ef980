"""Gets the files of a card that another process has published.

Theory of operation
-------------------
The card is believed in one thing only: the checksum. Where the bytes come from does not
matter once they agree with it, and bytes that do not are of no use from anywhere; so the
cache (:mod:`~dynamo_trio.models.card_store`) is asked first, then the place in the card, then
a local copy of the model, if there is one.

The place is a path, a ``file:`` URL or an ``http(s):`` URL, as Dynamo 1.5.1 writes them.
``hf://`` (what the mocker writes without a status server) needs the local copy: nothing here
talks to the hub.

A peer that lies about sizes, drips, or never ends costs no more than the limits say: bytes by
the kind of file (or the size in the card, which is exact), seconds by :class:`CardLimits`.
File systems that hang are waited for in threads, which are abandoned.
"""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import attrs
import httpx
import trio

from dynamo_trio.errors import CardUnusable, FileUnusable
from dynamo_trio.models.card_files import CardFile, digest_of, files_of, read_file
from dynamo_trio.models.card_store import CardStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from dynamo_trio.wire.dynamo.card import CardJson

T = TypeVar("T")

_WEB = ("http://", "https://")
_HUB = "hf://"


@attrs.frozen(kw_only=True)
class CardLimits:
    """How long a card may take. Seconds."""

    connect_time: float = 5.0
    read_time: float = 10.0  # between two pieces of a file
    file_time: float = 60.0  # one file, wherever it comes from


async def fetch_card(
    card: CardJson,
    cache_dir: Path,
    *,
    model_dir: Path | None = None,
    limits: CardLimits | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Path:
    """A folder with the card's files, for :func:`~dynamo_trio.tokenizers.load_tokenizer`.

    Args:
        cache_dir: files are kept in it, and not fetched again.
        model_dir: a local copy of the model, for files that cannot be had from their place.
        transport: for tests.

    Raises:
        CardUnusable: a file cannot be had, or is not what its checksum says.
        FileUnusable: the cache folder cannot be used.
    """
    files = files_of(card)
    fetch = _Fetch(CardStore(cache_dir), model_dir, limits or CardLimits(), transport)
    for file in files:
        await fetch.bring(file)
    return await _in_thread(fetch.store.link, files)


@attrs.frozen
class _Fetch:
    store: CardStore
    model_dir: Path | None
    limits: CardLimits
    transport: httpx.AsyncBaseTransport | None

    async def bring(self, file: CardFile) -> None:
        """See that the store holds the file."""
        await self._bounded(file, self._bring)

    async def _bring(self, file: CardFile) -> None:
        if not await _in_thread(self.store.holds, file):
            content = await self._get(file)
            await _in_thread(self.store.put, file.digest, content)

    async def _bounded(self, file: CardFile, get: Callable[[CardFile], Awaitable[object]]) -> None:
        try:
            with trio.fail_after(self.limits.file_time):
                await get(file)
        except trio.TooSlowError:
            raise CardUnusable(
                f"{file.name} took longer than {self.limits.file_time:g} seconds"
                f" from {_shown(file.source)}"
            ) from None

    async def _get(self, file: CardFile) -> bytes:
        try:
            return _checked(file, await self._from_its_place(file), file.source)
        except CardUnusable:
            if self.model_dir is None:
                raise
            copy = self.model_dir / file.name
            try:
                return _checked(file, await _read_local(file, str(copy)), str(copy))
            except CardUnusable as exc:
                raise CardUnusable(f"{exc}, and {_shown(file.source)} gives nothing") from exc

    async def _from_its_place(self, file: CardFile) -> bytes:
        place = file.source
        if place.startswith(_WEB):
            return await self._download(file)
        if place.startswith("/"):
            return await _read_local(file, place)
        if place.lower().startswith("file:"):
            return await _read_local(file, _path_of(place))
        if place.startswith(_HUB):
            raise CardUnusable(
                f"{file.name} is at {_shown(place)}, and nothing is fetched from the hub: give"
                " the worker a status server (DYN_SYSTEM_PORT), or a local copy here (--model-path)"
            )
        raise CardUnusable(f"{file.name}: {_shown(place)} is no absolute path and no known URL")

    async def _download(self, file: CardFile) -> bytes:
        shown = _shown(file.source)
        try:
            async with self._response(file.source) as response:
                if response.status_code != 200:
                    raise CardUnusable(f"{shown} answers with status {response.status_code}")
                return await _body(response, file)
        except httpx.TimeoutException as exc:
            raise CardUnusable(f"{shown} does not answer in time") from exc
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as exc:
            raise CardUnusable(f"{shown}: {str(exc) or type(exc).__name__}") from exc

    @asynccontextmanager
    async def _response(self, url: str) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(self.limits.read_time, connect=self.limits.connect_time)
        # Reading the system's certificates takes 30 ms, and plain HTTP needs none: httpx follows
        # no redirect unless told to.
        tls = await _in_thread(ssl.create_default_context) if url.startswith("https:") else False
        # No proxy and no credentials from the environment: the worker is a neighbour.
        client = httpx.AsyncClient(
            timeout=timeout, trust_env=False, verify=tls, transport=self.transport
        )
        headers = {"accept-encoding": "identity"}
        async with client, client.stream("GET", url, headers=headers) as response:
            yield response


async def _body(response: httpx.Response, file: CardFile) -> bytes:
    content = bytearray()
    # Leaving the loop would leave httpx's nested generators to the garbage collector; a
    # cancellation unwinds them all.
    with trio.CancelScope() as scope:
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > file.limit:
                scope.cancel("the file is too long")
    if len(content) > file.limit:
        raise CardUnusable(f"{_shown(file.source)}: longer than {file.limit} bytes")
    return bytes(content)


async def _read_local(file: CardFile, path: str) -> bytes:
    try:
        return await _in_thread(read_file, path, file.limit)
    except FileUnusable as exc:
        raise CardUnusable(f"{file.name}: {exc}") from exc


def _path_of(url: str) -> str:
    """The path in a ``file:`` URL of this machine."""
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise CardUnusable(f"{_shown(url)}: {exc}") from exc
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise CardUnusable(f"{_shown(url)} is not a file of this machine")
    return unquote(parts.path, errors="surrogateescape")


def _checked(file: CardFile, content: bytes, place: str) -> bytes:
    if file.size is not None and len(content) != file.size:
        raise CardUnusable(
            f"{file.name} from {_shown(place)} has {len(content)} bytes; the card says {file.size}"
        )
    digest = digest_of(content)
    if digest != file.digest:
        raise CardUnusable(
            f"{file.name} from {_shown(place)} has checksum {digest}; the card says {file.digest}"
        )
    return content


async def _in_thread(function: Callable[..., T], *args: object) -> T:
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


def _shown(place: str) -> str:
    """A peer's text, fit for a log line."""
    text = place[:300]
    return text if text.isprintable() else ascii(text)
