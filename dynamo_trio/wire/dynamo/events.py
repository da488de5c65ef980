"""A message of the event plane: four frames of a ZeroMQ PUB socket.

::

    topic
    u64be publisher id
    u64be sequence
    0x01 | u32be length | map {publisher_id, sequence, published_at, topic, payload}

Everything but the payload is there twice: the first three frames let a subscriber choose
and count without reading the fourth. ``sequence`` counts the messages of one socket, from 0
or 1, in steps of 1. What the payload holds depends on the topic and is MessagePack too; it
travels as bytes inside the map.

A publisher is a stranger until it has said something that can be read: whatever it sends,
:func:`decode_event` raises :class:`~dynamo_trio.errors.RemoteProtocolError` and nothing
else, and builds nothing that is larger than the message.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from dynamo_trio.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.dynamo.keys import MAX_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"

#: Bytes of the largest message. Real ones have a few hundred; a prompt of a million tokens
#: makes some megabytes.
MAX_EVENT = 32 * 2**20
#: Bytes of the longest topic.
MAX_TOPIC = 256

_VERSION = 1
_U64 = struct.Struct(">Q")
_HEAD = struct.Struct(">BI")


class EventMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message, as its fourth frame tells it."""

    publisher_id: int
    sequence: int
    published_at: int = 0  # milliseconds since the epoch
    topic: str
    payload: bytes

    def __post_init__(self) -> None:
        if not (0 <= self.publisher_id <= MAX_ID and 0 <= self.sequence <= MAX_ID):
            raise ValueError("a publisher id or sequence is no 64-bit number")


def encode_event(event: EventMessage) -> list[bytes]:
    """The frames of a message.

    Raises:
        LocalProtocolError: it is larger than any subscriber takes.
    """
    topic, body = event.topic.encode("utf-8", "replace"), MSGPACK.encode(event)
    if len(topic) > MAX_TOPIC or len(body) > MAX_EVENT:
        raise LocalProtocolError(f"an event of {len(body)} bytes, {len(topic)} in its topic")
    head = _HEAD.pack(_VERSION, len(body))
    return [topic, _U64.pack(event.publisher_id), _U64.pack(event.sequence), head + body]


def decode_event(frames: Sequence[bytes]) -> EventMessage:
    """Read the frames of one message.

    Raises:
        MessageTooLarge: it is larger than :data:`MAX_EVENT`.
        RemoteProtocolError: it is no message, or says two things at once.
    """
    if len(frames) != 4:
        raise RemoteProtocolError(f"an event of {len(frames)} frames where 4 belong")
    topic, publisher, sequence, envelope = frames
    event = _read_map(_body(envelope))
    outside = (topic, publisher, sequence)
    if outside != (_topic(event), _U64.pack(event.publisher_id), _U64.pack(event.sequence)):
        raise RemoteProtocolError("the frames of an event contradict its envelope")
    return event


def _body(envelope: bytes) -> bytes:
    if len(envelope) > _HEAD.size + MAX_EVENT:
        raise MessageTooLarge(size=len(envelope), limit=_HEAD.size + MAX_EVENT)
    if len(envelope) < _HEAD.size:
        raise RemoteProtocolError("an event whose envelope is cut short")
    version, length = _HEAD.unpack_from(envelope)
    if version != _VERSION:
        raise RemoteProtocolError(f"an event of version {version}; known is {_VERSION}")
    if length != len(envelope) - _HEAD.size:
        raise RemoteProtocolError(
            f"an envelope of {length} bytes in {len(envelope) - _HEAD.size} bytes"
        )
    return envelope[_HEAD.size :]


def _topic(event: EventMessage) -> bytes:
    return event.topic.encode("utf-8", "replace")


_read_map = MSGPACK.decoder(EventMessage, "event")
