"""The tokenizer inside a GGUF file, by llama.cpp itself (the ``cyllama`` wheel).

Theory of operation
-------------------
Encoding calls llama.cpp, so ids are exact by construction. Decoding does not: the
bytes of each token are read once at load into a table, since the wheel's own
``token_to_piece`` returns text and loses a character that is cut between tokens.

Four facts about the wheel shape the code:

* Loading the vocabulary alone (``vocab_only``) aborts the process. Loading without
  allocating tensors (``no_alloc``, which excludes ``use_mmap``) works, takes 0.15 s
  and 50 MB for a 135M model, and still notices a truncated file.
* An id outside of the vocabulary aborts the process: no id from outside is ever
  passed to it.
* The vocabulary is borrowed from the model: using it after ``close()`` is a
  segmentation fault. Hence the count of callers inside, for which ``close`` waits.
* ``tokenize`` releases the GIL and was seen to be safe from several threads at once.

One call costs 50 us for each piece of plain text between special tokens, and a time that
grows with the square of the number of special tokens. Chat prompts are full of both, and
most of the pieces come again and again. So, where that is exact (:func:`_splitter`), the
text is cut at special tokens here, and short pieces are remembered.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dynamo_trio.errors import EngineClosed, FileUnusable, LoadError
from dynamo_trio.tokenizers.abc import (
    MAX_VOCABULARY,
    TableDecoder,
    TokenTable,
    byte_level_piece,
    sentencepiece_piece,
)
from dynamo_trio.tokenizers.gguf_file import check_gguf_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence
    from pathlib import Path

_BYTE_LEVEL = 2
# llama.cpp's enum llama_vocab_type, of which only these two are generative models' own.
_PIECES: dict[int, Callable[[str], bytes]] = {1: sentencepiece_piece, 2: byte_level_piece}
# llama.cpp's enum llama_token_attr, a bit mask.
_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1, 2, 8, 16, 128, 256
_SPECIAL = _UNKNOWN | _CONTROL | _USER_DEFINED

#: Characters of a piece that is remembered, and how many pieces are.
_SHORT, _REMEMBERED = 256, 4096


class GgufTokenizer:
    """A model file's own tokenizer. Close it when the last request has gone.

    Raises:
        FileUnusable: no such file, or it may not be read.
        LoadError: not a GGUF file, damaged, or a kind of vocabulary not known here.
    """

    def __init__(self, path: Path) -> None:
        self._idle = threading.Condition()
        self._inside = 0  # callers in llama.cpp; guarded by _idle
        self._closed = False  # once true, nobody enters; guarded by _idle
        self._model: Any = _load(path)
        self._vocab: Any = self._model.get_vocab()
        try:
            self._read()
        except BaseException:
            self._model.close()
            raise

    def _read(self) -> None:
        vocab = self._vocab
        self.vocab_size = _count(vocab.n_vocab)
        texts = [vocab.get_text(token) for token in range(self.vocab_size)]
        kinds = [vocab.get_attr(token) for token in range(self.vocab_size)]
        self._table = _table(int(vocab.vocab_type), texts, kinds)
        special = {text: n for n, text in enumerate(texts) if text and kinds[n] & _SPECIAL}
        self._special_ids = special
        self._split = _splitter(int(vocab.vocab_type), special, kinds)
        self._remembered = functools.lru_cache(_REMEMBERED)(self._tokenize)
        self.eos_token_ids = tuple(n for n in range(self.vocab_size) if vocab.is_eog(n))
        self.bos_token_id = _known(vocab.token_bos(), self.vocab_size)
        eos = _known(vocab.token_eos(), self.vocab_size)
        self.bos_token = "" if self.bos_token_id is None else texts[self.bos_token_id]
        self.eos_token = "" if eos is None else texts[eos]
        self.chat_template: str | None = self._model.get_default_chat_template() or None
        self.context_length: int | None = self._model.n_ctx_train or None
        self.fingerprint = _fingerprint(texts, self.chat_template)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        text.encode()  # a lone surrogate raises here, whatever the wheel would do
        if self._closed:  # also for what is remembered
            raise EngineClosed("The tokenizer is closed.")
        if add_special or self._split is None:
            return list(self._tokenize(text, add_special))
        ids: list[int] = []
        for piece in filter(None, self._split.split(text)):
            ids += self._piece(piece)
        return ids

    def _piece(self, text: str) -> tuple[int, ...]:
        """A special token, or plain text between two of them."""
        if (special := self._special_ids.get(text)) is not None:
            return (special,)
        return (self._remembered if len(text) <= _SHORT else self._tokenize)(text)

    def _tokenize(self, text: str, add_special: bool = False) -> tuple[int, ...]:
        with self._entered():
            return tuple(self._vocab.tokenize(text, add_special, True))

    def least_tokens(self, text: str) -> int:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.least_tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.decode(ids)

    def decoder(self) -> TableDecoder:
        """See :class:`~dynamo_trio.tokenizers.abc.Tokenizer`."""
        return self._table.decoder()

    def close(self) -> None:
        """Free llama.cpp's model; waits for calls of other threads. Idempotent."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._inside == 0)
        self._model.close()

    @contextmanager
    def _entered(self) -> Generator[None]:
        with self._idle:
            if self._closed:
                raise EngineClosed("The tokenizer is closed.")
            self._inside += 1
        try:
            yield
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()


