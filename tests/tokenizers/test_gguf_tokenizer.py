"""The tokenizer inside the default model's GGUF file."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import EngineClosed, FileUnusable, LoadError
from dynamo_trio.tokenizers import load_tokenizer
from dynamo_trio.tokenizers.abc import BYTE_ALPHABET
from dynamo_trio.tokenizers.gguf import GgufTokenizer, _splitter, _table
from dynamo_trio.tokenizers.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

llama = pytest.mark.llama

TEXTS = [
    "",
    " ",
    "Why is the sky blue?",
    "  leading, trailing  \n\n\ttabs\r\n",
    "Grüße 😀👨‍👩‍👧 好 مرحبا हिन्दी \u2028 \ufeff",
    "1234567890 3.14 x^2 don't we'll I'M",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name><|im_end",
    "a\0b",
    "x" * 3000,
    "def f(x):\n    return {'a': [1, 2]}\n" * 20,
]


@pytest.fixture(scope="module")
def gguf(model_path: Path) -> Iterator[GgufTokenizer]:
    tokenizer = load_tokenizer(model_path)
    assert isinstance(tokenizer, GgufTokenizer)
    yield tokenizer
    tokenizer.close()


@llama
def test_what_the_file_says(gguf: GgufTokenizer) -> None:
    assert (gguf.vocab_size, gguf.context_length) == (49152, 8192)
    assert (gguf.bos_token, gguf.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (gguf.bos_token_id, gguf.eos_token_ids) == (1, (0, 2, 4))
    assert "<|im_start|>" in (gguf.chat_template or "")
    assert len(gguf.fingerprint) == 64


@llama
@pytest.mark.parametrize("text", TEXTS)
def test_texts_round_trip(gguf: GgufTokenizer, text: str) -> None:
    ids = gguf.encode(text, add_special=False)
    shown = text
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"):
        shown = shown.replace(special, "")
    assert gguf.decode(ids) == shown
    assert gguf.least_tokens(text) <= len(ids)


@llama
def test_every_token_reads_as_llama_cpp_reads_it(gguf: GgufTokenizer) -> None:
    vocab = gguf._vocab
    for token, piece in enumerate(gguf._table.pieces):
        assert piece.decode("utf-8", "replace") == vocab.token_to_piece(token, 0, False)


@llama
@given(st.data())
def test_grouping_changes_nothing(gguf: GgufTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, gguf.vocab_size)))
    decoder = gguf.decoder()
    assert "".join([decoder.push([token]) for token in ids]) + decoder.flush() == gguf.decode(ids)


SPECIALS = ["<|im_start|>", "<|im_end|>", "<repo_name>", "<|im_", "end|>", "<", "|>"]
CHATS = st.lists(st.sampled_from([*SPECIALS, " ", "\n", "user\n", "1", "é"]) | st.text(max_size=5))


@llama
@given(CHATS.map("".join))
def test_cutting_at_special_tokens_changes_nothing(gguf: GgufTokenizer, text: str) -> None:
    assert gguf._split is not None
    whole = gguf._vocab.tokenize(text, False, True)
    assert gguf.encode(text, add_special=False) == whole
    assert gguf.encode(text, add_special=True) == gguf._vocab.tokenize(text, True, True)


@llama
def test_many_special_tokens_take_no_square_of_time(gguf: GgufTokenizer) -> None:
    # llama.cpp alone takes 26 s for these.
    assert len(gguf.encode("<|im_end|>" * 100_000, add_special=False)) == 100_000


@pytest.mark.parametrize(
    ("kind", "texts", "attribute", "cuts"),
    [
        (2, ["<a>", "<b>"], 8, True),
        (2, ["<a>", "<a>b"], 8, False),  # one inside another
        (2, ["<a>", "x<a>x"], 8, False),
        (2, ["<a", "a>"], 8, False),  # an end like a beginning
        (2, ["<a<"], 8, False),  # with itself
        (2, ["<a>"], 8 | 128, False),  # swallows spaces
        (1, ["<a>"], 8, False),  # SentencePiece
        (2, [], 8, False),
    ],
)
def test_text_is_cut_only_where_that_is_exact(
    kind: int, texts: list[str], attribute: int, cuts: bool
) -> None:
    specials = {text: n for n, text in enumerate(texts)}
    assert (_splitter(kind, specials, [attribute] * len(texts)) is not None) == cuts


def as_folder(gguf: GgufTokenizer, folder: Path) -> Path:
    """The same vocabulary as a Hugging Face folder, read out of the file's metadata."""
    vocab = gguf._vocab
    texts = [vocab.get_text(token) for token in range(gguf.vocab_size)]
    from cyllama.llama.llama_cpp import GGUFContext

    context = GGUFContext.from_file(gguf._model.path_model)
    merges = [tuple(pair.split(" ")) for pair in context.get_value("tokenizer.ggml.merges")]
    context.close()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: token for token, text in enumerate(texts)}, merges)
    )
    tokenizer.add_special_tokens([t for n, t in enumerate(texts) if vocab.is_control(n)])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": gguf.bos_token, "eos_token": gguf.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def hf(gguf: GgufTokenizer, tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(as_folder(gguf, tmp_path_factory.mktemp("hf") / "model"))


