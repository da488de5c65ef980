"""The frames of the mux protocol and their bytes.

::

    u32be length of what follows | u8 type | a MessagePack array

An array may have more elements than are known here, which are then ignored, and so are whole
frames of the types from :data:`OPTIONAL` on: a later version may add them without asking.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import checked
from dynamo_trio.wire.mux.limits import (
    MAX_CREDIT,
    MAX_FRAME,
    MAX_METADATA_ITEMS,
    MAX_NUMBER,
    MAX_PATH,
    MAX_PATHS,
    MAX_PIECE,
    MAX_PROCESS,
    MAX_REQUEST_ID,
    MAX_SID,
    MAX_SOFTWARE,
    MAX_TEXT,
    MAX_TOKEN,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HEAD = struct.Struct(">IB")
#: Types from here on may be ignored by who does not know them.
OPTIONAL = 128


class FrameType(enum.IntEnum):
    """The second field of a frame."""

    HELLO = 1
    OPEN = 2
    OPENED = 3
    PART = 4
    DROP = 5
    ITEM = 6
    TOKENS = 7
    DONE = 8
    ERROR = 9
    CANCEL = 10
    STOP = 11
    CREDIT = 12
    PING = 13
    PONG = 14
    DRAINING = 15
    ACK = 16
    SERVING = 17
    GOAWAY = 18


class GoAwayCode(enum.StrEnum):
    """Why a peer goes away."""

    CLOSING = "closing"  # in order
    VERSION = "version"  # no version in common
    PROTOCOL = "protocol"  # the other end broke a rule
    STALLED = "stalled"  # the other end takes nothing, or does not finish what it began
    FLOOD = "flood"  # the other end sends too much that leads to nothing


Sid: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SID)]
Sids: TypeAlias = list[Sid]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Amount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]
_Word: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
_Path: TypeAlias = Annotated[str, Meta(max_length=MAX_PATH)]
_Paths: TypeAlias = Annotated[list[_Path], Meta(min_length=1, max_length=MAX_PATHS)]
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Piece: TypeAlias = Annotated[bytes, Meta(max_length=MAX_PIECE)]
_Metadata: TypeAlias = Annotated[dict[str, str], Meta(max_length=MAX_METADATA_ITEMS)]


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """A frame. The fields of a subclass, in order, are the elements of its array."""

    type: ClassVar[FrameType]


class Hello(Frame, frozen=True):
    """The first frame: versions (from a worker the one that it chose), what is taken, and who
    speaks: ``process`` is random, and the same on all connections of a process."""

    type = FrameType.HELLO
    versions: Annotated[list[Annotated[int, Meta(ge=0, le=65535)]], Meta(max_length=64)]
    max_streams: Number
    max_message: Number
    software: Annotated[str, Meta(max_length=MAX_SOFTWARE)]
    process: Annotated[str, Meta(max_length=MAX_PROCESS)] = ""


class Open(Frame, frozen=True):
    """A request. ``credit``: items the worker may send. Its payload may have begun in PARTs."""

    type = FrameType.OPEN
    sid: Sid
    path: _Path
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID)]
    codec: Annotated[str, Meta(max_length=32)]
    streams_in: bool
    credit: Amount
    sent_at_ns: Number | None
    metadata: _Metadata
    payload: _Piece


class Opened(Frame, frozen=True):
    """The request is taken on. ``credit``: items that may stream in."""

    type = FrameType.OPENED
    sid: Sid
    credit: Amount


class Part(Frame, frozen=True):
    """The next piece of a message whose last piece is in an OPEN or ITEM of the same stream."""

    type = FrameType.PART
    sid: Sid
    piece: Annotated[bytes, Meta(min_length=1, max_length=MAX_PIECE)]


class Drop(Frame, frozen=True):
    """The message whose PARTs were sent is given up. An OPEN that is dropped was never opened."""

    type = FrameType.DROP
    sid: Sid


class Item(Frame, frozen=True):
    """One item, in the codec of the request."""

    type = FrameType.ITEM
    sid: Sid
    payload: _Piece


class Tokens(Frame, frozen=True):
    """Tokens of any number of streams, as ``[sid, token, sid, token, ...]``, in order; then the
    streams that end well with them."""

    type = FrameType.TOKENS
    tokens: list[_Word]
    finished: Sids


class Done(Frame, frozen=True):
    """These streams end well; from a client: their input does."""

    type = FrameType.DONE
    sids: Annotated[Sids, Meta(min_length=1)]


class Error(Frame, frozen=True):
    """The stream ends by an error: class names, the finest first, so that a peer that does not
    know the first takes the next. ``begun``: had the handler begun?"""

    type = FrameType.ERROR
    sid: Sid
    kinds: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)]
    message: str
    begun: bool
    planned: bool = False
    param: Annotated[str, Meta(max_length=MAX_TEXT)] | None = None


class Cancel(Frame, frozen=True):
    """The client left the stream and takes nothing more of it."""

    type = FrameType.CANCEL
    sid: Sid


class Stop(Frame, frozen=True):
    """The client asks the worker to come to an end."""

    type = FrameType.STOP
    sid: Sid


class Credit(Frame, frozen=True):
    """So many items more may be sent, as ``[sid, items, sid, items, ...]``."""

    type = FrameType.CREDIT
    grants: list[Amount]


class Ping(Frame, frozen=True):
    """To be answered by a PONG of the same number; the last one answers all before it."""

    type = FrameType.PING
    number: Number


class Pong(Frame, frozen=True):
    """The answer to a PING."""

    type = FrameType.PONG
    number: Number


class Draining(Frame, frozen=True):
    """No new requests to these paths, please. ``notice`` rises."""

    type = FrameType.DRAINING
    notice: Number
    paths: _Paths


class Ack(Frame, frozen=True):
    """Behind this no OPEN follows for the paths of this notice and those before it. ``places``:
    how many streams of this connection the client can place on other workers."""

    type = FrameType.ACK
    notice: Number
    places: Number


class Serving(Frame, frozen=True):
    """These paths take requests again."""

    type = FrameType.SERVING
    paths: _Paths


class GoAway(Frame, frozen=True):
    """The last frame of its sender."""

    type = FrameType.GOAWAY
    code: Annotated[str, Meta(max_length=32)]
    text: _Text


FRAMES: Mapping[int, type[Frame]] = {kind.type: kind for kind in Frame.__subclasses__()}


def in_a_line(text: str) -> str:
    """A peer's text as it may stand in a line of a log: nothing in it steers or ends that."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


