"""What waits to be sent over a mux connection, and in which order it leaves.

Theory of operation
-------------------
Nothing is encoded before it leaves, but for short frames that carry no item. There are three
lanes:

* *control*: answers, wishes, grants, pings, notices. It goes first, all of it.
* *tokens*: one batch for all streams, with the streams that end well behind it. What an
  engine's step said is one frame.
* *streams*: each has a queue of its own, from which one frame leaves in each round; a stream
  whose queue is not empty adds its tokens there. So the frames of a stream never overtake one
  another, and streams never wait for one another.

OPENs are a lane of their own, strictly in order, because numbers of streams must rise; an ACK
waits in it behind the OPENs that it speaks of. A message above one piece leaves in PARTs, one in
each round; the next such message waits until the last is whole, short ones do not.

GOAWAY leaves when nothing else can.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from attrs import define, field

from dynamo_trio.wire.mux.frames import (
    Drop,
    FrameType,
    Item,
    Open,
    Part,
    Pong,
    Stop,
    encode,
    encode_credit,
    encode_tokens,
)
from dynamo_trio.wire.mux.limits import MAGIC, MAX_PIECE
from dynamo_trio.wire.mux.stream_states import opened
from dynamo_trio.wire.mux.streams import End, Stream, cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_trio.wire.mux.stream_states import Side
    from dynamo_trio.wire.mux.streams import Entry

#: About what one token takes in a frame.
_TOKEN_SIZE = 6


@define(eq=False)
class Opening:
    """An OPEN that waits. ``form`` has neither payload nor, yet, what was granted meanwhile."""

    stream: Stream
    form: Open
    payload: bytes = field(repr=False)


@define(eq=False)
class _Parts:
    """The long message that is leaving: its next piece begins at ``at``."""

    stream: Stream
    payload: bytes = field(repr=False)
    opening: Opening | None = None
    at: int = 0


class Outgoing:
    """See above. ``forget`` is called with the number of a stream that ends by what leaves."""

    def __init__(self, side: Side, forget: Callable[[Stream], None]) -> None:
        self._side, self._forget = side, forget
        self._control: list[bytes] = []
        self.control_size = 0
        self._grants: dict[int, int] = {}
        self._pong: int | None = None
        #: Of all streams, as they travel: sid, token, sid, token. The same list for ever.
        self.batch: list[int] = []
        self._finished: list[int] = []
        self._openings: deque[Opening | bytes] = deque()
        # Invariant: a stream whose OPEN has left and whose queue is not empty is in exactly one
        # of these, or its long message is in ``_parts``. Streams without a queue may be there.
        self._ready: deque[Stream] = deque()
        self._waiting: deque[Stream] = deque()  # with a long message, while another is leaving
        self._parts: _Parts | None = None
        self._farewell: bytes | None = None
        self._magic = MAGIC  # said once, before the first frame
        self._over = False  # the farewell has left
        #: Streams whose end was in what was taken last.
        self.ends: list[int] = []
        self._size = 0  # bytes of queued items and of OPENs
        #: The highest stream whose OPEN has begun to leave.
        self.highest = 0

    # --- what is to be said --------------------------------------------------------------

    def control(self, frame: bytes) -> None:
        """Send an encoded frame before everything else."""
        self._control.append(frame)
        self.control_size += len(frame)

    def pong(self, number: int) -> None:
        """Answer a ping, and with it those before."""
        self._pong = number

    def credit(self, sid: int, amount: int) -> None:
        """Tell of credit."""
        self._grants[sid] = self._grants.get(sid, 0) + amount

    def opening(self, opening: Opening) -> None:
        """Send an OPEN behind those before it."""
        self._openings.append(opening)
        self._size += len(opening.payload)

    def behind_openings(self, frame: bytes) -> None:
        """Send an ACK when every OPEN that waits now has left. It stands for those before it."""
        if self._openings and isinstance(self._openings[-1], bytes):
            self._openings[-1] = frame
        else:
            self._openings.append(frame)

    def farewell(self, frame: bytes) -> None:
        """Send this last."""
        self._farewell = frame

    def clear(self) -> None:
        """Forget everything that waits."""
        for queue in (self._control, self._grants, self.batch, self._finished, self._openings,
                      self._ready, self._waiting):  # fmt: skip
            queue.clear()
        self.control_size = self._size = 0
        self._pong = self._parts = self._farewell = None

    # --- streams -------------------------------------------------------------------------

    def tokens(self, stream: Stream, token_ids: Sequence[int]) -> None:
        """Send tokens that have credit."""
        if stream.queue:
            stream.queue.append(list(token_ids))
        else:
            self._add(stream.sid, token_ids)

    def item(self, stream: Stream, payload: bytes) -> None:
        """Send an item that has credit."""
        self._size += len(payload)
        self._push(stream, payload)

    def end(self, stream: Stream, end: End) -> None:
        """Send the end of what we send on this stream."""
        if stream.queue or end.frame is not None or not stream.left:
            self._push(stream, end)
        else:
            self._ended(stream)

    def release(self, stream: Stream) -> None:
        """Move what is held to where it can leave, as far as the credit goes."""
        held = stream.held
        while held:
            entry = held[0]
            if isinstance(entry, End):
                self.end(stream, entry)
            elif stream.credit <= 0:
                return
            elif isinstance(entry, bytes):
                stream.credit -= cost(len(entry))
                self.item(stream, entry)
            elif stream.credit < len(entry):
                self.tokens(stream, entry[: stream.credit])
                del entry[: stream.credit]
                stream.credit = 0
                return
            else:
                stream.credit -= len(entry)
                self.tokens(stream, entry)
            del held[0]

    def drop(self, stream: Stream) -> None:
        """Send nothing more of this stream. Tokens in the batch leave all the same."""
        self._size -= sum(len(entry) for entry in stream.queue if isinstance(entry, bytes))
        stream.queue.clear()
        stream.held.clear()
        self._grants.pop(stream.sid, None)
        if not stream.left:
            self._drop_opening(stream)
        if self._parts is not None and self._parts.stream is stream:
            self._size += self._parts.at
            self._parts = None
            self.control(encode(Drop(stream.sid)))
            self._ready.extend(self._waiting)
            self._waiting.clear()

    def _drop_opening(self, stream: Stream) -> None:
        if self._parts is not None and self._parts.stream is stream:
            self._size -= len(self._parts.payload)
            return
        for opening in self._openings:
            if isinstance(opening, Opening) and opening.stream is stream:
                self._openings.remove(opening)
                self._size -= len(opening.payload)
                return

    def _push(self, stream: Stream, entry: Entry) -> None:
        stream.queue.append(entry)
        if len(stream.queue) == 1 and stream.left:
            self._ready.append(stream)

    def _add(self, sid: int, token_ids: Sequence[int]) -> None:
        batch = self.batch
        for token in token_ids:
            batch += (sid, token)

    def _ended(self, stream: Stream) -> None:
        self._finished.append(stream.sid)
        self._move(stream, FrameType.DONE)

    def _move(self, stream: Stream, frame: FrameType) -> None:
        stream.move(self._side, frame)
        self._forget(stream)

    # --- what leaves ---------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Is there nothing that can leave?"""
        if self._grants or self._control or self.batch or self._finished or self._openings:
            return self._over
        return self._over or not (
            self._ready or self._parts or self._farewell is not None or self._pong is not None
        )

    @property
    def size(self) -> int:
        """About how many bytes can leave."""
        tokens = _TOKEN_SIZE * (len(self.batch) + len(self._finished))
        return self._size + self.control_size + tokens

    @property
    def _has_control(self) -> bool:
        return bool(self._control or self._grants) or self._pong is not None

    @property
    def _has_data(self) -> bool:
        return bool(self.batch or self._finished or self._openings or self._ready or self._parts)

    def take(self, limit: int) -> bytes:
        """Take whole frames, until there are ``limit`` bytes of them."""
        self.ends.clear()
        if self.empty:
            return b""
        taken, self._magic = [self._magic], b""
        size = 0
        for frame in self._frames():
            taken.append(frame)
            size += len(frame)
            if size >= limit:
                break
        return b"".join(taken)

    def _frames(self) -> Iterator[bytes]:
        """What leaves, in order. Whoever stops in the middle has lost nothing."""
        yield self._take_control() + self._take_tokens()
        while self._has_data:
            yield self._take_tokens()
            while (frame := self._next_opening()) is not None:
                yield frame
            if self._parts is not None:
                yield self._next_part(self._parts)
            for _ in range(len(self._ready)):
                yield self._next_of(self._ready.popleft())
            yield self._take_control()  # a STOP that waited for its OPEN
        if self._farewell is not None:
            self._over = True
            yield self._farewell

    def _take_control(self) -> bytes:
        if not self._has_control:
            return b""
        frames, self._control, self.control_size = self._control, [], 0
        if self._pong is not None:
            frames.append(encode(Pong(self._pong)))
            self._pong = None
        if self._grants:
            frames.append(encode_credit([*chain.from_iterable(self._grants.items())]))
            self._grants.clear()
        return b"".join(frames)

    def _take_tokens(self) -> bytes:
        if not self.batch and not self._finished:
            return b""
        frame = encode_tokens(self.batch, self._finished)
        self.ends += self._finished
        self.batch.clear()
        self._finished.clear()
        return frame

    def _next_opening(self) -> bytes | None:
        """The next OPEN or ACK, whole; None if there is none that may leave now."""
        if not self._openings:
            return None
        opening = self._openings[0]
        if isinstance(opening, bytes):
            if self._parts is not None and self._parts.opening is not None:
                return None
            self._openings.popleft()
            return opening
        if len(opening.payload) > MAX_PIECE:
            if self._parts is None:
                self._openings.popleft()
                self.highest = opening.stream.sid
                self._parts = _Parts(opening.stream, opening.payload, opening)
            return None
        self._openings.popleft()
        return self._open(opening, opening.payload)

    def _open(self, opening: Opening, piece: bytes) -> bytes:
        stream, form = opening.stream, opening.form
        self._size -= len(piece)
        self.highest = max(self.highest, stream.sid)
        frame = encode(_with_payload(form, stream.allowed, piece))
        stream.left = True
        stream.become(opened(streams_in=form.streams_in))
        if stream.queue:
            self._ready.append(stream)
        if stream.stop:
            self.control(encode(Stop(stream.sid)))
        return frame

    def _next_part(self, parts: _Parts) -> bytes:
        stream = parts.stream
        piece = parts.payload[parts.at : parts.at + MAX_PIECE]
        parts.at += len(piece)
        if parts.at < len(parts.payload):
            self._size -= len(piece)
            return encode(Part(stream.sid, piece))
        self._parts = None
        self._ready.extend(self._waiting)
        self._waiting.clear()
        if parts.opening is not None:
            return self._open(parts.opening, piece)
        return self._item(stream, piece)

    def _next_of(self, stream: Stream) -> bytes:
        """The next frame of a stream; nothing if its tokens joined the batch, or it ended."""
        if not stream.queue:
            return b""
        entry = stream.queue[0]
        if isinstance(entry, bytes):
            return self._item(stream, entry) if len(entry) <= MAX_PIECE else self._long(stream)
        self._advance(stream)
        if isinstance(entry, list):
            self._add(stream.sid, entry)
            return b""
        if entry.frame is None:
            self._ended(stream)
            return b""
        self._move(stream, FrameType.ERROR)
        self.ends.append(stream.sid)
        return entry.frame

    def _long(self, stream: Stream) -> bytes:
        entry = stream.queue[0]
        if self._parts is not None or not isinstance(entry, bytes):
            self._waiting.append(stream)
        else:
            self._parts = _Parts(stream, entry)
        return b""

    def _item(self, stream: Stream, piece: bytes) -> bytes:
        self._size -= len(piece)
        self._advance(stream)
        return encode(Item(stream.sid, piece))

    def _advance(self, stream: Stream) -> None:
        del stream.queue[0]
        if stream.queue:
            self._ready.append(stream)


def _with_payload(form: Open, credit: int, payload: bytes) -> Open:
    return Open(form.sid, form.path, form.request_id, form.codec, form.streams_in, credit,
                form.sent_at_ns, form.metadata, payload)  # fmt: skip
