"""The frame that carries a request over a long-lived connection, and its reader.

::

    u16be length | path      UTF-8, "{instance id in hex}/{endpoint}"
    u16be length | headers   a JSON object of strings
    u32be length | payload   a two-part message: control header and body

As the real worker does, any bytes are tolerated where the headers stand: they carry
nothing that a request needs.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from attrs import field, frozen

from dynamo_trio.errors import (
    LocalProtocolError,
    MessageTooLarge,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.receiver import Receiver, may_be_stranger, stranger
from dynamo_trio.wire.dynamo.two_part import MAX_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of the largest path and the largest headers; the real peer's are about 30 and 150.
MAX_PATH = 1024
MAX_HEADERS = 16 * 2**10

_SHORT, _LONG = struct.Struct(">H"), struct.Struct(">I")
_read_headers = JSON.decoder(dict[str, str], "header block")

#: Headers of the real frontend. The first is the id of the control message.
REQUEST_ID = "request-id"
ENDPOINT_PATH = "x-endpoint-path"
SEND_TIME_NS = "x-frontend-send-ts-ns"


@frozen
class RequestFrame:
    """One request as it travels. ``headers`` are empty if the peer's could not be read."""

    path: str
    payload: bytes
    headers: Mapping[str, str] = field(factory=dict)

    @property
    def sent_at_ns(self) -> int | None:
        """When the client sent it, in nanoseconds since the epoch, if it says so."""
        text = self.headers.get(SEND_TIME_NS, "")
        # More digits than these no clock of 64 bits shows.
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def encode_frame(frame: RequestFrame, *, limit: int = MAX_MESSAGE) -> bytes:
    """The frame as bytes; ``limit`` is that of the peer, in bytes of the whole frame.

    Raises:
        PayloadTooLarge: the frame is above the limit; the request itself is too large.
        LocalProtocolError: path or headers are too long for any peer of ours.
    """
    path = frame.path.encode("utf-8", "replace")
    headers = JSON.encode(frame.headers)
    if len(path) > MAX_PATH or len(headers) > MAX_HEADERS:
        raise LocalProtocolError(f"path of {len(path)} bytes, headers of {len(headers)} bytes")
    parts = (
        *(_SHORT.pack(len(path)), path),
        *(_SHORT.pack(len(headers)), headers),
        *(_LONG.pack(len(frame.payload) & 0xFFFFFFFF), frame.payload),
    )
    if (size := sum(map(len, parts))) > limit:
        raise PayloadTooLarge(f"The request takes {size} bytes, above the limit of {limit}.")
    return b"".join(parts)


class FrameReader(Receiver[RequestFrame]):
    """Reads the requests of one connection. ``limit``: bytes of the largest whole frame.

    A frame above it raises :class:`~dynamo_trio.errors.MessageTooLarge`, as soon as its
    length is known.
    """

    def __init__(self, *, limit: int = MAX_MESSAGE) -> None:
        super().__init__(limit)

    def _parse(self) -> RequestFrame | None:
        """Every length is judged as soon as it is there, before what it measures is kept."""
        path_end = self._part(0, _SHORT, MAX_PATH, "path")
        if path_end is None:
            return None
        headers_end = self._part(path_end, _SHORT, MAX_HEADERS, "header block")
        if headers_end is None:
            return None
        end = self._payload(headers_end)
        return None if end is None else self._frame(path_end, headers_end, end)

    def _part(self, at: int, form: struct.Struct, most: int, what: str) -> int | None:
        """Where the part that begins at ``at`` ends, if all of it has arrived."""
        if len(self._buffer) < at + form.size:
            return None
        (size,) = form.unpack_from(self._buffer, at)
        if size > most:
            if at == 0 and may_be_stranger(self._buffer):
                return None
            if at == 0 and (known := stranger(self._buffer)) is not None:
                raise known
            raise RemoteProtocolError(f"the peer sent a {what} of {size} bytes, above {most}")
        return self._arrived(at + form.size + size)

    def _payload(self, at: int) -> int | None:
        if len(self._buffer) < at + _LONG.size:
            return None
        (size,) = _LONG.unpack_from(self._buffer, at)
        return self._arrived(at + _LONG.size + size)

    def _arrived(self, end: int) -> int | None:
        if end > self._limit:
            raise MessageTooLarge(size=end, limit=self._limit)
        return end if len(self._buffer) >= end else None

    def _frame(self, path_end: int, headers_end: int, end: int) -> RequestFrame:
        frame = self._take(end)
        path = _path(frame[_SHORT.size : path_end])
        headers = _headers(frame[path_end + _SHORT.size : headers_end])
        return RequestFrame(path, frame[headers_end + _LONG.size :], headers)


def _path(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError("the peer sent a path that is not UTF-8") from None


def _headers(raw: bytes) -> Mapping[str, str]:
    try:
        return _read_headers(raw)
    except RemoteProtocolError:
        return {}
