"""Reading the key-value pairs of a GGUF header."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.wire.gguf import BrokenGguf
from dynamo_trio.wire.gguf_values import read_values
from tests.wire.test_gguf import gguf, pair, string, u32, u64

PAIRS = [
    pair(b"text", 8, string("größer".encode())),
    pair(b"torn", 8, string(b"a\xff")),
    pair(b"small", 0, b"\xff"),
    pair(b"signed", 5, struct.pack("<i", -7)),
    pair(b"big", 10, u64(2**64 - 1)),
    pair(b"float", 6, struct.pack("<f", 0.5)),
    pair(b"yes", 7, b"\x01"),
    pair(b"texts", 9, u32(8) + u64(3) + string(b"a") + string(b"") + string(b"c")),
    pair(b"numbers", 9, u32(5) + u64(2) + struct.pack("<2i", 1, -2)),
    pair(b"none", 9, u32(8) + u64(0)),
]
VALUES = {
    "text": "größer",
    "torn": "a\ufffd",
    "small": 255,
    "signed": -7,
    "big": 2**64 - 1,
    "float": 0.5,
    "yes": True,
    "texts": ["a", "", "c"],
    "numbers": [1, -2],
    "none": [],
}


def test_every_kind_of_value() -> None:
    assert read_values(gguf(PAIRS, []), lambda _key: True) == VALUES


@pytest.mark.parametrize("key", VALUES)
def test_only_what_is_wanted(key: str) -> None:
    assert read_values(gguf(PAIRS, []), key.__eq__) == {key: VALUES[key]}


@pytest.mark.parametrize(
    "value",
    [
        pair(b"k", 99, b""),
        pair(b"k", 9, u32(99) + u64(1)),
        pair(b"k", 9, u32(5) + u64(2**60)),
        pair(b"k", 9, u32(8) + u64(2**60)),
        pair(b"k", 9, u32(9) + u64(1)),
        pair(b"k", 8, u64(2**60)),
    ],
)
def test_values_that_lie(value: bytes) -> None:
    with pytest.raises(BrokenGguf):
        read_values(gguf([value], []), lambda _key: True)
    with pytest.raises(BrokenGguf):
        read_values(gguf([value], []), lambda _key: False)


@given(st.data())
def test_a_broken_file_raises_and_no_more(data: st.DataObject) -> None:
    whole = bytearray(gguf(PAIRS, []))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(BrokenGguf):
        assert isinstance(read_values(cut, lambda _key: True), dict)