def _load(path: Path) -> Any:
    """The model without its tensors."""
    try:
        from cyllama.llama import llama_cpp
    except ImportError as exc:
        raise LoadError(
            "A GGUF file needs the llama extra: pip install 'dynamo-trio[llama]'"
        ) from exc
    llama_cpp.disable_logging()  # hundreds of lines on stderr otherwise; errors still raise
    params = llama_cpp.LlamaModelParams()
    params.no_alloc, params.use_mmap, params.n_gpu_layers = True, False, 0
    try:
        # llama.cpp aborts on some broken files, and the wheel does not tell missing from denied
        check_gguf_file(path)
        return llama_cpp.LlamaModel(str(path), params)
    except OSError as exc:
        raise FileUnusable(f"{path}: {exc.strerror or exc}") from exc
    except (ValueError, RuntimeError) as exc:
        raise LoadError(f"{path}: not a usable GGUF model: {exc}") from exc


def _splitter(
    kind: int, specials: Mapping[str, int], attributes: Sequence[int]
) -> re.Pattern[str] | None:
    """A pattern that cuts a text at special tokens exactly as llama.cpp does; None if unsure.

    llama.cpp looks for one special token after the other in the whole text. That is the
    same as looking for all of them from left to right only if no two can overlap. And
    pieces can be encoded apart only if the vocabulary is byte-level (SentencePiece looks at
    what stands before) and no special token swallows the spaces around it.
    """
    if kind != _BYTE_LEVEL or not specials or _can_overlap(specials):
        return None
    if any(attributes[token] & (_LSTRIP | _RSTRIP) for token in specials.values()):
        return None
    return re.compile("(" + "|".join(map(re.escape, specials)) + ")")


def _can_overlap(texts: Collection[str]) -> bool:
    """Can two of these overlap in a text: one inside another, or an end like a beginning?"""
    beginnings = {text[:n] for text in texts for n in range(1, len(text))}
    for text in texts:
        inner = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1))
        if any(part in texts and part != text for part in inner):
            return True
        if any(text[n:] in beginnings for n in range(1, len(text))):
            return True
    return False


def _table(kind: int, texts: Sequence[str], attributes: Sequence[int]) -> TokenTable:
    to_bytes = _PIECES.get(kind)
    if to_bytes is None:
        raise LoadError(f"The model's vocabulary is of a kind not known here (type {kind}).")
    pieces = [_piece(*pair, to_bytes) for pair in zip(texts, attributes, strict=True)]
    specials = [
        text
        for text, attribute in zip(texts, attributes, strict=True)
        if attribute & (_CONTROL | _USER_DEFINED)
    ]
    return TokenTable(pieces, specials)


def _piece(text: str, attribute: int, to_bytes: Callable[[str], bytes]) -> bytes:
    if attribute & (_CONTROL | _UNKNOWN | _UNUSED):
        return b""
    return text.encode("utf-8", "replace") if attribute & _USER_DEFINED else to_bytes(text)


def _count(value: Any) -> int:
    # A property in one release of the wheel, a method in another.
    count = int(value() if callable(value) else value)
    if not 0 < count <= MAX_VOCABULARY:
        raise LoadError(f"The model's vocabulary has {count} tokens.")
    return count


def _known(token: int, vocab_size: int) -> int | None:
    return token if 0 <= token < vocab_size else None


def _fingerprint(texts: Sequence[str], template: str | None) -> str:
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace"))
    digest.update(b"\0" + (template or "").encode("utf-8", "replace"))
    return digest.hexdigest()
