"""The two spellings of a payload: MessagePack and JSON.

Theory of operation
-------------------
A request names its codec (``payload_codec``; absent means JSON), and its answer uses the
same one. MessagePack structs are maps with string keys.

The items of an answer lie in two layers of envelopes around what the engine said. Their
encoded form is the payload between two constants, so wrapping a payload that is already
encoded costs one join and the layers cannot get into the way of one another.

Whatever a peer sends, decoding raises :class:`~dynamo_trio.errors.RemoteProtocolError`
and nothing else; msgspec itself would let a value that is nested too deeply end in a
``RecursionError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from attrs import field, frozen

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Characters of what is said about a value that cannot be read.
MAX_REASON = 500

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Decoder(Protocol[T_co]):
    def decode(self, data: bytes, /) -> T_co: ...


@frozen
class Codec:
    """One spelling. Compare by identity or ``name``; there are :data:`MSGPACK` and :data:`JSON`."""

    name: str
    #: An encoded null.
    null: bytes = field(repr=False)
    #: Before and after the value of a map ``{"data": value}``.
    data_only: tuple[bytes, bytes] = field(repr=False)
    #: Before and after the value of a map ``{"data": value, "complete_final": false}``.
    data_item: tuple[bytes, bytes] = field(repr=False)
    #: The map ``{"complete_final": true}``.
    complete_final: bytes = field(repr=False)
    _encode: Callable[[object], bytes] = field(repr=False)
    _decoder: Callable[[type], _Decoder[object]] = field(repr=False)

    def encode(self, value: object) -> bytes:
        """``value`` as bytes.

        Raises:
            LocalProtocolError: it holds what the codec cannot spell, such as a lone surrogate.
        """
        try:
            return self._encode(value)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise LocalProtocolError(f"a value cannot be spelled in {self.name}: {exc}") from exc

    def decoder(self, kind: type[T], what: str) -> Callable[[bytes], T]:
        """A function that reads values of ``kind``; ``what`` names them in messages.

        The function raises RemoteProtocolError, and nothing else, for anything else.
        """
        return checked(self._typed(kind).decode, f"{what} in {self.name}")

    def _typed(self, kind: type[T]) -> _Decoder[T]:
        decoder: _Decoder[T] = self._decoder(kind)  # type: ignore[assignment]  # msgspec's promise
        return decoder


def checked(decode: Callable[[bytes], T], what: str) -> Callable[[bytes], T]:
    """``decode`` with every failure as RemoteProtocolError."""

    def read(data: bytes) -> T:
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            # msgspec may quote what it found, however long that is and whatever lines it has.
            why = " ".join(str(exc)[:MAX_REASON].split())
            raise RemoteProtocolError(f"the peer sent an unreadable {what}: {why}") from exc

    return read


def _msgpack_text(text: bytes) -> bytes:
    return bytes([0xA0 | len(text)]) + text  # a string of less than 32 bytes


_DATA, _FINAL = _msgpack_text(b"data"), _msgpack_text(b"complete_final")

MSGPACK = Codec(
    name="msgpack",
    null=b"\xc0",
    data_only=(b"\x81" + _DATA, b""),
    data_item=(b"\x82" + _DATA, _FINAL + b"\xc2"),
    complete_final=b"\x81" + _FINAL + b"\xc3",
    encode=msgspec.msgpack.Encoder().encode,
    decoder=msgspec.msgpack.Decoder,
)

JSON = Codec(
    name="json",
    null=b"null",
    data_only=(b'{"data":', b"}"),
    data_item=(b'{"data":', b',"complete_final":false}'),
    complete_final=b'{"complete_final":true}',
    encode=msgspec.json.Encoder().encode,
    decoder=msgspec.json.Decoder,
)

_BY_NAME = {codec.name: codec for codec in (MSGPACK, JSON)}


def codec_named(name: str | None) -> Codec:
    """The codec that a request or a record names; None (absent) means JSON.

    Raises:
        RemoteProtocolError: no such codec.
    """
    if name is None:
        return JSON
    try:
        return _BY_NAME[name]
    except KeyError:
        raise RemoteProtocolError(f"the peer speaks an unknown codec {name[:64]!r}") from None


def per_codec(make: Callable[[Codec], T]) -> Mapping[str, T]:
    """One thing for each codec, by the codec's name."""
    return {name: make(codec) for name, codec in _BY_NAME.items()}