@llama
@pytest.mark.parametrize("text", TEXTS)
def test_a_folder_made_of_it_gives_the_same_ids(
    gguf: GgufTokenizer, hf: HfTokenizer, text: str
) -> None:
    assert gguf.encode(text, add_special=False) == hf.encode(text, add_special=False)


# A few control characters are no token of this vocabulary: llama.cpp leaves them out after
# it has merged their neighbours, the tokenizers package before. And code points that are not
# assigned, or mean nothing outside a private agreement, are letters to the one and not to the
# other. Ours is llama.cpp's own in any case.
WRITABLE = st.text(
    st.characters(exclude_categories=["Cc", "Cn", "Co", "Cs"], include_characters="\t\n\r")
)


@llama
@given(text=WRITABLE)
def test_any_text_gives_the_same_ids(gguf: GgufTokenizer, hf: HfTokenizer, text: str) -> None:
    ids = gguf.encode(text, add_special=False)
    assert gguf.decode(ids) == hf.decode(ids)
    assert ids == hf.encode(text, add_special=False)


@llama
def test_threads_share_it_and_closing_waits_for_them(model_path: Path) -> None:
    tokenizer = GgufTokenizer(model_path)
    text = TEXTS[2] * 20  # too long to be remembered: every call goes into llama.cpp
    right = tokenizer.encode(text, add_special=False)
    results: list[object] = []
    started = threading.Barrier(5)

    def work() -> None:
        started.wait()
        try:
            while len(results) < 100_000:
                results.append(tokenizer.encode(text, add_special=False) == right)
        except EngineClosed as exc:
            results.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    while len(results) < 20:
        time.sleep(0.001)
    tokenizer.close()  # a use after it would end this process with a segmentation fault
    tokenizer.close()
    for thread in threads:
        thread.join()
    closed = [result for result in results if isinstance(result, EngineClosed)]
    assert len(closed) == 4
    assert all(result is True for result in results if result not in closed)
    assert tokenizer.decode(right) == text  # the table is ours


@llama
def test_a_vocabulary_of_absurd_size(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_trio.tokenizers.gguf.MAX_VOCABULARY", 1000)
    with pytest.raises(LoadError, match="49152 tokens"):
        GgufTokenizer(model_path)


@llama
def test_a_whole_file_that_is_no_model(tmp_path: Path) -> None:
    # A right header with nothing in it: only llama.cpp itself can tell.
    (tmp_path / "model.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(64))
    with pytest.raises(LoadError, match="not a usable GGUF model"):
        load_tokenizer(tmp_path / "model.gguf")


@llama
def test_what_is_remembered_is_closed_too(model_path: Path) -> None:
    tokenizer = GgufTokenizer(model_path)
    tokenizer.encode("hi", add_special=False)
    tokenizer.close()
    for add_special in (False, True):
        with pytest.raises(EngineClosed):
            tokenizer.encode("hi", add_special=add_special)


@llama
def test_a_lone_surrogate_is_an_error(gguf: GgufTokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        gguf.encode("\ud800", add_special=False)


@llama
@pytest.mark.parametrize("size", [0, 3, 100, 3_000_000, 90_000_000])
def test_a_truncated_file(model_path: Path, tmp_path: Path, size: int) -> None:
    damaged = tmp_path / "model.gguf"
    with model_path.open("rb") as whole:
        damaged.write_bytes(whole.read(size))
    with pytest.raises(LoadError, match="not a usable GGUF model"):
        load_tokenizer(damaged)


@llama
def test_a_file_of_another_kind(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(LoadError, match="not a usable GGUF model"):
        load_tokenizer(other)


@llama
def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="directory"):
        GgufTokenizer(tmp_path)
    with pytest.raises(FileUnusable, match="No such file"):
        GgufTokenizer(tmp_path / "nowhere.gguf")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "cyllama", None)
    monkeypatch.setitem(sys.modules, "cyllama.llama", None)
    with pytest.raises(LoadError, match="llama extra"):
        load_tokenizer(tmp_path / "model.gguf")


def test_tables_of_both_kinds() -> None:
    control, user, normal, unknown = 8, 16, 4, 1
    attributes = [unknown, control, user, normal]
    byte_level = _table(2, ["<unk>", "<s>", "<é>", "Ġé"], attributes)
    assert byte_level.pieces == (b"", b"", "<é>".encode(), b" \xe9")
    sentencepiece = _table(1, ["<unk>", "<s>", "<▁>", "▁é"], attributes)
    assert sentencepiece.pieces == (b"", b"", "<▁>".encode(), " é".encode())
    with pytest.raises(LoadError, match="type 3"):
        _table(3, [], [])
    assert BYTE_ALPHABET["é"] == 0xE9
