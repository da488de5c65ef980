"""What every tokenizer offers, and the part that all of them share: token bytes to text.

Theory of operation
-------------------
A token stands for bytes, not for characters: a character may be cut in two by a token
boundary. A decoder therefore turns ids into bytes by a table and bytes into text by an
incremental UTF-8 decoder, which keeps an unfinished character until its rest arrives.
The joined text is the same however the ids were grouped, and equal to decoding all
of them at once; bytes that are no UTF-8 become U+FFFD.

Special tokens (``<|im_end|>`` and such) are parsed in *any* text, the user's included,
as llama.cpp and Hugging Face do by default: a user who writes the text of a special
token gets the token. They are never shown in the answer.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Ids below this may be asked about; it also bounds the table of a hostile file.
MAX_VOCABULARY = 4_000_000


class IncrementalDecoder(Protocol):
    """Ids of one answer, in order, to text. Not shared between answers."""

    @property
    def is_fresh(self) -> bool:
        """Does what comes next read as if nothing had come before?"""
        ...

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; an unfinished character waits."""
        ...

    def flush(self) -> str:
        """What was waiting, with U+FFFD for what stayed incomplete. The answer has ended."""
        ...


class Tokenizer(Protocol):
    """A model's vocabulary. Every method is synchronous, and safe from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are ``0 <= id < vocab_size``."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, ascending."""
        ...

    @property
    def bos_token(self) -> str:
        """Its text, for chat templates; empty without one."""
        ...

    @property
    def eos_token(self) -> str:
        """The main one's text, for chat templates; empty without one."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source, if the model came with one."""
        ...

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was trained for, if known."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest, equal for two tokenizers that give equal ids and texts."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of ``text``. ``add_special``: with what the model wants around a text.

        Raises:
            UnicodeEncodeError: the text has a lone surrogate.
            EngineClosed: the tokenizer was closed.
        """
        ...

    def least_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least. Cheap: to refuse before encoding.

        Assumes that the vocabulary can write every byte; one that lacks a few control
        characters gives fewer tokens for a text made of them.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ``ids``, special tokens left out. An id without text gives none."""
        ...

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder for one answer."""
        ...

    def close(self) -> None:
        """Free what the tokenizer holds, once no other thread is in it. Idempotent."""
        ...


class TokenTable:
    """The bytes of every token, special ones empty; immutable, so threads share it freely."""

    def __init__(self, pieces: Sequence[bytes], specials: Iterable[str] = ()) -> None:
        self.pieces = tuple(pieces)
        self._longest = max(map(len, self.pieces), default=0) or 1
        # Longest first: of two that begin alike, the tokenizer takes the longer.
        texts = sorted(filter(None, specials), key=len, reverse=True)
        self._longest = max(self._longest, *(len(text.encode()) for text in texts), 1)
        self._specials = re.compile("|".join(map(re.escape, texts))) if texts else None

    def decode(self, ids: Sequence[int]) -> str:
        """All of ``ids`` at once."""
        return self._bytes(ids).decode("utf-8", "replace")

    def decoder(self) -> TableDecoder:
        """A fresh decoder for one answer."""
        return TableDecoder(self.pieces)

    def least_tokens(self, text: str) -> int:
        """No token is longer than the longest; every special token in the text is one."""
        by_length = -(-len(text.encode("utf-8", "replace")) // self._longest)
        if self._specials is None or by_length < 16:
            return by_length
        # Tokenizers may take quadratic time in the number of special tokens.
        return max(by_length, sum(1 for _ in self._specials.finditer(text)))

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join([piece_of(self.pieces, token) for token in ids])


def piece_of(pieces: Sequence[bytes], token: int) -> bytes:
    """The token's bytes; none for an id outside of the table.

    Models pad their output beyond the vocabulary, so such an id is possible, and a
    negative one must not count from the end.
    """
    return pieces[token] if 0 <= token < len(pieces) else b""


class TableDecoder:
    """Incremental decoding by a table of token bytes."""

    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""  # of a character that is not complete

    @property
    def is_fresh(self) -> bool:
        """Does no character wait for its rest?"""
        return not self._rest

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        data = self._rest + b"".join([piece_of(self._pieces, token) for token in ids])
        text, taken = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[taken:]
        return text

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else nothing."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


# --- the byte alphabet of GPT-2 --------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte value, reversed.

    Byte-level vocabularies write a token's bytes with these characters: printable
    Latin-1 stands for itself, the other 68 values follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level_piece(text: str) -> bytes:
    """The bytes of a byte-level token; a character outside of the alphabet is itself."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode("utf-8", "replace")


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def sentencepiece_piece(text: str) -> bytes:
    """The bytes of a SentencePiece token: U+2581 is a space, ``<0x0A>`` a byte."""
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\u2581", " ").encode("utf-8", "replace")
