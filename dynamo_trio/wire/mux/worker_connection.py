"""The worker's end of a mux connection: it takes requests and sends their answers."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ClassVar

from dynamo_trio.errors import (
    InvalidArgument,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.codec import Codec, codec_named
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.connection import MuxConnection
from dynamo_trio.wire.mux.frames import FrameType, GoAwayCode, encode
from dynamo_trio.wire.mux.limits import (
    MAX_CREDIT,
    MAX_METADATA,
    MAX_NUMBER,
    MAX_TOKEN,
    VERSIONS,
    MuxLimits,
)
from dynamo_trio.wire.mux.stream_states import Side, opened
from dynamo_trio.wire.mux.streams import HELD_TOKENS, End, Stream
from dynamo_trio.wire.mux.told_errors import tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_trio.wire.mux.connection import Handler
    from dynamo_trio.wire.mux.events import MuxEvent
    from dynamo_trio.wire.mux.frames import Frame


class WorkerConnection(MuxConnection):
    """See :class:`MuxConnection`.

    A request above ``max_streams``, or in a codec that is not known, is refused without an event.
    """

    _side: ClassVar[Side] = Side.WORKER
    _peer_side: ClassVar[Side] = Side.CLIENT

    def __init__(
        self,
        limits: MuxLimits | None = None,
        *,
        software: str = "dynamo_trio",
        process: str = "",
    ) -> None:
        super().__init__(limits, software=software, process=process)
        # Streams that the client has cancelled and whose calls have not ended.
        self._lingering: set[int] = set()
        self._noticed = self._acknowledged = -1
        self._fruitless = 0

    @property
    def fruitless(self) -> int:
        """How many requests were refused, failed or were cancelled with nothing answered."""
        return self._fruitless

    def accept(self, sid: int, credit: int = 0) -> None:
        """The request is taken on. ``credit``: items that may stream in at first, beside what
        :meth:`grant` gave already.

        Raises:
            LocalProtocolError: it was accepted or refused already, or never opened.
        """
        stream = self._ours(sid)
        if stream is None:
            return
        stream.sends(Side.WORKER, FrameType.OPENED)
        stream.let_in(min(max(credit, 0), MAX_CREDIT - stream.allowed))
        self._out.control(encode(frames.Opened(sid, stream.allowed)))

    def send_tokens(self, sid: int, token_ids: Sequence[int]) -> None:
        """Send tokens; those without credit are held. All of a step leave in one frame.

        Raises:
            LocalProtocolError: never opened, not accepted yet, behind the end, or no tokens.
        """
        stream = self._streams.get(sid)
        if stream is None or self._leaving:
            stream = self._ours(sid)
            if stream is None:
                return
        if not stream.answering or stream.closing:
            raise LocalProtocolError(f"tokens for stream {sid} before its begin or behind its end")
        for token in token_ids:
            if not 0 <= token <= MAX_TOKEN:
                raise LocalProtocolError(f"{token} is no token of a model (stream {sid})")
        left = stream.credit - len(token_ids)
        if left < 0:
            self._hold(stream, token_ids)
        elif stream.queue:
            stream.credit = left
            self._out.tokens(stream, token_ids)
        else:  # the hot path: as ``Outgoing.tokens``, without the call
            stream.credit = left
            batch = self._out.batch
            for token in token_ids:
                batch += (sid, token)

    def finish(self, sid: int) -> None:
        """End the stream well, behind what it holds. The call is over. A second time: nothing.

        Raises:
            LocalProtocolError: never opened, or not accepted yet.
        """
        stream = self._ending(sid)
        if stream is None:
            return
        if not stream.answering:
            raise LocalProtocolError(f"stream {sid} ends well but was not accepted")
        self._end(stream, End())

    def fail(self, sid: int, error: BaseException, *, begun: bool = True) -> None:
        """End the stream by an error; before ``accept``, refuse it. The call is over.

        Whoever breaks off says so at once: the error leaves behind what has credit, and what is
        held for want of it never does. ``begun``: had the handler begun?

        Raises:
            LocalProtocolError: never opened.
        """
        stream = self._ending(sid)
        if stream is None:
            return
        if stream.answering:
            if not stream.has_sent:
                self._fruitless += 1
            stream.held.clear()
            self._end(stream, End(encode(tell(sid, error, begun=begun))))
        else:
            del self._streams[sid]
            self._refuse(sid, error)

    def recall(self, sid: int, error: BaseException) -> bool:
        """End a stream by an error which :meth:`finish` has ended, but in vain so far: what it
        holds for want of credit, its end too, never leaves. False: there is no such thing."""
        stream = self._ours(sid)
        if stream is None or not (stream.closing and stream.held):
            return False
        stream.held.clear()
        self._end(stream, End(encode(tell(sid, error, begun=True))))
        return True

    def give_up(self, sid: int, error: BaseException) -> None:
        """End the stream by an error now, though its call may go on: it counts until ``finish``
        or ``fail`` ends that. What is held for want of credit never leaves."""
        stream = self._ours(sid)
        if stream is None or not stream.answering:
            return
        stream.held.clear()
        if not stream.closing:  # its call runs
            self._lingering.add(sid)
        self._end(stream, End(encode(tell(sid, error, begun=True))))

    def lacking_credit(self) -> Mapping[int, int]:
        """Streams with something to send that have no credit for it, and what each was given."""
        return {s.sid: s.given for s in self._streams.values() if s.held and s.lacks_credit}

    def credit_given(self, sid: int) -> int | None:
        """All the credit that a stream was given, if it has none left, and nothing of it waits
        for anything else."""
        stream = self._streams.get(sid)
        return None if stream is None or not stream.lacks_credit else stream.given

    def drain(self, notice: int, paths: Sequence[str]) -> None:
        """Ask for no new requests to these paths. ``notice`` is above every earlier one.

        Raises:
            LocalProtocolError: the number does not rise, or the paths do not fit a frame.
        """
        if not self._may_speak():
            return
        if not self._noticed < notice <= MAX_NUMBER:
            raise LocalProtocolError(f"notice {notice} after {self._noticed}")
        self._out.control(encode(frames.Draining(notice, list(paths))))
        self._noticed = notice

    def serve_again(self, paths: Sequence[str]) -> None:
        """These paths take requests again.

        Raises:
            LocalProtocolError: the paths do not fit a frame.
        """
        if self._may_speak():
            self._out.control(encode(frames.Serving(list(paths))))

    @property
    def streams(self) -> int:
        """Streams in the table, and those that are cancelled but whose calls have not ended."""
        return len(self._streams) + len(self._lingering)

    # --- frames of a client --------------------------------------------------------------

    def _own(self) -> Mapping[type[Frame], Handler]:
        return {
            frames.Open: self._on_open,
            frames.Done: self._on_done,
            frames.Cancel: self._on_cancel,
            frames.Stop: self._on_stop,
            frames.Ack: self._on_ack,
        }

    def _agree(self, versions: Sequence[int]) -> int:
        common = set(versions) & set(VERSIONS)
        if not common:
            error = RemoteProtocolError(
                f"no version in common: the client speaks {list(versions)},"
                f" the worker {list(VERSIONS)}"
            )
            self._fail(error, GoAwayCode.VERSION)
            raise error
        self._say_hello([max(common)])
        return max(common)

    def _begins(self, sid: int) -> bool:
        if sid <= self._last_sid:
            return False
        self._last_sid = sid
        return True

    def _on_open(self, frame: frames.Open) -> MuxEvent | None:
        sid = frame.sid
        if not (
            self._assembly is not None and self._assembly.sid == sid and self._assembly.opening
        ):
            if sid <= self._last_sid:
                raise RemoteProtocolError(f"OPEN {sid} after {self._last_sid}: numbers must rise")
            self._last_sid = sid
        payload = self._whole(sid, frame.payload)
        _check_metadata(frame.metadata)
        codec = self._codec(frame)
        if codec is None or self._leaving:
            return None
        state = opened(streams_in=frame.streams_in)
        self._streams[sid] = Stream(sid, state, frame.credit, 0)
        return events.StreamOpened(
            sid, frame.path, frame.request_id, codec, frame.streams_in, frame.sent_at_ns,
            frame.metadata, payload,
        )  # fmt: skip

    def _codec(self, frame: frames.Open) -> Codec | None:
        """The codec of a request that may be taken on; None if it was refused here."""
        if self.streams >= self._limits.max_streams:
            most = f"{self._limits.max_streams} requests over one connection"
            self._refuse(frame.sid, Overloaded(f"The worker takes {most}."))
            return None
        try:
            return codec_named(frame.codec)
        except RemoteProtocolError as exc:
            self._refuse(frame.sid, InvalidArgument(exc.message))
            return None

    def _on_done(self, frame: frames.Done) -> None:
        for sid in frame.sids:
            stream = self._theirs(sid, FrameType.DONE)
            if stream is not None:
                stream.receives(Side.CLIENT, FrameType.DONE)
                self._events.append(events.InputFinished(sid))

    def _on_cancel(self, frame: frames.Cancel) -> MuxEvent | None:
        stream = self._theirs(frame.sid, FrameType.CANCEL)
        if stream is None:
            return None
        stream.receives(Side.CLIENT, FrameType.CANCEL)
        del self._streams[frame.sid]
        if not stream.has_sent:
            self._fruitless += 1
        self._out.drop(stream)
        if not stream.closing:  # its call runs
            self._lingering.add(frame.sid)
        return events.StreamCancelled(frame.sid)

    def _on_stop(self, frame: frames.Stop) -> MuxEvent | None:
        stream = self._theirs(frame.sid, FrameType.STOP)
        if stream is None:
            return None
        stream.receives(Side.CLIENT, FrameType.STOP)
        self._trifles += stream.stop
        stream.stop = True
        return events.StreamStopped(frame.sid)

    def _on_ack(self, frame: frames.Ack) -> MuxEvent:
        if not max(self._acknowledged, 0) <= frame.notice <= self._noticed:
            raise RemoteProtocolError(f"ACK of notice {frame.notice}, which was not sent")
        self._trifles += 1
        self._acknowledged = frame.notice
        return events.DrainAcknowledged(frame.notice, frame.places)

    # --- helpers -------------------------------------------------------------------------

    @property
    def _highest(self) -> int:
        return self._last_sid

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.sid, None)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._lingering.clear()

    def _refuse(self, sid: int, error: BaseException) -> None:
        self._fruitless += 1
        self._out.control(encode(tell(sid, error, begun=False)))

    def _hold(self, stream: Stream, token_ids: Sequence[int]) -> None:
        held = stream.held
        if held and isinstance(held[-1], array):
            held[-1].extend(token_ids)
        else:
            held.append(array(HELD_TOKENS, token_ids))
        self._out.release(stream)

    def _ending(self, sid: int) -> Stream | None:
        """The stream, unless it has ended, or its end is queued already."""
        if sid in self._lingering:
            self._lingering.discard(sid)
            return None
        stream = self._ours(sid)
        return None if stream is None or stream.closing else stream

    def _end(self, stream: Stream, end: End) -> None:
        stream.closing = True
        if stream.held:
            stream.held.append(end)
        else:
            self._out.end(stream, end)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    size = sum(len(text.encode()) for pair in metadata.items() for text in pair)
    if size > MAX_METADATA:
        raise RemoteProtocolError(f"metadata of {size} bytes (max: {MAX_METADATA} bytes)")