# --- bytes -------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode


def _with_head(kind: FrameType, body: bytes) -> bytes:
    size = len(body) + 1
    if size > MAX_FRAME:
        raise LocalProtocolError(f"a {kind.name} frame of {size} bytes (max: {MAX_FRAME} bytes)")
    return HEAD.pack(size, kind) + body


def encode(frame: Frame) -> bytes:
    """The frame as bytes.

    Raises:
        LocalProtocolError: it is above the limit, or holds a text that UTF-8 cannot spell.
    """
    try:
        body = _encode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError) as exc:
        raise LocalProtocolError(f"a {frame.type.name} frame cannot be spelled: {exc}") from exc
    return _with_head(frame.type, body)


#: Numbers in one frame: each takes up to five bytes. An even number, for they come in pairs.
_NUMBERS = (MAX_FRAME - 64) // 5 // 2 * 2


def encode_tokens(tokens: Sequence[int], finished: Sequence[int]) -> bytes:
    """TOKENS frames, nearly always one, or DONE frames if no token is there."""
    if len(tokens) + len(finished) <= _NUMBERS:  # an engine's step
        if tokens:
            return _with_head(FrameType.TOKENS, _encode((tokens, finished)))
        return _with_head(FrameType.DONE, _encode((finished,)))
    return _encode_split(FrameType.TOKENS, tokens, ([],)) + _encode_split(FrameType.DONE, finished)


def encode_credit(grants: Sequence[int]) -> bytes:
    """CREDIT frames, nearly always one."""
    return _encode_split(FrameType.CREDIT, grants)


def _encode_split(kind: FrameType, numbers: Sequence[int], rest: tuple[object, ...] = ()) -> bytes:
    pieces = (numbers[at : at + _NUMBERS] for at in range(0, len(numbers), _NUMBERS))
    return b"".join(_with_head(kind, _encode((piece, *rest))) for piece in pieces)


def _reader(kind: type[Frame]) -> Callable[[bytes], Frame]:
    return checked(msgspec.msgpack.Decoder(kind).decode, f"{kind.type.name} frame")


_READERS = {kind: _reader(form) for kind, form in FRAMES.items()}


def decode(kind: int, body: bytes) -> Frame | None:
    """Read one frame; None for one that may be ignored.

    Raises:
        RemoteProtocolError: the type is not known, or the body has not its form.
    """
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(body)
    if kind < OPTIONAL:
        raise RemoteProtocolError(f"the peer sent a frame of the unknown type {kind}")
    return None
