"""One end of a mux connection: bytes in, events out; calls in, bytes out.

Theory of operation
-------------------
The owner passes on what its socket gave (:meth:`MuxConnection.receive_data`) and takes events
(:meth:`MuxConnection.next_event`) until there is none. What it wants to say it says by a method
call, which only appends to what waits; :meth:`MuxConnection.data_to_send` makes the bytes, as
late as possible, so that all that an engine's step said leaves in one frame. After any of these
calls ``wants_to_send`` tells whether there is something to write.

A method that names a stream which has ended does nothing: the peer may have ended it a moment
ago. Only what can never be right raises :class:`~dynamo_trio.errors.LocalProtocolError`.

When the peer has broken a rule, ``next_event`` raises RemoteProtocolError, now and for ever; the
bytes to send are then one GOAWAY with the reason, and every method refuses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dynamo_trio.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.frames import FrameType, GoAwayCode, encode, in_a_line
from dynamo_trio.wire.mux.limits import (
    MAX_NUMBER,
    MAX_PROCESS,
    MAX_SOFTWARE,
    MAX_TEXT,
    SMALL_PIECE,
    VERSIONS,
    MuxLimits,
)
from dynamo_trio.wire.mux.outgoing import Outgoing
from dynamo_trio.wire.mux.reading import Assembly, FrameReader, Ignored
from dynamo_trio.wire.mux.streams import Stream, cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_trio.wire.mux.events import MuxEvent
    from dynamo_trio.wire.mux.frames import Frame
    from dynamo_trio.wire.mux.stream_states import Side

#: Frames without an event after which there is a Breath.
_BREATH = 64
#: Takes a frame of the kind it stands for.
Handler: TypeAlias = "Callable[[Any], MuxEvent | None]"


class MuxConnection(ABC):
    """What both ends have in common. ``software`` names this program to the peer's log, and
    ``process`` tells this process from others; the peer may know it again by that."""

    _side: ClassVar[Side]
    _peer_side: ClassVar[Side]

    def __init__(
        self,
        limits: MuxLimits | None = None,
        *,
        software: str = "dynamo_trio",
        process: str = "",
    ) -> None:
        self._limits = limits or MuxLimits()
        self._software, self._process = software[:MAX_SOFTWARE], process[:MAX_PROCESS]
        self._reader = FrameReader()
        self._out = Outgoing(self._side, self._forget)
        self._handlers: dict[type[Frame], Handler] = {**self._common(), **self._own()}
        self._events: deque[MuxEvent] = deque()
        self._peer: events.Established | None = None
        # Invariant: a stream is here from ``open`` or its OPEN until its end was sent or received.
        self._streams: dict[int, Stream] = {}
        self._assembly: Assembly | None = None
        self._failure: RemoteProtocolError | None = None
        self._incompatible = False
        self._leaving = False  # we said, or have queued, our last words
        self._left_alone = False  # the peer said its own
        self._last_sid = 0  # the highest that was opened here, whether its OPEN has left or not
        self._pinged = self._ponged = 0
        self._late = self._trifles = self._grants = 0

    # --- bytes ---------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream. After a failure it is dropped.

        Raises:
            LocalProtocolError: data after the end, or events were left untaken.
        """
        self._reader.receive_data(data)

    def receive_step(self, data: bytes | bytearray) -> MuxEvent | None:
        """Take what arrived, if it is one whole TOKENS frame and nothing waits, by a short way.
        None: it was not, and nothing was taken. Raises as :meth:`next_event`."""
        return None

    def next_event(self) -> MuxEvent | None:
        """The next event, or None when more data is needed.

        Raises:
            RemoteProtocolError: the peer broke a rule. Send what is there to send, and close.
        """
        for _ in range(_BREATH):
            if self._events:
                return self._events.popleft()
            try:
                frame = self._reader.next_event()
                if frame is None or isinstance(frame, Closed):
                    return frame
                event = self._handle(frame)
            except RemoteProtocolError as exc:
                self._fail(exc)
                raise
            if event is not None:
                return event
        return events.Breath()

    def data_to_send(self, limit: int = 256 * 1024) -> bytes:
        """Take the bytes of what waits, whole frames; ``b""`` if there is nothing.

        ``limit``: once it has so many bytes it takes no further frame; it may be above it by
        one frame, and by control frames and tokens, which are always all there. Keep it small
        while long messages wait: what comes later then leaves before their rest.
        """
        return self._out.take(limit)

    @property
    def ends(self) -> Sequence[int]:
        """Streams of which the last frame was in what ``data_to_send`` gave last."""
        return self._out.ends

    @property
    def wants_to_send(self) -> bool:
        """Might ``data_to_send`` give something?"""
        return not self._out.empty

    def takes(self, kind: type[Frame]) -> bool:
        """Is this a frame that the peer may send at all?"""
        return kind in self._handlers

    # --- what both ends say --------------------------------------------------------------

    def send_item(self, sid: int, payload: bytes) -> None:
        """Send one encoded item. Without credit it is held, in order with what follows it.

        Raises:
            LocalProtocolError: never opened, not accepted yet, a client's stream whose input is
                whole, or a payload above the peer's limit.
        """
        stream = self._ours(sid)
        if stream is None:
            return
        if stream.closing:
            raise LocalProtocolError(f"an item behind the end of stream {sid}")
        self._check_size(len(payload))
        stream.sends(self._side, FrameType.ITEM)
        if stream.credit <= 0:
            stream.held.append(payload)
        else:
            stream.credit -= cost(len(payload))
            self._out.item(stream, payload)

    def grant(self, sid: int, items: int) -> None:
        """So many items (tokens) were consumed; the peer may send as many again. It is told when
        half a window has come together, and then of what came together for other streams, too."""
        stream = self._ours(sid)
        if stream is not None and items > 0 and (told := stream.grant(items)):
            self._tell(stream, told)
            for other in self._streams.values():
                if 2 * other.untold >= other.step:  # less is not worth a grant, and may seem vain
                    self._tell(other, other.settle())

    def has_credit(self, sid: int) -> bool:
        """May another item go now, with nothing held before it? False once the stream has ended."""
        stream = self._streams.get(sid)
        return stream is not None and stream.has_credit

    def ping(self) -> int:
        """Send a PING; returns its number. PONGs to the peer's are queued by ``next_event``."""
        if self._may_speak():
            self._pinged = min(self._pinged + 1, MAX_NUMBER)
            self._out.control(encode(frames.Ping(self._pinged)))
        return self._pinged

    def go_away(self, code: str = GoAwayCode.CLOSING, text: str = "") -> None:
        """Say the last words. They leave behind everything that can leave; what is held for want
        of credit never does. Afterwards every other method does nothing; the owner closes when
        ``wants_to_send`` is False."""
        if self._may_speak():
            self._leaving = True
            self._out.farewell(_go_away(code, text))

    # --- how it stands -------------------------------------------------------------------

    @property
    def established(self) -> bool:
        """Has the peer's HELLO come? Before, nothing may be said but PING and GOAWAY."""
        return self._peer is not None

    @property
    def incompatible(self) -> bool:
        """Did it fail because no version is in common? That is nobody's mistake."""
        return self._incompatible

    @property
    def streams(self) -> int:
        """Streams in the table; at a worker also those that are cancelled but not ended."""
        return len(self._streams)

    def is_open(self, sid: int) -> bool:
        """Is this stream in the table, and not cancelled?"""
        return sid in self._streams

    @property
    def backlog(self) -> int:
        """About how many bytes wait to be sent, without what is held for want of credit."""
        return self._out.size

    @property
    def congested(self) -> bool:
        """Do so many answers to the peer's own frames wait that it should not be read?"""
        return self._out.control_size > self._limits.max_control

    @property
    def receiving(self) -> bool:
        """Has a frame or a message begun to arrive that is not whole?"""
        return bool(self._reader.buffered) or self._assembly is not None

    @property
    def arriving(self) -> int:
        """Bytes that are kept of a message that is not whole."""
        return 0 if self._assembly is None else len(self._assembly.data)

    def stop_receiving(self) -> None:
        """Nothing will be received any more: forget what has not become whole."""
        self._assembly = None

    @property
    def trifles(self) -> int:
        """How much came that leads to nothing: pings, notices, grants and wishes that change
        nothing, crumbs of messages, what is late, and what nobody knows. In frames, or their
        elements."""
        return self._trifles + self._late

    @property
    def grants(self) -> int:
        """How often a stream got credit again of which it had used some."""
        return self._grants

    @property
    def late_frames(self) -> int:
        """Frames (tokens: streams in a frame) that came for a stream that had ended here."""
        return self._late

    # --- what an end adds ----------------------------------------------------------------

    @abstractmethod
    def _own(self) -> Mapping[type[Frame], Handler]:
        """Handlers of the frames that only the other kind of end sends."""

    @abstractmethod
    def _forget(self, stream: Stream) -> None:
        """What we send on this stream has all left."""

    @abstractmethod
    def _agree(self, versions: Sequence[int]) -> int:
        """The version that the peer's HELLO leads to.

        Raises:
            RemoteProtocolError: none.
        """

    @property
    @abstractmethod
    def _highest(self) -> int:
        """The highest stream that was opened in the eyes of the peer."""

    # --- frames that both ends send ------------------------------------------------------

    def _common(self) -> Mapping[type[Frame], Handler]:
        return {
            frames.Hello: self._on_hello,
            frames.Part: self._on_part,
            frames.Drop: self._on_drop,
            frames.Item: self._on_item,
            frames.Credit: self._on_credit,
            frames.Ping: self._on_ping,
            frames.Pong: self._on_pong,
            frames.GoAway: self._on_go_away,
        }

    def _handle(self, frame: Frame | Ignored) -> MuxEvent | None:
        if self._left_alone:
            return None
        if isinstance(frame, Ignored):
            self._trifles += 1
            return None
        handler = self._handlers.get(type(frame))
        if handler is None:
            raise RemoteProtocolError(f"a {self._peer_side.value} sent {frame.type.name}")
        if self._peer is None and not isinstance(frame, (frames.Hello, frames.GoAway)):
            raise RemoteProtocolError(f"the peer sent {frame.type.name} before HELLO")
        return handler(frame)

    def _on_hello(self, frame: frames.Hello) -> MuxEvent:
        if self._peer is not None:
            raise RemoteProtocolError("the peer sent HELLO twice")
        version = self._agree(frame.versions)
        self._peer = events.Established(
            version,
            in_a_line(frame.software),
            frame.max_streams,
            frame.max_message,
            in_a_line(frame.process),
        )
        return self._peer

    def _on_part(self, frame: frames.Part) -> None:
        sid = frame.sid
        assembly = self._assembly
        if assembly is None:
            assembly = Assembly(sid, self._limits.max_message, opening=self._begins(sid))
            self._assembly = assembly
        elif assembly.sid != sid:
            raise RemoteProtocolError(
                f"PART for stream {sid} within the message of stream {assembly.sid}"
            )
        if len(frame.piece) < SMALL_PIECE:
            self._trifles += 1
        assembly.add(frame.piece, keep=assembly.opening or sid in self._streams)

    def _begins(self, sid: int) -> bool:
        """Does a PART for ``sid`` begin an OPEN (else an ITEM)?"""
        if sid > self._highest:
            raise self._never_opened(sid, FrameType.PART)
        return False

    def _on_drop(self, frame: frames.Drop) -> None:
        if self._assembly is None or self._assembly.sid != frame.sid:
            raise RemoteProtocolError(f"DROP for stream {frame.sid}, which has no PART")
        self._trifles += 1
        self._assembly = None

    def _on_item(self, frame: frames.Item) -> MuxEvent | None:
        payload = self._whole(frame.sid, frame.payload)
        stream = self._theirs(frame.sid, FrameType.ITEM)
        if stream is None:
            return None
        stream.receives(self._peer_side, FrameType.ITEM)
        self._tell(stream, stream.charge(len(payload)))
        return events.ItemReceived(frame.sid, payload)

    def _on_credit(self, frame: frames.Credit) -> MuxEvent | None:
        grants = frame.grants
        if len(grants) % 2:
            raise RemoteProtocolError("CREDIT with an odd count of numbers")
        able = []
        for sid, amount in zip(grants[::2], grants[1::2], strict=True):
            stream = self._theirs(sid, FrameType.CREDIT)
            if stream is None:
                continue
            stream.receives(self._peer_side, FrameType.CREDIT)
            before = stream.has_credit
            if stream.credited(amount):
                self._grants += 1
            else:
                self._trifles += 1
            self._out.release(stream)
            if stream.has_credit and not before:
                able.append(sid)
        return events.CreditReceived(able) if able else None

    def _on_ping(self, frame: frames.Ping) -> None:
        self._trifles += 1
        if not self._leaving:
            self._out.pong(frame.number)

    def _on_pong(self, frame: frames.Pong) -> MuxEvent:
        if not self._ponged < frame.number <= self._pinged:
            raise RemoteProtocolError(f"PONG {frame.number}, which answers no PING")
        self._ponged = frame.number
        return events.Ponged(frame.number)

    def _on_go_away(self, frame: frames.GoAway) -> MuxEvent:
        self._left_alone = True
        self._forget_all()
        return events.GoneAway(in_a_line(frame.code), in_a_line(frame.text))

    # --- judging -------------------------------------------------------------------------

    def _theirs(self, sid: int, kind: FrameType) -> Stream | None:
        """The stream that a frame of the peer means; None if it has ended here.

        Raises:
            RemoteProtocolError: it was never opened, or a message of it is not whole.
        """
        if self._assembly is not None and self._assembly.sid == sid:
            self._check_whole(sid, kind)
        stream = self._streams.get(sid)
        if stream is None:
            if not 0 < sid <= self._highest:
                raise self._never_opened(sid, kind)
            self._late += 1
        return stream

    def _check_whole(self, sid: int, kind: FrameType) -> None:
        if kind not in (FrameType.CREDIT, FrameType.STOP):  # which overtake
            raise RemoteProtocolError(f"{kind.name} within the message of stream {sid}")

    def _never_opened(self, sid: int, kind: FrameType) -> RemoteProtocolError:
        return RemoteProtocolError(f"{kind.name} for stream {sid}, which was never opened")

    def _whole(self, sid: int, last: bytes) -> bytes:
        """A message whose last piece this is."""
        assembly = self._assembly
        if assembly is None or assembly.sid != sid:
            return self._checked_size(last)
        self._assembly = None
        assembly.add(last, keep=True)
        return bytes(assembly.data)

    def _checked_size(self, payload: bytes) -> bytes:
        if len(payload) > self._limits.max_message:
            raise MessageTooLarge(size=len(payload), limit=self._limits.max_message)
        return payload

    def _ours(self, sid: int) -> Stream | None:
        """The stream that a call of the owner means; None if it has ended.

        Raises:
            LocalProtocolError: the connection failed, or it was never opened.
        """
        stream = self._streams.get(sid)
        if stream is None or self._leaving:
            self._refuse_if_failed()
            if not 0 < sid <= self._last_sid:
                raise LocalProtocolError(f"there never was a stream {sid}")
            return None
        return stream

    def _check_size(self, size: int) -> None:
        if self._peer is not None and size > self._peer.max_message:
            raise LocalProtocolError(
                f"an item of {size} bytes (the peer takes {self._peer.max_message} bytes)"
            )

    def _may_speak(self) -> bool:
        """False once one of the ends has said its last words.

        Raises:
            LocalProtocolError: the connection failed.
        """
        self._refuse_if_failed()
        return not (self._leaving or self._left_alone)

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise LocalProtocolError(f"the connection has failed: {self._failure}")

    # --- helpers -------------------------------------------------------------------------

    def _tell(self, stream: Stream, amount: int) -> None:
        # What is granted before the OPEN has left, or the OPENED, is told in it.
        if amount and stream.may(self._side, FrameType.CREDIT):
            self._out.credit(stream.sid, amount)

    def _say_hello(self, versions: Sequence[int] = VERSIONS) -> None:
        limits = self._limits
        hello = frames.Hello(
            list(versions), limits.max_streams, limits.max_message, self._software, self._process
        )
        self._out.control(encode(hello))

    def _forget_all(self) -> None:
        self._streams.clear()
        self._assembly = None
        self._out.clear()

    def _fail(self, failure: RemoteProtocolError, code: str = GoAwayCode.PROTOCOL) -> None:
        """The peer is not listened to any more, and is told why if it speaks this protocol."""
        if self._failure is not None:
            return
        self._failure = self._reader.give_up(failure)
        self._incompatible = code == GoAwayCode.VERSION
        self._forget_all()
        self._events.clear()
        if self._reader.greeted and not self._leaving:
            self._out.farewell(_go_away(code, str(failure)))
        self._leaving = True


def _go_away(code: str, text: str) -> bytes:
    said = text[:MAX_TEXT].encode("utf-8", "replace").decode()
    return encode(frames.GoAway(code, said))
