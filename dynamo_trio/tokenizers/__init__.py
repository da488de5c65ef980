"""Text to token ids and back, exact to each model's own tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import FileUnusable
from dynamo_trio.tokenizers.abc import IncrementalDecoder as IncrementalDecoder
from dynamo_trio.tokenizers.abc import Tokenizer as Tokenizer
from dynamo_trio.tokenizers.bytes_ import ByteTokenizer as ByteTokenizer
from dynamo_trio.tokenizers.preprocess import OutputProcessor as OutputProcessor
from dynamo_trio.tokenizers.preprocess import Preprocessor as Preprocessor

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ByteTokenizer",
    "IncrementalDecoder",
    "OutputProcessor",
    "Preprocessor",
    "Tokenizer",
    "load_tokenizer",
]


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a GGUF file or of a model folder; without a path, one token per byte.

    Blocks while it reads (0.1 to 1 s): call it in a thread, or before the event loop.
    The packages that it needs are imported here and not before.

    Raises:
        FileUnusable: a file is missing or may not be read.
        LoadError: a file is damaged, not a tokenizer, or its package is not installed.
    """
    if path is None:
        return ByteTokenizer()
    if not path.exists():
        raise FileUnusable(f"{path}: no such file or folder")
    if path.is_dir():
        from dynamo_trio.tokenizers.hf import HfTokenizer

        return HfTokenizer(path)
    if not path.is_file():  # a pipe would be waited for without end
        raise FileUnusable(f"{path}: not a regular file")
    from dynamo_trio.tokenizers.gguf import GgufTokenizer

    return GgufTokenizer(path)
