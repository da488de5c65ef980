"""Random ids, made for every request: without the objects and checks of :mod:`uuid`."""

from __future__ import annotations

from secrets import token_bytes


def new_digits(count: int) -> str:
    """So many random hex digits; an even number."""
    return token_bytes(count // 2).hex()


def new_uuid() -> str:
    """A random UUID (RFC 9562, version 4) as text."""
    digits = token_bytes(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
