"""Random ids, made for every request: without the objects and checks of :mod:`uuid`."""

from __future__ import annotations

from secrets import token_hex


def new_digits(count: int) -> str:
    """So many random hex digits; an even number."""
    return token_hex(count // 2)


def new_uuid() -> str:
    """A random UUID (RFC 9562, version 4) as text."""
    digits = token_hex(16)
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
