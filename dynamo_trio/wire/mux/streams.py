"""One stream in the table of a connection's end, and its credit both ways.

Theory of operation
-------------------
An item costs one credit, and one more for every 64 KiB of it; a token costs one. A message may
leave when there is *any* credit, and what it costs beyond that is owed: otherwise a message
longer than the whole window could never leave. Both ends count alike, so the receiver, who
knows of a grant before its sender's peer does, never sees less credit than the sender had.

An owner grants by the number of items that it has consumed. What an item cost beyond one is
given back together with it: the n-th item that is granted is the n-th that came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field, frozen

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.mux.limits import BYTES_PER_CREDIT, MAX_CREDIT
from dynamo_trio.wire.mux.stream_states import ACCEPTED, NEXT, Side, StreamState

if TYPE_CHECKING:
    from array import array

    from dynamo_trio.wire.mux.frames import FrameType


def cost(size: int) -> int:
    """Credit that an item of so many bytes costs."""
    return 1 + size // BYTES_PER_CREDIT


@frozen
class End:
    """The last entry of a queue: a frame, or nothing if a sid in a list of ends says it."""

    frame: bytes | None = None


#: Tokens, an encoded item, or the end of what is sent. Tokens that are held may be many, and wait
#: in little room.
Entry: TypeAlias = list[int] | bytes | End
Held: TypeAlias = "array[int] | bytes | End"
#: Of four bytes each.
HELD_TOKENS = "I"


@define(eq=False)
class Stream:
    """A stream in the table."""

    sid: int
    state: StreamState
    #: What we may send; below zero after a long item.
    credit: int
    #: What the peer may send.
    allowed: int
    #: All that we were given.
    given: int = field(init=False)
    #: What we might send after the last grant.
    _peak: int = field(init=False)
    #: Grants are told when so many have come together: half a window.
    step: int = field(init=False)
    #: Equivalent to ``state in ACCEPTED``, which would cost more for each token.
    answering: bool = False
    #: Has its OPEN left, or come?
    left: bool = True
    #: Was the end of what we send queued already?
    closing: bool = False
    #: Is it to be stopped once its OPEN has left?
    stop: bool = False

    # Invariant: ``queue`` has its credit and waits to leave; ``held`` waits for credit and is
    # behind it. While something is held there is no credit, so nothing can overtake it.
    queue: list[Entry] = field(factory=list, repr=False)
    held: list[Held] = field(factory=list, repr=False)

    _total: int = field(init=False)  # ``allowed`` as if nothing had come
    _surplus: int = 0  # what items that came cost beyond one each
    _granted: int = 0  # items that were granted again
    untold: int = 0  # granted and not told yet
    _owed: list[tuple[int, int]] = field(factory=list, repr=False)  # n-th item: its cost beyond one

    def __attrs_post_init__(self) -> None:
        self._total = self.allowed
        self.step = max(1, self.allowed // 2)
        self.given = self._peak = self.credit

    # --- the state -----------------------------------------------------------------------

    def move(self, sender: Side, frame: FrameType) -> None:
        """Follow the table. The caller has seen :meth:`may`."""
        self.become(NEXT[self.state][sender][frame])

    def become(self, state: StreamState) -> None:
        """Set the state."""
        self.state = state
        self.answering = state in ACCEPTED

    def may(self, sender: Side, frame: FrameType) -> bool:
        """Does the table allow this frame now?"""
        return frame in NEXT[self.state][sender]

    def sends(self, sender: Side, frame: FrameType) -> None:
        """We send it.

        Raises:
            LocalProtocolError: we may not.
        """
        if not self.may(sender, frame):
            raise LocalProtocolError(self._wrong(sender, frame))
        self.move(sender, frame)

    def receives(self, sender: Side, frame: FrameType) -> None:
        """The peer sent it.

        Raises:
            RemoteProtocolError: it may not.
        """
        following = NEXT[self.state][sender].get(frame)
        if following is None:
            raise self.wrong(sender, frame)
        self.become(following)

    def wrong(self, sender: Side, frame: FrameType) -> RemoteProtocolError:
        """That the peer sent what it may not."""
        return RemoteProtocolError(self._wrong(sender, frame))

    def _wrong(self, sender: Side, frame: FrameType) -> str:
        return f"{frame.name} of a {sender.value} for stream {self.sid} in state {self.state.name}"

    # --- credit --------------------------------------------------------------------------

    @property
    def has_credit(self) -> bool:
        """May another item leave at once, behind what is queued?"""
        return self.credit > 0 and not self.closing

    @property
    def has_sent(self) -> bool:
        """Has any item left, or wants to?"""
        return bool(self.held) or self.credit < self.given

    @property
    def lacks_credit(self) -> bool:
        """Would more leave if only there were credit?"""
        return self.credit <= 0 and not self.queue

    def let_in(self, window: int) -> None:
        """The peer may send so much at first, beside what was granted already."""
        self.allowed += window
        self._total += window
        self.step = max(1, self.allowed // 2)

    def charge(self, size: int) -> int:
        """The peer sent an item of so many bytes. Returns what is to be told of credit now.

        Raises:
            RemoteProtocolError: it had no credit.
        """
        if self.allowed <= 0:
            raise RemoteProtocolError(f"an item without credit on stream {self.sid}")
        price = cost(size)
        self.allowed -= price
        if price == 1:
            return 0
        self._surplus += price - 1
        came = self._total - self.allowed - self._surplus
        self._owed.append((came, price - 1))
        return self._repay()

    def grant(self, items: int) -> int:
        """So many items were consumed. Returns what is to be told of credit now, often 0."""
        self._granted += items
        self.untold += items
        return self._repay()

    def _repay(self) -> int:
        while self._owed and self._owed[0][0] <= self._granted:
            self.untold += self._owed.pop(0)[1]
        return self.settle() if self.untold >= self.step else 0

    def settle(self) -> int:
        """What is to be told of credit, however little has come together."""
        told = min(self.untold, MAX_CREDIT - max(self.allowed, 0))
        self.untold = 0
        self.allowed += told
        self._total += told
        return told

    def provide(self, credit: int) -> None:
        """The peer gives so much to begin with."""
        self.credit = self.given = self._peak = credit

    def credited(self, amount: int) -> bool:
        """The peer granted so much. Returns whether it had got anything since the last time.

        Raises:
            RemoteProtocolError: nothing, or more than a stream may ever have.
        """
        if amount < 1 or self.credit + amount > MAX_CREDIT:
            raise RemoteProtocolError(f"a grant of {amount} credit on stream {self.sid}")
        earned = self.credit < self._peak
        self.given += amount
        self.credit += amount
        self._peak = self.credit
        return earned
