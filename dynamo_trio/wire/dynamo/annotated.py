"""The envelope around each value of a stream: Dynamo's ``Annotated``.

An item holds a value, or an error, or neither (a comment on the stream, which says nothing
about the answer). The value stays encoded here, so the envelope fits every endpoint.
"""

from __future__ import annotations

import msgspec

from dynamo_trio.errors import DynamoException, RemoteProtocolError, Unknown, UnreadableItem
from dynamo_trio.wire.dynamo.codec import MSGPACK, Codec, per_codec
from dynamo_trio.wire.dynamo.wire_errors import WireError, from_wire, to_wire

_ERROR = "error"
_DATA_ONLY = MSGPACK.data_only[0]


class Annotated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of a stream. ``data`` is the encoded value, empty if there is none."""

    data: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: WireError | None = None

    def failure(self) -> DynamoException | None:
        """The error that this item is, if it is one."""
        if self.error is not None:
            return from_wire(self.error)
        if self.event == _ERROR:
            return Unknown("; ".join(self.comment or ()))
        return None


_readers = per_codec(lambda codec: codec.decoder(Annotated, "item"))


def annotate(codec: Codec, value: bytes) -> bytes:
    """An encoded value as an item."""
    before, after = codec.data_only
    return b"".join((before, value, after))


def annotate_error(codec: Codec, error: BaseException) -> bytes:
    """An error as an item; the stream must still be ended in good order."""
    return codec.encode(Annotated(event=_ERROR, error=to_wire(error)))


def read_item(codec: Codec, item: bytes) -> bytes | None:
    """The encoded value of an item; None if it only comments on the stream.

    Raises:
        UnreadableItem: no item.
        DynamoException: the item is an error, which is raised as what it is.
    """
    if codec is MSGPACK and item.startswith(_DATA_ONLY) and len(item) > len(_DATA_ONLY) + 1:
        return item[len(_DATA_ONLY) :]  # a map with this one key: nearly every item
    try:
        annotated = _readers[codec.name](item)
    except RemoteProtocolError as exc:
        raise UnreadableItem(str(exc)) from exc
    failure = annotated.failure()
    if failure is not None:
        raise failure
    value = bytes(annotated.data)
    return None if value in (b"", codec.null) else value
