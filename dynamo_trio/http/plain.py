"""The head of a plain request, read at once.

Theory of operation
-------------------
h11 reads any request, and takes some hundred calls for it: each line, and each field again, is held
against one rule after the other. Nearly all requests need none of that. So a head that has come
whole is held against one expression first, which is h11's own grammar (RFC 9112, 3 and 5) without
what is rare. Whatever does not match it, or has a field on which more depends than a value, is
h11's; so there is nothing here that refuses, and nothing is read here that h11 would read
differently. A test holds the two side by side.
"""

from __future__ import annotations

import re

import attrs

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+"
_VALUE = rb"[^\x00\s]+(?:[ \t]+[^\x00\s]+)*"
# Nothing can follow a repetition that begins with what it repeats, so nobody can make this take
# longer than the head is long. (Possessive quantifiers would say so; Python 3.11.2 errs in them.)
_HEAD = re.compile(
    rb"(GET|POST) (/[\x21-\x7e]*) HTTP/1\.1\r\n(?:%b:[ \t]*(?:%b[ \t]*)?\r\n)*\r\n"
    % (_TOKEN, _VALUE)
)
_FIELD = re.compile(rb"(%b):[ \t]*(?:(%b)[ \t]*)?\r\n" % (_TOKEN, _VALUE))
_AFTER_TARGET = len(b" HTTP/1.1\r\n")

#: They change how the body is read, or what becomes of the connection.
_NOT_PLAIN = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
#: What may not come twice.
_ONCE = (b"host", b"connection", b"content-length")
#: Digits that a length may have here; h11 has a limit of its own.
_MAX_DIGITS = 15


@attrs.frozen
class PlainHead:
    """What a request's head says."""

    method: bytes
    target: bytes
    #: Names in lower case.
    headers: list[tuple[bytes, bytes]]
    #: Of the body, in bytes.
    length: int
    #: Bytes of the head itself.
    size: int


def read_plain(data: bytes, most: int) -> PlainHead | None:
    """The head with which ``data`` begins; None: h11 is to read it. ``most``: bytes of it."""
    size = data.find(b"\r\n\r\n", 0, most) + 4
    found = _HEAD.fullmatch(data, 0, size) if size > 3 else None
    if found is None:
        return None
    fields = _FIELD.findall(data, found.end(2) + _AFTER_TARGET, size - 2)
    headers = [(name.lower(), value) for name, value in fields]
    length = _length(headers)
    return None if length is None else PlainHead(found[1], found[2], headers, length, size)


def _length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Of the body; None: these fields are for h11 to judge."""
    said = dict(headers)
    if b"host" not in said or not _NOT_PLAIN.isdisjoint(said):
        return None
    if len(said) < len(headers):  # some field comes twice
        names = [name for name, _ in headers]
        if any(names.count(name) > 1 for name in _ONCE):
            return None
    if said.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    length = said.get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) <= _MAX_DIGITS else None
