"""Is this a whole GGUF file? A structural check, for libraries that abort on a broken one.

llama.cpp answers most broken files with an error, but some, such as one with a hole of
zeros in its header, with ``abort()``, which no caller survives. So the header is walked
here first: every length must stay within the file, every key have a name and a known type,
and every tensor lie within the data, as far as the size of its type is known. What the
values mean is not looked at.

Layout (GGUF versions 2 and 3, little endian): magic, version, number of tensors, number of
key-value pairs; the pairs; for each tensor its name, dimensions, type and offset; padding
to the alignment; the data.
"""

from __future__ import annotations

import math
import struct

from attrs import define

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Value types: bytes of one value. 8 is a string, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
#: Tensor types, as ggml numbers them: (values of one block, bytes of one block).
_BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8)},
    **{30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},
    **{15: (256, 292), 20: (32, 18), 23: (256, 136), 34: (256, 54), 35: (256, 66), 39: (32, 17)},
}
_MAX_NAME = 64
_MAX_DIMENSIONS = 4


class BrokenGguf(ValueError):
    """The file is no GGUF file, or not a whole one. The message says what is wrong where."""


@define
class Walker:
    """A place in a GGUF header. No read goes beyond the end of the buffer."""

    data: memoryview
    at: int = 0

    def fail(self, what: str) -> BrokenGguf:
        return BrokenGguf(f"{what} at byte {self.at} of {len(self.data)}")

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise self.fail(f"{size} bytes are missing")
        self.at += size

    def u32(self) -> int:
        return self._number("<I", 4)

    def u64(self) -> int:
        return self._number("<Q", 8)

    def _number(self, form: str, size: int) -> int:
        begin = self.at
        self.skip(size)
        value: int = struct.unpack_from(form, self.data, begin)[0]
        return value

    def string(self) -> bytes:
        size = self.u64()
        begin = self.at
        self.skip(size)
        return bytes(self.data[begin : self.at])

    def strings(self, count: int) -> None:
        """Skip many strings; the token table of a model has 100 000 of them."""
        data, at, end = self.data, self.at, len(self.data)
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise self.fail("a list of strings is cut short")
            at += 8 + length(data, at)[0]
        if at > end:
            raise self.fail("a list of strings is cut short")
        self.at = at


def check_gguf(content: bytes | memoryview) -> None:
    """Walk the header of a whole file, which may be a view of mapped memory.

    Raises:
        BrokenGguf: it is not a whole GGUF file.
    """
    with memoryview(content) as data:
        _check(Walker(data))


def _check(walker: Walker) -> None:
    tensors, pairs = check_head(walker)
    alignment = 32
    for _ in range(pairs):
        alignment = _check_pair(walker) or alignment
    ends = [_check_tensor(walker) for _ in range(tensors)]
    whole = -(-walker.at // alignment) * alignment + max(ends, default=0)
    if ends and whole > (there := len(walker.data)):
        raise BrokenGguf(f"the file is truncated: it has {there} of {whole} bytes")


def check_head(walker: Walker) -> tuple[int, int]:
    """Read the file's first bytes: how many tensors and key-value pairs follow.

    Raises:
        BrokenGguf: there cannot be so many, or it is no GGUF file.
    """
    if bytes(walker.data[:4]) != MAGIC:
        raise walker.fail("no GGUF file: the magic number is missing")
    walker.skip(4)
    if (version := walker.u32()) not in _VERSIONS:
        raise walker.fail(f"GGUF version {version} is not known")
    tensors, pairs = walker.u64(), walker.u64()
    if (tensors + pairs) * 8 > len(walker.data):
        raise walker.fail("more entries than bytes")
    return tensors, pairs


def _check_pair(walker: Walker) -> int | None:
    """Check one key and its value. Returns the alignment if it is told here."""
    key = walker.string()
    if not key:
        raise walker.fail("a key without a name")
    kind = walker.u32()
    if key == b"general.alignment":
        return _check_alignment(walker, kind)
    check_value(walker, kind)
    return None


def _check_alignment(walker: Walker, kind: int) -> int:
    value = walker.u32()
    if kind != _UINT32 or value == 0 or value & (value - 1):
        raise walker.fail("the alignment is not a power of 2")
    return value


def check_value(walker: Walker, kind: int) -> None:
    """Pass over a value of a pair.

    Raises:
        BrokenGguf: its type is not known, or it is cut short.
    """
    if kind == _STRING:
        walker.skip(walker.u64())
    elif kind == _ARRAY:
        _check_array(walker)
    else:
        walker.skip(_size(walker, kind))


def _check_array(walker: Walker) -> None:
    kind, count = walker.u32(), walker.u64()
    if kind == _STRING:
        walker.strings(count)
    else:
        walker.skip(_size(walker, kind) * count)


def _size(walker: Walker, kind: int) -> int:
    if kind not in _SIZES:
        raise walker.fail(f"a value of unknown type {kind}")
    return _SIZES[kind]


def _check_tensor(walker: Walker) -> int:
    """Check one tensor's entry. Returns where its data ends, within the data."""
    name = walker.string()
    if not 0 < len(name) < _MAX_NAME:
        raise walker.fail("a tensor without a usable name")
    dimensions = walker.u32()
    if dimensions > _MAX_DIMENSIONS:
        raise walker.fail(f"a tensor of {dimensions} dimensions")
    values = math.prod(walker.u64() for _ in range(dimensions))
    block_values, block_bytes = _BLOCKS.get(walker.u32(), (0, 0))
    size = values // block_values * block_bytes if block_values else 1  # unknown: at least that
    return walker.u64() + size
