"""Token bytes to text: every grouping of the ids gives the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from dynamo_trio.tokenizers.abc import (
    BYTE_ALPHABET,
    IncrementalDecoder,
    TokenTable,
    byte_level_piece,
    sentencepiece_piece,
)
from dynamo_trio.tokenizers.bytes_ import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES = ByteTokenizer()
IDS = st.lists(st.integers(-2, BYTES.vocab_size + 2))


def decoded(decoder: IncrementalDecoder, groups: Sequence[Sequence[int]]) -> str:
    return "".join([decoder.push(group) for group in groups]) + decoder.flush()


@given(st.lists(IDS))
def test_grouping_changes_nothing(groups: list[list[int]]) -> None:
    ids = [token for group in groups for token in group]
    whole = BYTES.decode(ids)
    assert decoded(BYTES.decoder(), groups) == whole
    assert decoded(BYTES.decoder(), [(token,) for token in ids]) == whole


PLAIN = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)


@given(PLAIN)
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES.encode(text, add_special=True)
    assert BYTES.decode(ids) == text
    assert BYTES.least_tokens(text) <= len(ids)


def test_the_text_of_a_special_token_is_the_token() -> None:
    ids = BYTES.encode("a<|im_start|>b<|im_end|><|endoftext|>", add_special=False)
    assert ids == [97, IM_START, 98, IM_END, END_OF_TEXT]
    assert BYTES.decode(ids) == "ab"
    assert BYTES.eos_token_ids == (END_OF_TEXT, IM_END)


def test_an_unfinished_character_waits() -> None:
    decoder = BYTES.decoder()
    smile = list("😀".encode())
    assert [decoder.push([byte]) for byte in smile] == ["", "", "", "😀"]
    assert decoder.push(smile[:2]) == ""
    assert decoder.flush() == "\ufffd"


def test_an_id_beyond_the_table_has_no_text() -> None:
    assert BYTES.decode([97, 10**9, -1, 98]) == "ab"


def test_a_lone_surrogate_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        BYTES.encode("\ud800", add_special=False)
    assert BYTES.least_tokens("\ud800") == 1


def test_least_tokens_counts_bytes_and_specials() -> None:
    table = TokenTable([b"a", b"abcd"], ["<x>", "<x>y"])
    assert table.least_tokens("") == 0
    assert table.least_tokens("abcde") == 2
    assert table.least_tokens("<x>y" * 100 + "<x>" * 3) == 103
    assert TokenTable([]).least_tokens("ab") == 2


def test_the_byte_alphabet_is_gpt2s() -> None:
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
    assert byte_level_piece("Ġhi") == b" hi"
    assert byte_level_piece("Ċ") == b"\n"
    assert byte_level_piece("Ã©") == "é".encode()
    assert byte_level_piece("好") == "好".encode()


def test_sentencepiece_tokens() -> None:
    assert sentencepiece_piece("▁hi▁") == b" hi "
    assert sentencepiece_piece("<0x0A>") == b"\n"
    assert sentencepiece_piece("<0x0A>x") == b"<0x0A>x"


def test_without_a_path_the_byte_tokenizer() -> None:
    tokenizer: Tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert len(tokenizer.fingerprint) == 64
    tokenizer.close()
