"""The way in of a request that streams in: the worker calls the client and is sent items.

Theory of operation
-------------------
Such a request's control message (``many_in``) has no body. It names two places to call, and
the worker opens a connection to each: one for the answer
(:mod:`dynamo_trio.wire.dynamo.call_home`), and this one. Here the worker says its handshake and
nothing else, ever. The client sends the items, bare values in the codec of the request without
an envelope, each as the data of a two-part message, and at last one closing word in a header:

* ``"sentinel"``: these were all items; the answer goes on.
* ``"stop"``: the client wants the answer to come to an end.
* ``"kill"``: nobody listens any more.

A connection that ends without a closing word was cut off: items may be missing. (Dynamo 1.5.1's
frontend says ``"stop"``, here and on the way back, whenever its own client is gone; that
includes one that has had its whole answer.)
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from dynamo_trio.errors import LocalProtocolError
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.call_home import encode_handshake
from dynamo_trio.wire.dynamo.call_home_states import Handshake, Item
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.control import REQUEST
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.two_part import MAX_HEADER, MAX_MESSAGE, TwoPart, TwoPartReader

if TYPE_CHECKING:
    from collections.abc import Mapping


class Closing(enum.Enum):
    """The client's closing word."""

    COMPLETE = "sentinel"
    STOP = "stop"
    KILL = "kill"


@frozen
class CutOff:
    """The connection ended without a closing word. ``inside``: in the middle of an item."""

    inside: bool = False


InEvent: TypeAlias = Item | Closing | CutOff

_WORDS: Mapping[bytes, Closing] = {JSON.encode(word.value): word for word in Closing}


class ItemSender:
    """The client's end, once the handshake has come."""

    def __init__(self) -> None:
        self.closed = False

    def send(self, event: Item | Closing) -> bytes:
        """An event as bytes.

        Raises:
            LocalProtocolError: it comes behind the closing word, or it is too large for the peer.
        """
        if self.closed:
            raise LocalProtocolError("an item, or another closing word, behind the closing word")
        if isinstance(event, Item):
            return two_part.encode(data=event.data)
        self.closed = True
        return two_part.encode(header=JSON.encode(event.value))


class ItemReceiver:
    """The worker's end. ``limit``: bytes of the largest message that is taken."""

    def __init__(self, *, limit: int = MAX_MESSAGE) -> None:
        self._reader = TwoPartReader(limit=limit, header_limit=min(limit, MAX_HEADER))
        #: Nothing more is to come.
        self.closed = False

    def greet(self, subject: str) -> bytes:
        """The worker's only words."""
        return encode_handshake(Handshake(subject, REQUEST))

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream, orderly or not.

        Raises:
            LocalProtocolError: data after the end, or events were left untaken.
        """
        self._reader.receive_data(data)

    def next_event(self) -> InEvent | None:
        """The next event, or None when more data is needed, or after the closing word.

        Raises:
            RemoteProtocolError: the client broke a rule.
        """
        if self.closed:
            return None
        message = self._reader.next_event()
        if message is None:
            return None
        event = self._read(message)
        self.closed = not isinstance(event, Item)
        return event

    def _read(self, message: TwoPart | Closed) -> InEvent:
        if isinstance(message, Closed):
            return CutOff(message.inside)
        if message.data and not message.header:
            return Item(message.data)
        word = None if message.data else _WORDS.get(message.header)
        if word is None:
            raise self._reader.fail(
                f"the client sent no item, and the header {message.header[:64]!r}"
            )
        return word
