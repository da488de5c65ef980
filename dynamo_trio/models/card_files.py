"""The files that a model card points to: which there are, and how one is read safely.

A path in a card was written by another process, so reading it must not hang or swallow the
memory, whatever is found there: a pipe, a device, a folder, or a file without end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import attrs
import blake3

from dynamo_trio.errors import CardUnusable, FileUnusable
from dynamo_trio.wire.dynamo.card import CheckedFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dynamo_trio.wire.dynamo.card import CardJson

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

MIB = 1024 * 1024
#: Bytes that a file may have at most; the tokenisers of today's largest vocabularies have 40 MiB.
LIMITS = {
    CONFIG: 16 * MIB,
    TOKENIZER: 256 * MIB,
    TOKENIZER_CONFIG: 16 * MIB,
    CHAT_TEMPLATE: 16 * MIB,
    GENERATION_CONFIG: 16 * MIB,
}

_CHUNK = MIB


@attrs.frozen
class CardFile:
    """One file of a card, under the name that Hugging Face gives it (never the peer's)."""

    name: str
    source: str  # an absolute path or a URL
    digest: str  # 64 hex digits, BLAKE3 of the whole file
    size: int | None  # bytes, if the card says so

    @property
    def limit(self) -> int:
        """Bytes to read at most."""
        return LIMITS[self.name] if self.size is None else self.size


def files_of(card: CardJson) -> list[CardFile]:
    """The files of a card that we use.

    Raises:
        CardUnusable: the tokeniser is not one that we know, a file has no BLAKE3 checksum,
            or says to be larger than such a file may be.
    """
    found = {name: pick(card) for name, pick in _PLACES.items()}
    if found[TOKENIZER] is None:
        raise CardUnusable("the card names no tokenizer.json (another kind of tokenizer?)")
    return [_card_file(name, file) for name, file in found.items() if file is not None]


def _card_file(name: str, file: CheckedFile) -> CardFile:
    try:
        digest = file.digest
    except Exception as exc:
        raise CardUnusable(f"{name}: {exc}") from exc
    size = file.size if isinstance(file.size, int) else None
    if size is not None and not 0 <= size <= LIMITS[name]:
        raise CardUnusable(f"{name}: {size} bytes; at most {LIMITS[name]} are taken")
    return CardFile(name, file.path, digest, size)


def _chosen(file: object) -> CheckedFile | None:
    return file if isinstance(file, CheckedFile) else None


def _template_of(card: CardJson) -> CheckedFile | None:
    template = getattr(card.chat_template_file, "hf_chat_template", None)
    return _chosen(getattr(template, "file", None))


# In the card's own order. A part that is absent is None or UNSET and has no such attribute.
_PLACES: dict[str, Callable[[CardJson], CheckedFile | None]] = {
    CONFIG: lambda card: _chosen(getattr(card.model_info, "hf_config_json", None)),
    TOKENIZER: lambda card: _chosen(getattr(card.tokenizer, "hf_tokenizer_json", None)),
    TOKENIZER_CONFIG: lambda card: _chosen(
        getattr(card.prompt_formatter, "hf_tokenizer_config_json", None)
    ),
    CHAT_TEMPLATE: _template_of,
    GENERATION_CONFIG: lambda card: _chosen(
        getattr(card.gen_config, "hf_generation_config_json", None)
    ),
}


def digest_of(content: bytes) -> str:
    """The hex digits of the BLAKE3 checksum."""
    return blake3.blake3(content).hexdigest()


def read_file(path: str | Path, limit: int) -> bytes:
    """The whole content of a regular file. Blocks; links are followed.

    Raises:
        FileUnusable: missing, not to be read, not a regular file, or longer than ``limit``.
    """
    try:
        return _read(path, limit)
    except (OSError, ValueError) as exc:  # ValueError: a NUL byte in the path
        reason = getattr(exc, "strerror", None) or str(exc)
        raise FileUnusable(f"{_shown(path)}: {reason}") from exc


def is_missing(error: FileUnusable) -> bool:
    """Was there no such file? (Then another place may have it.)"""
    missing = (errno.ENOENT, errno.ENOTDIR)
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in missing


def _read(path: str | Path, limit: int) -> bytes:
    _check_kind(os.stat(path), path)  # opening a device may already have an effect
    # Without O_NONBLOCK a pipe that took the file's place would be waited for without end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(descriptor, "rb", buffering=0) as file:
        _check_kind(os.fstat(descriptor), path)
        content = bytearray()
        while chunk := file.read(min(_CHUNK, limit + 1 - len(content))):
            content += chunk
            if len(content) > limit:
                raise FileUnusable(f"{_shown(path)}: longer than {limit} bytes")
        return bytes(content)


def _check_kind(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileUnusable(f"{_shown(path)}: not a regular file")


def _shown(path: str | Path) -> str:
    text = os.fspath(path)[:300]
    return text if text.isprintable() else ascii(text)
