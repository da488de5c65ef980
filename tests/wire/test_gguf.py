"""The structural check of GGUF headers."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.wire.gguf import BrokenGguf, check_gguf


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(value: bytes) -> bytes:
    return u64(len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + u32(kind) + value


def tensor(
    name: bytes = b"weight", dimensions: int = 2, offset: int = 0, kind: int = 0, row: int = 4
) -> bytes:
    """A tensor of ``row`` to the power of ``dimensions`` values; four bytes each by default."""
    return string(name) + u32(dimensions) + u64(row) * dimensions + u32(kind) + u64(offset)


def gguf(pairs: list[bytes], tensors: list[bytes], data: int = 64, version: int = 3) -> bytes:
    head = b"GGUF" + u32(version) + u64(len(tensors)) + u64(len(pairs))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


NAME = pair(b"general.name", 8, string(b"a model"))
ALIGNED = pair(b"general.alignment", 4, u32(64))
TOKENS = pair(b"tokens", 9, u32(8) + u64(3) + string(b"a") + string(b"") + string(b"ccc"))
SCORES = pair(b"scores", 9, u32(6) + u64(5) + bytes(20))
WHOLE = gguf([NAME, TOKENS, SCORES], [tensor(), tensor(offset=64)], data=128)


def test_a_whole_file_passes() -> None:
    check_gguf(WHOLE)
    check_gguf(gguf([NAME], [], version=2))
    check_gguf(gguf([], [tensor(kind=3, dimensions=1, row=64)], data=40))  # two blocks of Q4_1
    check_gguf(gguf([], [tensor(kind=1000)], data=1))  # nobody knows how long it is


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "magic number"),
        (b"GGUX" + WHOLE[4:], "magic number"),
        (gguf([], [], version=1), "version 1 is not known"),
        (b"GGUF" + u32(3) + u64(2**62) + u64(0), "more entries than bytes"),
        (gguf([pair(b"", 8, string(b"x"))], []), "a key without a name"),
        (gguf([pair(b"k", 13, bytes(8))], []), "unknown type 13"),
        (gguf([pair(b"k", 9, u32(9) + u64(1))], []), "unknown type 9"),
        (gguf([pair(b"k", 8, u64(2**63))], []), "bytes are missing"),
        (gguf([pair(b"k", 9, u32(8) + u64(2**40))], []), "list of strings is cut short"),
        (gguf([pair(b"k", 9, u32(8) + u64(1) + u64(2**50))], []), "list of strings is cut short"),
        (gguf([pair(b"general.alignment", 4, u32(24))], []), "not a power of 2"),
        (gguf([pair(b"general.alignment", 4, u32(0))], []), "not a power of 2"),
        (gguf([pair(b"general.alignment", 5, u32(32))], []), "not a power of 2"),
        (gguf([], [tensor(b"")]), "without a usable name"),
        (gguf([], [tensor(b"x" * 64)]), "without a usable name"),
        (gguf([], [tensor(dimensions=5)]), "5 dimensions"),
        (gguf([], [tensor(offset=64)]), "truncated: it has 160 of 224 bytes"),
        (gguf([], [tensor(), tensor(offset=64)], data=127), "truncated: it has 255 of 256 bytes"),
        (gguf([], [tensor(kind=3, dimensions=1, row=64)], data=39), "it has 103 of 104 bytes"),
        (gguf([], [tensor(kind=1000)], data=0), "truncated: it has 96 of 97 bytes"),
        (gguf([ALIGNED], [tensor()], data=0), "truncated: it has 128 of 192 bytes"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, message: str) -> None:
    with pytest.raises(BrokenGguf, match=message):
        check_gguf(content)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_broken(end: int) -> None:
    with pytest.raises(BrokenGguf):
        check_gguf(WHOLE[:end])


@given(st.data())
def test_whatever_is_in_it_the_check_returns_or_says_broken(data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 8))
        content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    with suppress(BrokenGguf):
        check_gguf(bytes(content))  # nothing else may be raised
