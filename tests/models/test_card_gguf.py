"""A card for a model that is a GGUF file."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.models.gguf_folder import _CUTS, gguf_folder
from dynamo_trio.testing import make_model_folder
from dynamo_trio.testing.model_folder import WORDS
from dynamo_trio.tokenizers import Tokenizer, load_tokenizer
from dynamo_trio.wire.names import EndpointId
from tests.wire.test_gguf import gguf, pair, string, u32, u64

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GENERATE = EndpointId("dynamo", "backend", "generate")


# --- the real thing ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(model_path: Path) -> Iterator[Tokenizer]:
    tokenizer = load_tokenizer(model_path)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def made(model_path: Path, own: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_folder(model_path, tmp_path_factory.mktemp("cache"), own)


@pytest.mark.llama
def test_the_folder_is_the_model(made: Path, own: Tokenizer) -> None:
    tokenizer = load_tokenizer(made)
    for name in ("vocab_size", "bos_token_id", "bos_token", "eos_token", "chat_template"):
        assert getattr(tokenizer, name) == getattr(own, name)
    assert tokenizer.eos_token_ids == own.eos_token_ids
    assert tokenizer.context_length == own.context_length


@pytest.mark.llama
def test_it_gives_the_same_tokens_as_llama_cpp(made: Path, own: Tokenizer) -> None:
    tokenizer = load_tokenizer(made)
    draw = random.Random(1)
    codes = [*range(1, 0x250), *range(0x370, 0x5FF), *range(0x900, 0x980), *range(0x2000, 0x2070)]
    odd = [chr(code) for code in [*codes, 0x1F600, 0x4E00, 0x597D, 0xFEFF, 0x3000]]
    plain = [" ", "  ", "\n", "\r\n", "'s", "'RE", "12", "don't", "<|im_end|>", *WORDS]
    for _ in range(2000):
        pieces = [draw.choice(draw.choice((odd, plain))) for _ in range(draw.randrange(1, 30))]
        text = "".join(pieces)
        assert tokenizer.encode(text, add_special=True) == own.encode(text, add_special=True)


@pytest.mark.llama
def test_it_makes_a_card(made: Path) -> None:
    card = make_card(made, name="smol", endpoint=GENERATE, instance_id=1)
    assert card.context_length == 8192
    assert card.model_type == {"chat", "completions"}


# --- small files that no engine could run ------------------------------------------------------


@attrs.frozen
class Small:
    """A GGUF file with the vocabulary of the folder that is made for tests."""

    folder: Path
    path: Path

    def write(self, **changes: Any) -> Path:
        parts = json.loads((self.folder / "tokenizer.json").read_text())
        tokens = [text for text, _ in sorted(parts["model"]["vocab"].items(), key=lambda p: p[1])]
        kinds = [3 if n < 3 else 1 for n in range(len(tokens))]
        fields: dict[str, object] = {
            "model": "gpt2",
            "pre": "llama-bpe",
            "tokens": tokens,
            "token_type": kinds,
        }
        fields |= {"merges": [], "add_bos_token": False} | changes
        pairs = [pair(b"general.architecture", 8, string(b"llama"))]
        pairs += [pair(b"llama.context_length", 4, u32(8192))]
        for name, value in fields.items():
            if value is not None:
                pairs.append(pair(f"tokenizer.ggml.{name}".encode(), *encoded(value)))
        self.path.write_bytes(gguf(pairs, []))
        return self.path


def encoded(value: object) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, string(value.encode())
    if isinstance(value, bool):
        return 7, bytes([value])
    assert isinstance(value, list)
    if value and isinstance(value[0], int):
        return 9, u32(5) + u64(len(value)) + struct.pack(f"<{len(value)}i", *value)
    return 9, u32(8) + u64(len(value)) + b"".join(string(text.encode()) for text in value)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return make_small(tmp_path)


def make_small(tmp_path: Path) -> Small:
    folder = make_model_folder(tmp_path / "model")
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["pre_tokenizer"] = _CUTS["llama-bpe"]  # the family that ignores merges, as the folder
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    return Small(folder, tmp_path / "model.gguf")


def test_a_small_file(small: Small, tmp_path: Path) -> None:
    own = load_tokenizer(small.folder)
    path = small.write()
    folder = gguf_folder(path, tmp_path / "cache", own)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|> the people", add_special=True) == own.encode(
        "<|im_start|> the people", add_special=True
    )
    assert gguf_folder(path, tmp_path / "cache", own) == folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama"}, "it is 'llama' with 'llama-bpe'; known are 'gpt2' with gpt-2"),
        ({"pre": "deepseek-r1-qwen"}, "with 'deepseek-r1-qwen'"),
        ({"tokens": None}, "it has no tokenizer.ggml.tokens"),
        ({"token_type": None}, "it has no tokenizer.ggml.token_type"),
        ({"token_type": [1]}, "zip"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token is in it twice"),
        ({"merges": ["a b c"]}, "'a b c' is no merge"),
        ({"merges": ["ab"]}, "'ab' is no merge"),
        ({"merges": ["q zz"]}, "not a usable tokenizer"),
        ({"pre": "gpt-2"}, "gives other tokens for"),  # this family does not ignore merges
        ({"add_bos_token": True}, "gives other tokens for"),
    ],
)
def test_what_would_be_wrong_is_not_published(
    small: Small, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LoadError, match=reason):
        gguf_folder(small.write(**changes), tmp_path / "cache", load_tokenizer(small.folder))


def test_a_file_that_is_none(small: Small, tmp_path: Path) -> None:
    own = load_tokenizer(small.folder)
    with pytest.raises(FileUnusable, match="No such file"):
        gguf_folder(tmp_path / "none.gguf", tmp_path / "cache", own)
    small.path.write_bytes(b"no GGUF")
    with pytest.raises(LoadError, match="magic"):
        gguf_folder(small.path, tmp_path / "cache", own)
    small.path.write_bytes(b"")
    with pytest.raises(LoadError, match="empty"):
        gguf_folder(small.path, tmp_path / "cache", own)
