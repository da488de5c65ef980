"""Dynamo's two-part message: a header and data, each with its length before it.

::

    u64be header length | u64be data length | u64be checksum | header | data

It carries the payload of a request (both parts) and everything on the way back (one part
at a time). The checksum is xxh3-64 of both parts in debug builds of the real peer; 0 means
"do not check", release builds send 0 and check nothing, and neither does this module.
"""

from __future__ import annotations

import struct

from attrs import frozen

from dynamo_trio.errors import (
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.receiver import Receiver, stranger

#: Bytes of the largest whole message: Dynamo's ``DYN_TCP_MAX_MESSAGE_SIZE``.
MAX_MESSAGE = 32 * 2**20
#: Bytes of the largest header. Headers are small JSON values; only an error text can be long.
MAX_HEADER = 256 * 2**10

_HEAD = struct.Struct(">QQQ")


@frozen
class TwoPart:
    """A message. An empty part and an absent part are the same thing."""

    header: bytes = b""
    data: bytes = b""


def encode(header: bytes = b"", data: bytes = b"") -> bytes:
    """The message as bytes.

    Raises:
        LocalProtocolError: it is longer than any peer takes.
    """
    size = _HEAD.size + len(header) + len(data)
    if size > MAX_MESSAGE or len(header) > MAX_HEADER:
        raise LocalProtocolError(f"a message of {size} bytes, {len(header)} in its header")
    return b"".join((_HEAD.pack(len(header), len(data), 0), header, data))


def decode(message: bytes) -> TwoPart:
    """Read one whole message with nothing behind it.

    Raises:
        RemoteProtocolError: it is cut short, too large, or followed by something.
    """
    if len(message) < _HEAD.size:
        raise RemoteProtocolError("the peer sent a two-part message that is cut short")
    begin, end = _bounds(message, MAX_MESSAGE, MAX_HEADER)
    if end != len(message):
        raise RemoteProtocolError(f"a two-part message of {end} bytes in {len(message)} bytes")
    return TwoPart(message[_HEAD.size : begin], message[begin:])


def _bounds(buffer: bytes | bytearray, max_message: int, max_header: int) -> tuple[int, int]:
    """Where the data of the message at the front begins, and where it ends."""
    header, data, _checksum = _HEAD.unpack_from(buffer)
    if header > max_header:
        if (known := stranger(buffer)) is not None:
            raise known
        raise MessageTooLarge(size=_HEAD.size + header, limit=_HEAD.size + max_header)
    begin = _HEAD.size + header
    if begin + data > max_message:
        raise MessageTooLarge(size=begin + data, limit=max_message)
    return begin, begin + data


class TwoPartReader(Receiver[TwoPart]):
    """Reads a stream of two-part messages. Limits are in bytes."""

    def __init__(self, *, limit: int = MAX_MESSAGE, header_limit: int = MAX_HEADER) -> None:
        super().__init__(limit)
        self._header_limit = header_limit

    def _parse(self) -> TwoPart | None:
        if len(self._buffer) < _HEAD.size:
            return None
        begin, end = _bounds(self._buffer, self._limit, self._header_limit)
        if len(self._buffer) < end:
            return None
        message = self._take(end)
        return TwoPart(message[_HEAD.size : begin], message[begin:])
