"""Model folders, made here with the tokenizers package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import FileUnusable, LoadError
from dynamo_trio.tokenizers import load_tokenizer
from dynamo_trio.tokenizers.hf import HfTokenizer, WindowDecoder

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße, 😀 and 好 to all!", "hello hello"]
SPECIALS = ["<|end|>", "<|user|>"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["plain"])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces as U+2581, unknown characters as byte tokens."""
    tokens = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁h",
        "i",
        "h",
        "a",
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        vocabulary, [("▁", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def make_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<|user|>"}, "chat_template": "T"}
    return make_folder(
        tmp_path_factory.mktemp("model") / "bytes",
        byte_level(),
        tokenizer_config={**config, "model_max_length": 10**30},
        generation_config={"eos_token_id": [1, 0, 10**9]},
        config={"max_position_embeddings": 77},
    )


@pytest.fixture(scope="module")
def byte_hf(byte_folder: Path) -> HfTokenizer:
    return HfTokenizer(byte_folder)


@pytest.fixture(scope="module")
def window_hf(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(make_folder(tmp_path_factory.mktemp("model") / "sp", sentencepiece_like()))


def test_what_the_folder_says(byte_hf: HfTokenizer, byte_folder: Path) -> None:
    assert byte_hf.eos_token_ids == (0, 1)
    assert (byte_hf.bos_token_id, byte_hf.bos_token, byte_hf.eos_token) == (
        1,
        "<|user|>",
        "<|end|>",
    )
    assert (byte_hf.chat_template, byte_hf.context_length) == ("T", 77)
    again = load_tokenizer(byte_folder)
    assert isinstance(again, HfTokenizer)
    assert again.fingerprint == byte_hf.fingerprint
    again.close()


def test_a_bare_folder(window_hf: HfTokenizer, byte_hf: HfTokenizer) -> None:
    assert (window_hf.bos_token, window_hf.bos_token_id) == ("", None)
    assert (window_hf.eos_token_ids, window_hf.chat_template) == ((), None)
    assert window_hf.context_length is None
    assert window_hf.least_tokens("x" * 1000) == 0
    assert window_hf.fingerprint != byte_hf.fingerprint


def test_a_template_file_wins_and_lists_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    folder = make_folder(tmp_path / "m", byte_level(), tokenizer_config={"chat_template": named})
    assert HfTokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert HfTokenizer(folder).chat_template == "J"


PLAIN = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)
TEXT = PLAIN | st.sampled_from(CORPUS)


@given(TEXT)
def test_the_table_reads_as_the_package_does(byte_hf: HfTokenizer, text: str) -> None:
    ids = byte_hf.encode(text, add_special=True)
    assert byte_hf.decode(ids) == byte_hf._tokenizer.decode(ids) == text
    assert byte_hf.least_tokens(text) <= len(ids)


def test_special_tokens_are_parsed_and_hidden(byte_hf: HfTokenizer) -> None:
    ids = byte_hf.encode("a<|end|>plain<|user|>", add_special=False)
    assert ids[1] == 0
    assert ids[-1] == 1
    assert byte_hf.decode(ids) == "aplain"


@given(st.data())
def test_grouping_changes_nothing(byte_hf: HfTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, byte_hf.vocab_size)))
    decoder = byte_hf.decoder()
    assert "".join([decoder.push([token]) for token in ids]) + decoder.flush() == byte_hf.decode(
        ids
    )


@given(st.text("hia 好é😀"))
def test_the_window_reads_as_the_package_does(window_hf: HfTokenizer, text: str) -> None:
    ids = window_hf.encode(text, add_special=False)
    decoder = window_hf.decoder()
    assert isinstance(decoder, WindowDecoder)
    one_by_one = "".join([decoder.push([token]) for token in ids]) + decoder.flush()
    assert one_by_one == window_hf.decode(ids) == text
    at_once = window_hf.decoder()
    assert at_once.push(ids) + at_once.flush() == text


@given(st.data())
def test_the_window_survives_any_ids(window_hf: HfTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, window_hf.vocab_size + 1)))
    decoder = window_hf.decoder()
    pieces = [decoder.push([token]) for token in ids]
    assert isinstance("".join(pieces) + decoder.flush(), str)


def test_bytes_that_are_no_text_do_not_wait_for_ever(window_hf: HfTokenizer) -> None:
    token = window_hf._tokenizer.token_to_id("<0xFF>")
    assert token is not None
    decoder = window_hf.decoder()
    assert "\ufffd" in "".join([decoder.push([token]) for _ in range(10)])


def test_a_lone_surrogate_is_an_error(byte_hf: HfTokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        byte_hf.encode("\ud800", add_special=False)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="no such file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileUnusable, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_folder(tmp_path / "m", byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(LoadError, match=name.partition(".")[0]):
        load_tokenizer(folder)


def test_a_tokenizer_without_tokens(tmp_path: Path) -> None:
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(LoadError, match="0 tokens"):
        load_tokenizer(make_folder(tmp_path / "m", empty))


def test_json_of_another_shape_is_as_good_as_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", byte_level(), tokenizer_config=[1], config={"x": 1})
    assert HfTokenizer(folder).eos_token == ""


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "m", byte_level())
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(LoadError, match="hf extra"):
        load_tokenizer(folder)
