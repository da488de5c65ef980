"""What the two ends of an answer's connection say, in which order, and how it may end.

Theory of operation
-------------------
Which event may follow which is written in two tables, :data:`UP` for the worker's direction
and :data:`DOWN` for the client's; :mod:`dynamo_trio.wire.dynamo.call_home` drives both of its ends
with them. What an ending means is a function of the phase in which the stream was left
(:func:`ending`).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from dynamo_trio.errors import CannotConnect, Disconnected, DynamoException, InvalidArgument
from dynamo_trio.wire.dynamo.control import RESPONSE
from dynamo_trio.wire.dynamo.wire_errors import WireError, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Mapping

# --- events ------------------------------------------------------------------------------


@frozen
class Handshake:
    """The worker's first words: which request this connection answers."""

    subject: str
    #: ``response``, or ``request`` where the items of a request are asked for.
    stream_type: str = RESPONSE


@frozen
class Accepted:
    """The prologue of a stream that begins. It may come long after the handshake."""


@frozen
class Refused:
    """The prologue of a stream that never begins."""

    text: str
    error: WireError | None = None

    @classmethod
    def because(cls, error: BaseException) -> Refused:
        """The refusal that tells this error."""
        wire_error = to_wire(error)
        return cls(f"Generate Error: {wire_error.message}", wire_error)


@frozen
class Item:
    """One item, encoded in the codec of the request."""

    data: bytes


@frozen
class CompleteFinal:
    """The answer is whole: nothing is missing."""


@frozen
class Sentinel:
    """The worker is done with this connection."""


@frozen
class Stop:
    """The client wants no more; the worker should come to a good end."""


@frozen
class Kill:
    """The client wants no more and listens no more."""


UpEvent: TypeAlias = Handshake | Accepted | Refused | Item | CompleteFinal | Sentinel
DownEvent: TypeAlias = Stop | Kill


# --- phases ------------------------------------------------------------------------------


class Phase(enum.Enum):
    """How far the worker's direction has come."""

    CONNECTED = enum.auto()
    GREETED = enum.auto()
    STREAMING = enum.auto()
    COMPLETE = enum.auto()  # all items have come
    REFUSED = enum.auto()
    DONE = enum.auto()  # complete, and the connection is of no more use
    CUT = enum.auto()  # the same, but not complete


class Wish(enum.Enum):
    """What the client wants."""

    GO_ON = enum.auto()
    STOP = enum.auto()
    KILL = enum.auto()


UP: Mapping[Phase, Mapping[type[UpEvent], Phase]] = {
    Phase.CONNECTED: {Handshake: Phase.GREETED},
    Phase.GREETED: {Accepted: Phase.STREAMING, Refused: Phase.REFUSED},
    Phase.STREAMING: {
        Item: Phase.STREAMING,
        CompleteFinal: Phase.COMPLETE,
        Sentinel: Phase.CUT,
    },
    Phase.COMPLETE: {Sentinel: Phase.DONE},
    Phase.REFUSED: {Sentinel: Phase.REFUSED},
    Phase.DONE: {},
    Phase.CUT: {},
}

DOWN: Mapping[Wish, Mapping[type[DownEvent], Wish]] = {
    Wish.GO_ON: {Stop: Wish.STOP, Kill: Wish.KILL},
    Wish.STOP: {Stop: Wish.STOP, Kill: Wish.KILL},
    Wish.KILL: {Kill: Wish.KILL},
}


def ending(phase: Phase, refused: Refused | None = None) -> DynamoException | None:
    """What it means that the worker's direction ended (FIN, reset or sentinel) in ``phase``.

    None: the answer is whole. ``refused`` is the refusal that led to ``Phase.REFUSED``.
    """
    if phase in (Phase.COMPLETE, Phase.DONE):
        return None
    if phase is Phase.REFUSED:
        return refusal_error(refused or Refused(""))
    if phase in (Phase.STREAMING, Phase.CUT):
        return Disconnected("Stream ended before generation completed")
    return Disconnected("Worker disconnected before the response stream was established")


def refusal_error(refused: Refused) -> DynamoException:
    """The error that a refusal means to the client.

    As in Dynamo 1.5.1 an invalid request keeps its class and message, and everything else
    is a failure to reach a worker; but a class that may move keeps its name.
    """
    error = None if refused.error is None else from_wire(refused.error)
    if error is not None and (isinstance(error, InvalidArgument) or error.migratable):
        return error
    text = f": {refused.text}" if refused.text else ""
    return CannotConnect(f"Worker generate() failed before response stream{text}")
