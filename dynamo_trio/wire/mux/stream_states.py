"""What may follow what on one stream of a mux connection.

Theory of operation
-------------------
There is one table, :data:`MOVES`, for both ends. Each end has a view of the stream which moves
by the frames that it sends and by those that it receives; a frame is judged in the view of
who sends it (a mistake there is ours, LocalProtocolError) and of who receives it
(RemoteProtocolError).

The views differ while frames are under way. That is harmless in all states but the last,
because whatever an end may send in its view is allowed in the other's as well: what the other
end can have done meanwhile has not closed it. Only the end is different. A frame for a stream
that has ended here may have left before its sender knew, so it is *late*, and ignored; a frame
for a stream that was never opened is an error. Numbers of streams rise and are never used
again, so the two can be told apart without remembering what has ended.

PART and DROP are not in the table: they are pieces of an OPEN or an ITEM, which counts when it
is whole.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.wire.mux.frames import FrameType as F

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class StreamState(enum.Enum):
    """Where a stream is. The value says what that means."""

    IDLE = "not opened yet"
    OFFERED = "opened, items stream in, the worker has not answered"
    ASKED = "opened, the request is whole, the worker has not answered"
    TALKING = "accepted; both ends send items"
    ANSWERING = "accepted, the request is whole; the worker sends"
    ENDED = "over; what still comes is ignored"

    __hash__ = object.__hash__  # as that of Side, below


class Side(enum.Enum):
    """Who sends a frame."""

    CLIENT = "client"
    WORKER = "worker"

    # Members are single, and the hash of an enum's name costs more than all the rest of a look-up.
    __hash__ = object.__hash__


@frozen
class Move:
    """One row: who sends what in which state, what comes of it, and when it is meant."""

    source: StreamState
    sender: Side
    frame: F
    target: StreamState
    remark: str = ""


def _moves() -> Iterator[Move]:
    s, client, worker = StreamState, Side.CLIENT, Side.WORKER
    yield Move(s.IDLE, client, F.OPEN, s.ASKED, "the request is whole")
    yield Move(s.IDLE, client, F.OPEN, s.OFFERED, "further items stream in")
    yield Move(s.OFFERED, client, F.DONE, s.ASKED, "no more items stream in")
    yield Move(s.OFFERED, worker, F.OPENED, s.TALKING, "accepted")
    yield Move(s.ASKED, worker, F.OPENED, s.ANSWERING, "accepted")
    yield Move(s.TALKING, client, F.ITEM, s.TALKING)
    yield Move(s.TALKING, client, F.DONE, s.ANSWERING, "no more items stream in")
    yield Move(s.TALKING, worker, F.CREDIT, s.TALKING)
    yield Move(s.ANSWERING, worker, F.CREDIT, s.ANSWERING, "left before the DONE was known")
    for source in (s.TALKING, s.ANSWERING):
        yield Move(source, worker, F.TOKENS, source)
        yield Move(source, worker, F.ITEM, source)
        yield Move(source, worker, F.DONE, s.ENDED, "the answer is whole; also within TOKENS")
        yield Move(source, worker, F.ERROR, s.ENDED, "the answer is not whole")
    for source in (s.OFFERED, s.ASKED):
        yield Move(source, worker, F.ERROR, s.ENDED, "refused")
    for source in (s.OFFERED, s.ASKED, s.TALKING, s.ANSWERING):
        yield Move(source, client, F.CREDIT, source)
        yield Move(source, client, F.STOP, source, "a wish; the worker ends the stream")
        yield Move(source, client, F.CANCEL, s.ENDED, "the client left")


MOVES: tuple[Move, ...] = tuple(_moves())

#: state -> sender -> frame -> next state. An OPEN is not in it: its flag decides.
NEXT: Mapping[StreamState, Mapping[Side, Mapping[F, StreamState]]] = {
    state: {
        side: {
            move.frame: move.target
            for move in MOVES
            if (move.source, move.sender) == (state, side) and state is not StreamState.IDLE
        }
        for side in Side
    }
    for state in StreamState
}

#: In which tokens and items of an answer may come.
ACCEPTED = frozenset({StreamState.TALKING, StreamState.ANSWERING})


def opened(*, streams_in: bool) -> StreamState:
    """The first state of a stream."""
    return StreamState.OFFERED if streams_in else StreamState.ASKED
