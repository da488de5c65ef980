"""What a GGUF file says about its model: the values of its key-value pairs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dynamo_trio.wire.gguf import BrokenGguf, Walker, check_head, check_value

if TYPE_CHECKING:
    from collections.abc import Callable

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

#: Value types as struct writes them. 8 is a string, 9 an array.
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_values(content: bytes | memoryview, is_wanted: Callable[[str], bool]) -> dict[str, Value]:
    """The pairs whose key is wanted. Text that is no UTF-8 gets U+FFFD.

    Raises:
        BrokenGguf: the header is not whole, or has a value of an unknown type.
    """
    with memoryview(content) as data:
        walker = Walker(data)
        _, pairs = check_head(walker)
        found: dict[str, Value] = {}
        for _ in range(pairs):
            key = _text(walker)
            kind = walker.u32()
            if is_wanted(key):
                found[key] = _value(walker, kind)
            else:
                check_value(walker, kind)
        return found


def _text(walker: Walker) -> str:
    return walker.string().decode("utf-8", "replace")


def _value(walker: Walker, kind: int) -> Value:
    if kind == _STRING:
        return _text(walker)
    if kind == _ARRAY:
        element, count = walker.u32(), walker.u64()
        if element == _STRING:
            # Each takes eight bytes at least, so a count that lies ends at the file's end.
            return [_text(walker) for _ in range(count)]
        return list(_numbers(walker, element, count))
    return _numbers(walker, kind, 1)[0]


def _numbers(walker: Walker, kind: int, count: int) -> tuple[Scalar, ...]:
    form = _FORMS.get(kind)
    if form is None:
        raise BrokenGguf(f"a value of unknown type {kind} at byte {walker.at}")
    begin = walker.at
    walker.skip(struct.calcsize(f"<{form}") * count)
    return struct.unpack_from(f"<{count}{form}", walker.data, begin)
