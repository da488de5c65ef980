"""The way back of one request: the worker calls the client and streams its items.

Theory of operation
-------------------
One connection carries one answer. What the two ends say is an event
(:mod:`dynamo_trio.wire.dynamo.call_home_states`, with the tables of what may follow what);
everything travels as two-part messages, signals in the header and items in the data. The
same table judges what one end sends (a mistake there is ours, ``LocalProtocolError``) and
what the other end receives (``RemoteProtocolError``).

Both ends talk at once: the client may say stop or kill at any moment, also before the
stream has begun, so a worker has to read while it writes.

A worker that obeys ``stop`` or ``kill`` just closes: no ``CompleteFinal``, no ``Sentinel``.
A client takes an answer for whole when ``CompleteFinal`` has come. It need not wait for the
sentinel, and closes with a reset, so the end of a whole stream may look like a failure to
the worker's socket.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError, UnreadableItem
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.call_home_states import (
    DOWN,
    UP,
    Accepted,
    CompleteFinal,
    DownEvent,
    Handshake,
    Item,
    Kill,
    Phase,
    Refused,
    Sentinel,
    Stop,
    UpEvent,
    Wish,
    ending,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec, per_codec
from dynamo_trio.wire.dynamo.control import REQUEST, RESPONSE
from dynamo_trio.wire.dynamo.two_part import MAX_HEADER, MAX_MESSAGE, TwoPart, TwoPartReader
from dynamo_trio.wire.dynamo.wire_errors import WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.dynamo.receiver import Closed

#: Bytes of the largest message from a client; "kill" and "stop" take 30.
MAX_WISH = 1024

# --- forms -------------------------------------------------------------------------------


class _Handshake(msgspec.Struct, frozen=True):
    subject: str
    stream_type: str


class _Prologue(msgspec.Struct, frozen=True):
    error: str | None
    typed_error: WireError | msgspec.UnsetType | None = msgspec.UNSET


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    data: msgspec.Raw = msgspec.Raw()
    complete_final: bool


_read_handshake = JSON.decoder(_Handshake, "handshake")
_read_prologue = JSON.decoder(_Prologue, "prologue")
_read_signal = JSON.decoder(str, "signal")
_envelope_readers = per_codec(lambda codec: codec.decoder(_Envelope, "item"))

_SIGNALS: Mapping[type[UpEvent | DownEvent], str] = {
    Sentinel: "sentinel",
    Stop: "stop",
    Kill: "kill",
}
_DOWN_EVENTS: Mapping[str, DownEvent] = {_SIGNALS[Stop]: Stop(), _SIGNALS[Kill]: Kill()}
_SENTINEL = JSON.encode(_SIGNALS[Sentinel])


def _header_of(event: UpEvent | DownEvent) -> object:
    if isinstance(event, Handshake):
        return _Handshake(event.subject, event.stream_type)
    if isinstance(event, Accepted):
        return _Prologue(None)
    if isinstance(event, Refused):
        typed = msgspec.UNSET if event.error is None else event.error
        return _Prologue(event.text, typed)
    return _SIGNALS[type(event)]


def _encode(event: UpEvent | DownEvent, codec: Codec) -> bytes:
    if isinstance(event, Item):
        before, after = codec.data_item
        return two_part.encode(data=b"".join((before, event.data, after)))
    if isinstance(event, CompleteFinal):
        return two_part.encode(data=codec.complete_final)
    return two_part.encode(header=JSON.encode(_header_of(event)))


def encode_handshake(event: Handshake) -> bytes:
    """The first words on a connection to the client."""
    return _encode(event, JSON)


# --- the two ends ------------------------------------------------------------------------


class WorkerEnd:
    """The worker's end of one answer, in the codec of its request."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._reader = TwoPartReader(limit=MAX_WISH)
        self.phase = Phase.CONNECTED
        self.wish = Wish.GO_ON

    def send(self, event: UpEvent) -> bytes:
        """An event as bytes.

        Raises:
            LocalProtocolError: it may not come now, or it is too large for the peer.
        """
        after = UP[self.phase].get(type(event))
        if after is None:
            raise LocalProtocolError(f"{type(event).__name__} in phase {self.phase.name}")
        data = _encode(event, self._codec)
        self.phase = after
        return data

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream, orderly or not.

        Raises:
            LocalProtocolError: data after the end, or events were left untaken.
        """
        self._reader.receive_data(data)

    def next_event(self) -> DownEvent | Closed | None:
        """What the client wants, or None when more data is needed.

        Raises:
            RemoteProtocolError: the client sent something else.
        """
        message = self._reader.next_event()
        if not isinstance(message, TwoPart):
            return message
        event = None if message.data else _DOWN_EVENTS.get(self._signal(message.header))
        after = None if event is None else DOWN[self.wish].get(type(event))
        if event is None or after is None:
            raise self._reader.fail("the client sent what only a worker may send")
        self.wish = after
        return event

    def _signal(self, header: bytes) -> str:
        try:
            return _read_signal(header)
        except RemoteProtocolError as exc:
            raise self._reader.fail(str(exc)) from exc


class ClientEnd:
    """The client's end of one answer.

    The handshake tells which request it is, and only then the codec is known: after the
    event ``Handshake`` the owner calls :meth:`accept`, or closes the connection, or does what
    the handshake is for if that is no answer (:mod:`dynamo_trio.wire.dynamo.items_in`).
    ``limit``: bytes of the largest message that is taken.
    """

    def __init__(self, *, limit: int = MAX_MESSAGE) -> None:
        self._reader = TwoPartReader(limit=limit, header_limit=min(limit, MAX_HEADER))
        self._codec: Codec | None = None
        self._waiting: deque[UpEvent] = deque()  # events of a message that held two
        self.phase = Phase.CONNECTED
        self.wish = Wish.GO_ON
        #: The refusal, if that is what came.
        self.refused: Refused | None = None

    @property
    def buffered(self) -> int:
        """Bytes of a message that is not whole yet."""
        return self._reader.buffered

    def accept(self, codec: Codec) -> None:
        """The request of the handshake is known; its answer comes in ``codec``.

        Raises:
            LocalProtocolError: there was no handshake.
        """
        if self.phase is Phase.CONNECTED:
            raise LocalProtocolError("there is no handshake to accept")
        self._codec = codec

    def send(self, event: DownEvent) -> bytes:
        """A wish as bytes.

        Raises:
            LocalProtocolError: the worker was told to kill the request already.
        """
        after = DOWN[self.wish].get(type(event))
        if after is None:
            raise LocalProtocolError(f"{type(event).__name__} after {self.wish.name}")
        self.wish = after
        return _encode(event, JSON)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream, orderly or not.

        Raises:
            LocalProtocolError: data after the end, or events were left untaken.
        """
        self._reader.receive_data(data)

    def next_event(self) -> UpEvent | Closed | None:
        """The next event, or None when more data is needed. Each moves ``phase``.

        Raises:
            RemoteProtocolError: the worker broke a rule.
            LocalProtocolError: the handshake was not accepted.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self._codec is None and self.phase is not Phase.CONNECTED:
            raise LocalProtocolError("accept the handshake before reading on")
        message = self._reader.next_event()
        if not isinstance(message, TwoPart):
            return message
        return self._plain_item(message) or self._read(message)

    def ending(self) -> DynamoException | None:
        """What it means if the stream is over now; see :func:`ending`."""
        return ending(self.phase, self.refused)

    def _plain_item(self, message: TwoPart) -> Item | None:
        """An item in the very form that MessagePack workers write: nearly every message.

        The map has two keys, of which the first is ``data``, and ends with the other. If there
        is more than one value between them, who reads the item finds that out.
        """
        data, (before, after) = message.data, MSGPACK.data_item
        if self._codec is not MSGPACK or self.phase is not Phase.STREAMING or message.header:
            return None
        if not (data.startswith(before) and data.endswith(after)):
            return None
        value = data[len(before) : -len(after)]
        return Item(value) if len(value) > 1 else None

    def _read(self, message: TwoPart) -> UpEvent:
        try:
            first, *more = [self._move(event) for event in self._events(message)]
        except RemoteProtocolError as exc:
            self._reader.give_up(exc)
            raise
        self._waiting.extend(more)
        return first

    def _move(self, event: UpEvent) -> UpEvent:
        after = UP[self.phase].get(type(event))
        if after is None:
            raise RemoteProtocolError(
                f"the worker sent {type(event).__name__} in phase {self.phase.name}"
            )
        self.phase = after
        if isinstance(event, Refused):
            self.refused = event
        return event

    def _events(self, message: TwoPart) -> list[UpEvent]:
        """What a message says. Two events if it holds the last item and the end at once."""
        if bool(message.header) is bool(message.data):
            raise RemoteProtocolError("the worker sent a message with both parts, or with none")
        if message.data:
            return self._from_data(message.data)
        return [self._from_header(message.header)]

    def _from_header(self, header: bytes) -> UpEvent:
        if self.phase is Phase.CONNECTED:
            return _handshake(_read_handshake(header))
        if self.phase is Phase.GREETED:
            return _prologue(_read_prologue(header))
        if header != _SENTINEL:
            raise RemoteProtocolError(f"the worker sent the header {header[:64]!r}")
        return Sentinel()

    def _from_data(self, data: bytes) -> list[UpEvent]:
        if self._codec is None:
            raise RemoteProtocolError("the worker sent an item before the handshake")
        try:
            envelope = _envelope_readers[self._codec.name](data)
        except RemoteProtocolError as exc:
            raise UnreadableItem(str(exc)) from exc
        value = bytes(envelope.data)
        events: list[UpEvent] = [] if value in (b"", self._codec.null) else [Item(value)]
        if envelope.complete_final:
            events.append(CompleteFinal())
        if not events:
            raise UnreadableItem("the worker sent an item with nothing in it")
        return events


def _handshake(form: _Handshake) -> Handshake:
    if form.stream_type not in (RESPONSE, REQUEST):
        raise RemoteProtocolError(f"a handshake for a stream of type {form.stream_type[:64]!r}")
    return Handshake(form.subject, form.stream_type)


def _prologue(form: _Prologue) -> Accepted | Refused:
    typed = form.typed_error if isinstance(form.typed_error, WireError) else None
    if form.error is None and typed is None:
        return Accepted()
    return Refused(form.error or "", typed)
