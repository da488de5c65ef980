"""A model folder with a vocabulary of an ordinary size.

Dynamo's mocker draws token ids from the range of ordinary vocabularies; in the tiny one of the
tests most of them would be no text, and nothing would have to be sent.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Final

from dynamo_trio.testing import make_model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE: Final = 49152


def make_ordinary_model(path: Path) -> Path:
    """Make the folder ``path``; its tokens are made-up words of up to six letters."""
    make_model_folder(path)
    source = json.loads((path / "tokenizer.json").read_text())
    vocabulary = source["model"]["vocab"]
    for text in _words():
        if len(vocabulary) >= SIZE:
            break
        vocabulary.setdefault(text, len(vocabulary))
    (path / "tokenizer.json").write_text(json.dumps(source))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": len(vocabulary)}))
    return path


def _words() -> Iterator[str]:
    """Words, each also behind a space (U+0120 in byte-level vocabularies)."""
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnprstvwyz", "aeiou")]
    for length in itertools.count(1):
        for parts in itertools.product(syllables, repeat=length):
            word = "".join(parts)
            yield from (word, f"\u0120{word}")
