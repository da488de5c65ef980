"""A Hugging Face model folder's tokenizer, by the ``tokenizers`` package.

Read are ``tokenizer.json`` and, where present, ``tokenizer_config.json``,
``chat_template.jinja``, ``generation_config.json`` and ``config.json``.

Byte-level vocabularies (all recent models) are decoded by the same table as GGUF
files; other kinds by the package, with a window of tokens (:class:`WindowDecoder`).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.tokenizers.abc import MAX_VOCABULARY, TokenTable, byte_level_piece

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import tokenizers

    from dynamo_trio.tokenizers.abc import IncrementalDecoder

Json = Any


class HfTokenizer:
    """The tokenizer of a model folder.

    Raises:
        FileUnusable: a file is missing or may not be read.
        LoadError: a file is damaged, or the ``hf`` extra is not installed.
    """

    def __init__(self, folder: Path) -> None:
        source = _read(folder / "tokenizer.json")
        self._tokenizer = _parse(source, folder)
        config = _optional(folder / "tokenizer_config.json")
        generation = _optional(folder / "generation_config.json")
        model = _optional(folder / "config.json")
        self.vocab_size = _vocab_size(self._tokenizer)
        self._table = _table(json.loads(source), self._tokenizer, self.vocab_size)
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.bos_token_id = self._tokenizer.token_to_id(self.bos_token)
        self.eos_token_ids = self._eos(generation, model)
        self.chat_template = _template(folder, config)
        self.context_length = _context_length(model, config)
        rest = repr((self.bos_token, self.eos_token, self.chat_template))
        self.fingerprint = hashlib.sha256(source + rest.encode("utf-8", "replace")).hexdigest()

    def _eos(self, generation: dict[str, Json], model: dict[str, Json]) -> tuple[int, ...]:
        named = generation.get("eos_token_id", model.get("eos_token_id"))
        ids = named if isinstance(named, list) else [named]
        ids = [*ids, self._tokenizer.token_to_id(self.eos_token)]
        return tuple(sorted({n for n in ids if isinstance(n, int) and 0 <= n < self.vocab_size}))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        text.encode()  # a lone surrogate raises here
        # `encode` holds the GIL all the while, this does not: a long prompt in a thread must not
        # hold up the event loop, for seconds at a megabyte.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return encoding.ids

    def least_tokens(self, text: str) -> int:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        # A vocabulary that is not byte-level may shorten the text (spaces, unknown words).
        return self._table.least_tokens(text) if self._table is not None else 0

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        if self._table is not None:
            return self._table.decode(ids)
        return decode_known(self._tokenizer, self.vocab_size, ids)

    def decoder(self) -> IncrementalDecoder:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        if self._table is not None:
            return self._table.decoder()
        return WindowDecoder(self._tokenizer, self.vocab_size)

    def close(self) -> None:
        """Nothing but memory is held."""


def decode_known(tokenizer: tokenizers.Tokenizer, vocab_size: int, ids: Sequence[int]) -> str:
    """Decode what the vocabulary has; see :func:`~dynamo_trio.tokenizers.abc.piece_of`."""
    return tokenizer.decode([n for n in ids if 0 <= n < vocab_size], skip_special_tokens=True)


class WindowDecoder:
    """Decodes through the package, holding a window of tokens for context.

    How a token reads may depend on the one before it (a space at the start of a word),
    so each step decodes from a few tokens back and takes the difference. A text that
    ends in U+FFFD may be an unfinished character and waits for more.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ids: list[int] = []  # the window: tokens shown, for context, then those waiting
        self._shown = 0  # how many of the window were shown

    @property
    def is_fresh(self) -> bool:
        """Never: how a token reads depends on the one before it."""
        return False

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        return "".join([self._push(token) for token in ids])

    def _push(self, token: int) -> str:
        self._ids.append(token)
        # No character has more than four bytes: what still ends badly then is no UTF-8.
        return self._take(must=len(self._ids) - self._shown > 4)

    def flush(self) -> str:
        """What was waiting."""
        return self._take(must=True)

    def _take(self, *, must: bool) -> str:
        before = self._decode(self._ids[: self._shown])
        now = self._decode(self._ids)
        if not must and (now.endswith("\ufffd") or len(now) <= len(before)):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_known(self._tokenizer, self._vocab_size, ids)


def _parse(source: bytes, folder: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as exc:
        raise LoadError("A model folder needs the hf extra: pip install 'dynamo-trio[hf]'") from exc
    try:
        return tokenizers.Tokenizer.from_str(source.decode())
    except Exception as exc:  # the package raises plain Exception
        raise LoadError(f"{folder}/tokenizer.json: not a usable tokenizer: {exc}") from exc


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < size <= MAX_VOCABULARY:
        raise LoadError(f"The model's vocabulary has {size} tokens.")
    return size


def _table(
    source: dict[str, Json], tokenizer: tokenizers.Tokenizer, vocab_size: int
) -> TokenTable | None:
    """The bytes of each token, if the vocabulary is byte-level and nothing else."""
    if (source.get("decoder") or {}).get("type") != "ByteLevel" or source.get("normalizer"):
        return None
    pieces = [b""] * vocab_size
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        pieces[token] = byte_level_piece(text)
    added = tokenizer.get_added_tokens_decoder()
    for token, entry in added.items():
        # An ordinary added token goes through the same byte alphabet, as in the package.
        pieces[token] = b"" if entry.special else byte_level_piece(entry.content)
    return TokenTable(pieces, [entry.content for entry in added.values()])


def _token_text(value: Json) -> str:
    """A special token in ``tokenizer_config.json``: text, or an object around it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template(folder: Path, config: dict[str, Json]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _context_length(model: dict[str, Json], config: dict[str, Json]) -> int | None:
    # "model_max_length" is often an absurd number that means "not known".
    for value in (model.get("max_position_embeddings"), config.get("model_max_length")):
        if isinstance(value, int) and 0 < value < 10**9:
            return value
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise FileUnusable(f"{path}: {exc.strerror or exc}") from exc


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as exc:
        raise LoadError(f"{path}: not UTF-8") from exc


def _optional(path: Path) -> dict[str, Json]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as exc:
        raise LoadError(f"{path}: not valid JSON: {exc}") from exc
    return value if isinstance(value, dict) else {}
