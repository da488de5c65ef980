"""Bytes in, events out: what every reader of the wire has in common.

Theory of operation
-------------------
A reader is used in the manner of h11. Its owner passes on what a socket gave
(:meth:`Receiver.receive_data`; ``b""`` says that the peer has closed) and then takes
events (:meth:`Receiver.next_event`) until there is none. The events depend on the bytes
alone, never on how a socket has cut them.

Memory is bounded by two rules. A message is measured by its *announced* length, before
its bytes are kept, so the rest of a message that is still under way is never longer than
the limit; and new data is refused while more than that is waiting to be taken.

A peer that has broken a rule is not listened to again: the buffer is dropped and the same
error is raised by every later call of :meth:`Receiver.next_event`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from attrs import frozen

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError, UnexpectedTls

E = TypeVar("E")

#: How a TLS client begins (a handshake record), and how a TLS server answers what it cannot
#: read (an alert). As lengths of our own messages both are far above any limit.
_TLS_BEGINNINGS = (b"\x16\x03", b"\x15\x03")
_HTTP_BEGINNINGS = (
    *(b"GET ", b"POST ", b"HEAD ", b"PUT ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT "),
    *(b"PRI * ", b"HTTP/"),
)
#: What the peers of our own plane begin with (:mod:`dynamo_trio.wire.mux`).
MUX_BEGINNING = b"dynmux"


def stranger(data: bytes | bytearray) -> RemoteProtocolError | None:
    """What a peer speaks that begins so, if it is known. To be asked of what makes no sense
    otherwise, and of a peer's first bytes only."""
    if data.startswith(_TLS_BEGINNINGS):
        return UnexpectedTls("the peer speaks TLS")
    if data.startswith(_HTTP_BEGINNINGS):
        return RemoteProtocolError("the peer speaks HTTP")
    if data.startswith(MUX_BEGINNING):
        return RemoteProtocolError("the peer speaks mux, and this port is one of the tcp plane")
    return None


def may_be_stranger(data: bytes | bytearray) -> bool:
    """Must more have come before :func:`stranger` can tell? So it never matters how a socket
    has cut the bytes."""
    known = (*_TLS_BEGINNINGS, *_HTTP_BEGINNINGS, MUX_BEGINNING)
    return any(len(data) < len(begin) and begin.startswith(data) for begin in known)


@frozen
class Closed:
    """The peer sends no more. ``inside``: it ended in the middle of a message."""

    inside: bool = False


class Receiver(ABC, Generic[E]):
    """Turns bytes into events of one kind. ``limit``: bytes of the largest whole message."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Invariant: at most ``limit`` bytes more than the last piece that was received.
        self._buffer = bytearray()
        self._failure: RemoteProtocolError | None = None
        self._ended = False
        self._told = False  # the event Closed was given

    @property
    def buffered(self) -> int:
        """Bytes that are held and not yet part of an event."""
        return len(self._buffer)

    @property
    def is_empty(self) -> bool:
        """Is nothing held, and may more come?"""
        return not (self._buffer or self._ended or self._failure is not None)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream. After a failure it is dropped.

        Raises:
            LocalProtocolError: data after the end, or whole messages were left untaken.
        """
        if self._failure is not None:
            return
        if self._ended:
            raise LocalProtocolError("data was received after the end of the stream")
        if len(self._buffer) > self._limit:
            raise LocalProtocolError("take all events before receiving more data")
        self._buffer += data
        self._ended = not data

    def next_event(self) -> E | Closed | None:
        """The next event, or None when more data is needed.

        Raises:
            RemoteProtocolError: the peer broke a rule; nothing more can be read.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            event = self._parse()
        except RemoteProtocolError as exc:
            self.give_up(exc)
            raise
        return self._end() if event is None else event

    def give_up(self, failure: RemoteProtocolError) -> RemoteProtocolError:
        """Stop listening for this reason; returns it. Also for rules that only an owner knows."""
        self._failure = failure
        self._buffer.clear()
        return failure

    def fail(self, why: str) -> RemoteProtocolError:
        """Stop listening, in words."""
        return self.give_up(RemoteProtocolError(why))

    def _end(self) -> Closed | None:
        if not self._ended or self._told:
            return None
        self._told = True
        inside = bool(self._buffer)
        self._buffer.clear()
        return Closed(inside)

    def _take(self, size: int) -> bytes:
        """Remove ``size`` bytes, which must be there, from the front of the buffer."""
        with memoryview(self._buffer) as view:
            taken = bytes(view[:size])
        del self._buffer[:size]
        return taken

    @abstractmethod
    def _parse(self) -> E | None:
        """Take one event off the buffer, if a whole one is there.

        Raises:
            RemoteProtocolError: what is there can never become an event.
        """
