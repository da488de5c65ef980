"""Large bodies, read without letting them grow.

Theory of operation
-------------------
One byte of a MessagePack body can say "an empty map", which takes seventy in memory. Where
a field's form is given, a body cannot become much larger than the numbers in it. Where a
field is *open* (any JSON value, or lists in lists), a body at the message limit could
become gigabytes, and take seconds.

So a body above :data:`MAX_OPEN` is read in two steps: first with its open fields left
encoded, then each of these by itself, if it is not above the limit. A field that is there
twice counts only once, and what is not known is skipped: neither is ever built. Small
bodies, which are nearly all, are read at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw

from dynamo_trio.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dynamo_trio.wire.dynamo.codec import Codec

#: Bytes of the largest open field of a large body. The real ones take a few hundred.
MAX_OPEN = 2 * 2**20

S = TypeVar("S", bound=msgspec.Struct)


class CarefulReader(Generic[S]):
    """Reads one kind of body. ``open_fields``: struct -> its open fields, nested structs too."""

    def __init__(
        self,
        codec: Codec,
        kind: type[S],
        open_fields: Mapping[type[msgspec.Struct], frozenset[str]],
        what: str,
    ) -> None:
        self._codec, self._kind, self._open, self._what = codec, kind, open_fields, what
        self._read = codec.decoder(kind, what)
        self._read_twin = codec.decoder(self._twin(kind), what)

    def __call__(self, body: bytes) -> S:
        """The body as a value.

        Raises:
            RemoteProtocolError: it has not the form, or is larger than it can need to be.
        """
        if len(body) <= MAX_OPEN:
            return self._read(body)
        return self._build(self._kind, self._read_twin(body))

    def _twin(self, kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
        """The struct with its open fields left encoded. What is absent is UNSET."""
        fields: list[tuple[str, object, object] | tuple[str, object]] = []
        for field in msgspec.structs.fields(kind):
            form: object = field.type
            if field.name in self._open[kind]:
                form = Raw
            elif field.type in self._open:
                form = self._twin(field.type)
            fields.append((field.name, form) if field.required else (field.name, form, UNSET))
        return msgspec.defstruct(kind.__name__, fields, kw_only=True)

    def _build(self, kind: type[S], twin: msgspec.Struct) -> S:
        return kind(**dict(self._values(kind, twin)))

    def _values(
        self, kind: type[msgspec.Struct], twin: msgspec.Struct
    ) -> Iterator[tuple[str, object]]:
        for field in msgspec.structs.fields(kind):
            value = getattr(twin, field.name)
            if isinstance(value, Raw):
                yield field.name, self._open_value(field.name, field.type, value)
            elif field.type in self._open and value is not UNSET:
                yield field.name, field.type(**dict(self._values(field.type, value)))
            elif value is not UNSET:
                yield field.name, value

    def _open_value(self, name: str, form: type[object], value: Raw) -> object:
        with memoryview(value) as view:
            size = view.nbytes
        if size > MAX_OPEN:
            raise RemoteProtocolError(f"a {self._what} with {size} bytes in its {name!r}")
        read: Callable[[bytes], object] = self._codec.decoder(form, f"{name!r} of a {self._what}")
        return read(bytes(value))
