"""The acknowledgement of a request: accepted, or a refusal in words.

::

    u32be length | text      length 0: accepted

Theory of operation
-------------------
Dynamo 1.5.1's frontend knows two refusals, by their beginning; *any other text is taken
for an acceptance*, and the client waits for a stream that never comes. So what a refusal
is about and how it is spelled are two things here:

* :func:`refusal` spells everything as ``Server overloaded: ...``, which lets that frontend
  try another worker at once. Only a message that is too large, or that cannot be read
  (:func:`unreadable`), is ``Server unavailable: ...``, which fails the request at once, since
  trying elsewhere would not help. (The real worker's own ``Read error: message too large``
  leaves its frontend waiting for ever, if it arrives before a reset.)
* :func:`classify` reads what workers of either kind write. Any text is a refusal here.
"""

from __future__ import annotations

import enum
import struct

from attrs import frozen

from dynamo_trio.errors import (
    CannotConnect,
    Draining,
    DynamoException,
    MessageTooLarge,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.receiver import Receiver, may_be_stranger, stranger

#: Bytes of the longest text. The real worker's are about a hundred.
MAX_TEXT = 16 * 2**10

_LENGTH = struct.Struct(">I")


@frozen
class Ack:
    """An acknowledgement. No text: the request was accepted."""

    text: str = ""


ACCEPTED = Ack()


class Verdict(enum.Enum):
    """What an acknowledgement says about its request."""

    ACCEPTED = enum.auto()
    OVERLOADED = enum.auto()  # the worker is full
    DRAINING = enum.auto()  # the worker is stopping
    UNAVAILABLE = enum.auto()  # the worker cannot work
    UNKNOWN_ENDPOINT = enum.auto()  # not served here, or not any more
    TOO_LARGE = enum.auto()  # the worker takes no message of this size
    REFUSED = enum.auto()  # some other text


_OVERLOADED = "Server overloaded: "
_DRAINING = "draining"
_UNAVAILABLE = "Server unavailable:"
_UNKNOWN_ENDPOINT = "Unknown endpoint: "
_READ_ERROR = "Read error: "
_TOO_LARGE = "message too large"

#: Beginning of the text -> verdict. The first that fits counts.
_VERDICTS = (
    (_OVERLOADED + _DRAINING, Verdict.DRAINING),
    (_OVERLOADED + _UNKNOWN_ENDPOINT, Verdict.UNKNOWN_ENDPOINT),
    (_OVERLOADED.rstrip(), Verdict.OVERLOADED),
    (f"{_UNAVAILABLE} {_READ_ERROR}{_TOO_LARGE}", Verdict.TOO_LARGE),
    (_UNAVAILABLE, Verdict.UNAVAILABLE),
    (_UNKNOWN_ENDPOINT.rstrip(), Verdict.UNKNOWN_ENDPOINT),
    (_READ_ERROR + _TOO_LARGE, Verdict.TOO_LARGE),
)

# As in Dynamo 1.5.1, a worker that calls itself unavailable does not make a request move.
_ERRORS: dict[Verdict, type[DynamoException]] = {
    Verdict.OVERLOADED: Overloaded,
    Verdict.DRAINING: Draining,
    Verdict.UNAVAILABLE: NoWorker,
    Verdict.UNKNOWN_ENDPOINT: CannotConnect,
    Verdict.TOO_LARGE: PayloadTooLarge,
    Verdict.REFUSED: CannotConnect,
}


def classify(ack: Ack) -> Verdict:
    """What the worker said."""
    if not ack.text:
        return Verdict.ACCEPTED
    found = (verdict for begin, verdict in _VERDICTS if ack.text.startswith(begin))
    return next(found, Verdict.REFUSED)


def refused(ack: Ack) -> DynamoException | None:
    """The error that a refusal means to a client of ours; None if the request was accepted."""
    verdict = classify(ack)
    if verdict is Verdict.ACCEPTED:
        return None
    if verdict is Verdict.UNKNOWN_ENDPOINT:  # its text names the fleet's inside
        return CannotConnect("the worker does not serve this endpoint any more")
    return _ERRORS[verdict](ack.text.removeprefix(_OVERLOADED).removeprefix(_UNAVAILABLE).strip())


def refusal(error: DynamoException) -> Ack:
    """How a worker of ours says no; see the head of this module for the spelling."""
    if isinstance(error, MessageTooLarge):
        return Ack(f"{_UNAVAILABLE} {_READ_ERROR}{error.message}")
    if isinstance(error, Draining):
        return Ack(_OVERLOADED + _DRAINING)
    return Ack(_OVERLOADED + error.message.removeprefix(_OVERLOADED))


def unknown_endpoint(path: str) -> Ack:
    """The refusal of a request for an endpoint that is not served here."""
    return Ack(f"{_OVERLOADED}{_UNKNOWN_ENDPOINT}{path}")


def unreadable(error: RemoteProtocolError) -> Ack:
    """The refusal of a request that does not even say where to answer.

    The one case for ``Server unavailable``: no other worker could read it either.
    """
    return Ack(f"{_UNAVAILABLE} {error.message}")


def encode_ack(ack: Ack) -> bytes:
    """The acknowledgement as bytes. A text that is too long is cut."""
    text = ack.text.encode("utf-8", "replace")[:MAX_TEXT]
    return _LENGTH.pack(len(text)) + text


class AckReader(Receiver[Ack]):
    """Reads the acknowledgements of one connection."""

    def __init__(self) -> None:
        super().__init__(_LENGTH.size + MAX_TEXT)

    def _parse(self) -> Ack | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MAX_TEXT:
            if may_be_stranger(self._buffer):
                return None
            if (known := stranger(self._buffer)) is not None:
                raise known
            raise RemoteProtocolError(f"the peer acknowledged with {size} bytes of text")
        if len(self._buffer) < _LENGTH.size + size:
            return None
        text = self._take(_LENGTH.size + size)[_LENGTH.size :]
        return Ack(text.decode("utf-8", "replace"))
