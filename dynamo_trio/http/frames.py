"""What an HTTP/2 client sends, frame by frame, before the protocol engine sees it.

Theory of operation
-------------------
A frame may be nine bytes long and cost its receiver a hundred microseconds: one read of 64 KiB
can hold seven thousand of them, and the engine takes a read as a whole. So what was read is
given on in small pieces (:meth:`FrameGate.pieces`), with a turn for others between them; and
what honest clients send seldom has a budget:

* *Control frames* (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, ..., and DATA that is empty and ends
  nothing). A request earns one, and what is sent to the client earns two for each DATA frame,
  for a client may open the windows of its stream and of the connection behind each of them.
* *Streams that the client resets.* To begin a request and take it back costs the client nothing.

Whoever has used up a budget is sent away (RFC 9113, 10.5: ENHANCE_YOUR_CALM). The gate parses no
more than the nine bytes before each frame; whether all this is HTTP/2 is for the engine to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: RFC 9113, 6: the types that matter here, and the flag of what ends a stream.
DATA, HEADERS, RST_STREAM, GOAWAY = 0, 1, 3, 7
END_STREAM = 0x1
#: RFC 9113, 7.
NO_ERROR, ENHANCE_YOUR_CALM = 0x0, 0xB
#: RFC 9113, 6.8: the last stream of a shutdown that refuses nothing yet.
ALL_STREAMS = 2**31 - 1
FRAME_HEAD = 9
#: One piece costs so much at most, before others get their turn: a control frame costs one.
PIECE_COST = 16
#: A request is much more work; and of bodies so many bytes cost as much as a control frame.
REQUEST_COST, BODY_BYTES = 4, 4096
#: DATA of fewer bytes, sent to a client, earns it nothing: or it could ask for single bytes.
EARNING_BYTES = 64
CONTROL_BURST, CONTROL_RATE = 200, 50
#: No client stores up more than this.
CONTROL_MOST = 10_000
RESET_RATE = 50


class SentAway(Exception):
    """The connection is closed for what its client does. The text says what that is."""


@attrs.define(eq=False)
class Budget:
    """A bucket of tokens, which fills with time up to ``burst``, and by what is earned beyond."""

    burst: float
    #: Per second.
    rate: float
    #: Invariant: not negative.
    left: float = attrs.field(init=False)
    _clock: Callable[[], float] = attrs.field(default=trio.current_time, kw_only=True)
    _filled_at: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left, self._filled_at = self.burst, self._clock()

    def earn(self, tokens: int) -> None:
        self.left = min(self.left + tokens, max(self.left, CONTROL_MOST))

    def spend(self) -> bool:
        """Take one, if there is one."""
        if self.left < 1:
            self._fill()
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def _fill(self) -> None:
        now = self._clock()
        self.left = min(self.burst, self.left + (now - self._filled_at) * self.rate)
        self._filled_at = now


@attrs.define(eq=False)
class FrameGate:
    """Of one HTTP/2 connection, from its first byte."""

    #: Requests at once. Twice as many may be taken back at once.
    _streams: int
    _control: Budget = attrs.field(factory=lambda: Budget(CONTROL_BURST, CONTROL_RATE))
    _resets: Budget = attrs.field(init=False)
    #: Bytes of the frame that has begun (or of the preface) which have not come yet.
    _left: int = len(PREFACE)
    #: The beginning of a frame's head.
    _head: bytes = b""
    #: What the piece that is being put together costs.
    _cost: int = 0

    def __attrs_post_init__(self) -> None:
        self._resets = Budget(2 * self._streams, RESET_RATE)

    def earn(self, frames: int) -> None:
        """So many DATA frames were sent to the client."""
        if frames:
            self._control.earn(2 * frames)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """``data`` in pieces that cost little.

        Raises:
            SentAway: what follows the last piece is too much.
        """
        start, at = 0, self._skip(data, 0)
        while at < len(data):
            begun = at
            head = self._head + data[at : at + FRAME_HEAD - len(self._head)]
            at += len(head) - len(self._head)
            if len(head) < FRAME_HEAD:
                self._head = head
                break
            self._head = b""
            if self._cost >= PIECE_COST:
                yield data[start:begun]
                start, self._cost = begun, 0
            self._count(head)
            at = self._skip(data, at)
        self._cost = 0
        yield data[start:]

    def _skip(self, data: bytes, at: int) -> int:
        step = min(self._left, len(data) - at)
        self._left -= step
        return at + step

    def _count(self, head: bytes) -> None:
        self._left, kind = int.from_bytes(head[:3]), head[3]
        self._cost += 1
        if kind == DATA and (self._left or head[4] & END_STREAM):
            self._cost += self._left // BODY_BYTES
        elif kind == HEADERS:
            self._cost += REQUEST_COST
            self._control.earn(1)
        elif kind == RST_STREAM:
            if not self._resets.spend():
                raise SentAway("it takes back too many requests")
        elif not self._control.spend():
            raise SentAway("it sends too many control frames")


def goaway(code: int, last_stream: int = ALL_STREAMS) -> bytes:
    """A GOAWAY frame (RFC 9113, 6.8)."""
    payload = last_stream.to_bytes(4) + code.to_bytes(4)
    return len(payload).to_bytes(3) + bytes([GOAWAY, 0]) + bytes(4) + payload
