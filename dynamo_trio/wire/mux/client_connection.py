"""The client's end of a mux connection: it opens streams and takes their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dynamo_trio.errors import (
    InvalidArgument,
    LocalProtocolError,
    Overloaded,
    PayloadTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.connection import MuxConnection
from dynamo_trio.wire.mux.frames import HEAD, FrameType, encode
from dynamo_trio.wire.mux.limits import (
    MAX_CREDIT,
    MAX_FRAME,
    MAX_METADATA,
    MAX_METADATA_ITEMS,
    MAX_PATH,
    MAX_REQUEST_ID,
    MAX_SID,
    VERSIONS,
    MuxLimits,
)
from dynamo_trio.wire.mux.outgoing import Opening
from dynamo_trio.wire.mux.reading import LENGTH
from dynamo_trio.wire.mux.stream_states import Side, StreamState
from dynamo_trio.wire.mux.streams import End, Stream
from dynamo_trio.wire.mux.told_errors import told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.mux.connection import Handler
    from dynamo_trio.wire.mux.events import MuxEvent
    from dynamo_trio.wire.mux.frames import Frame


class ClientConnection(MuxConnection):
    """See :class:`MuxConnection`. The HELLO waits to be sent from the beginning."""

    _side: ClassVar[Side] = Side.CLIENT
    _peer_side: ClassVar[Side] = Side.WORKER

    def __init__(
        self,
        limits: MuxLimits | None = None,
        *,
        software: str = "dynamo_trio",
        process: str = "",
    ) -> None:
        super().__init__(limits, software=software, process=process)
        self._noticed = self._acknowledged = -1
        self._say_hello()

    def open(
        self,
        path: str,
        request_id: str,
        payload: bytes,
        *,
        codec: Codec,
        credit: int,
        streams_in: bool = False,
        sent_at_ns: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Queue a request; returns the number of its stream.

        ``credit``: items that the worker may send at first; half of it is the step in which
        :meth:`grant` tells the worker of more.

        Raises:
            Overloaded: the worker takes no more streams over this connection.
            PayloadTooLarge: the payload is above the worker's limit.
            InvalidArgument: path, request id or metadata are too long.
            LocalProtocolError: the connection is not established, or is over.
        """
        self._check_room(len(payload))
        _check_head(path, request_id, metadata or {})
        self._last_sid += 1
        sid = self._last_sid
        credit = min(max(credit, 0), MAX_CREDIT)
        stream = Stream(
            sid, StreamState.IDLE, 0, credit, left=False, closing=not streams_in
        )  # fmt: skip
        form = frames.Open(
            sid, path, request_id, codec.name, streams_in, credit, sent_at_ns,
            dict(metadata or {}), b"",
        )  # fmt: skip
        self._streams[sid] = stream
        self._out.opening(Opening(stream, form, payload))
        return sid

    def has_left(self, sid: int) -> bool:
        """Has any byte of the OPEN been taken by ``data_to_send``? Asked of an open stream."""
        return sid <= self._out.highest

    def finish_input(self, sid: int) -> None:
        """There are no more items; the answer goes on. Does nothing if the input is whole."""
        stream = self._ours(sid)
        if stream is None or stream.closing:
            return
        stream.closing = True
        if stream.held:
            stream.held.append(End())
        else:
            self._out.end(stream, End())

    def stop(self, sid: int) -> None:
        """Ask the worker to come to an end; what it still sends is taken."""
        stream = self._ours(sid)
        if stream is None or stream.stop:
            return
        stream.stop = True
        if stream.left:
            self._out.control(encode(frames.Stop(sid)))

    def cancel(self, sid: int) -> None:
        """Leave the stream: no event of it comes any more. An OPEN that has not left never does."""
        stream = self._ours(sid)
        if stream is None:
            return
        self._over(stream)
        if stream.left:
            self._out.control(encode(frames.Cancel(sid)))

    def acknowledge(self, notice: int, places: int = 0) -> None:
        """Say that no further OPEN goes to what was named up to this notice. It leaves behind
        every OPEN that waits now; the owner opens no more there.

        Raises:
            LocalProtocolError: there was no such notice.
        """
        if not self._may_speak():
            return
        if not max(self._acknowledged, 0) <= notice <= self._noticed:
            raise LocalProtocolError(f"there is no notice {notice} to acknowledge")
        self._acknowledged = notice
        self._out.behind_openings(encode(frames.Ack(notice, places)))

    # --- frames of a worker --------------------------------------------------------------

    def receive_step(self, data: bytes | bytearray) -> MuxEvent | None:
        """See :meth:`MuxConnection.receive_step`."""
        if len(data) < HEAD.size or not self._reader.is_empty:
            return None
        size, kind = HEAD.unpack_from(data)
        whole = kind == FrameType.TOKENS and size == len(data) - LENGTH and size <= MAX_FRAME
        if not whole or self._assembly is not None or self._peer is None or self._left_alone:
            return None
        try:
            frame: Any = frames.decode(kind, bytes(data[HEAD.size :]))
            return self._on_tokens(frame) or events.TokensReceived({}, [])
        except RemoteProtocolError as exc:
            self._fail(exc)
            raise

    def _own(self) -> Mapping[type[Frame], Handler]:
        return {
            frames.Opened: self._on_opened,
            frames.Tokens: self._on_tokens,
            frames.Done: self._on_done,
            frames.Error: self._on_error,
            frames.Draining: self._on_draining,
            frames.Serving: self._on_serving,
        }

    def _agree(self, versions: Sequence[int]) -> int:
        if len(versions) != 1 or versions[0] not in VERSIONS:
            raise RemoteProtocolError(
                f"the worker chose the versions {list(versions)} out of {list(VERSIONS)}"
            )
        return versions[0]

    def _on_opened(self, frame: frames.Opened) -> MuxEvent | None:
        stream = self._theirs(frame.sid, FrameType.OPENED)
        if stream is None:
            return None
        stream.receives(Side.WORKER, FrameType.OPENED)
        stream.provide(frame.credit)
        return events.StreamAccepted(frame.sid)

    def _on_tokens(self, frame: frames.Tokens) -> MuxEvent | None:
        flat = frame.tokens
        if len(flat) % 2:
            raise RemoteProtocolError("TOKENS with an odd count of numbers")
        groups = _by_stream(flat)
        find = self._streams.get
        suspect = self._assembly is not None
        for sid, token_ids in groups.items():  # the hot path: no calls, but for this one
            stream = find(sid)
            if stream is None:
                suspect = True
                continue
            stream.allowed -= len(token_ids)
            if stream.allowed < 0 or not stream.answering:
                raise _misplaced(stream)
        if suspect:
            groups = self._without_late(groups)
        return self._tokens_event(groups, frame.finished)

    def _without_late(self, groups: dict[int, list[int]]) -> dict[int, list[int]]:
        return {
            sid: token_ids
            for sid, token_ids in groups.items()
            if self._theirs(sid, FrameType.TOKENS) is not None
        }

    def _tokens_event(
        self, groups: dict[int, list[int]], finished: Sequence[int]
    ) -> MuxEvent | None:
        ended = [sid for sid in finished if self._ended(sid, FrameType.DONE)] if finished else []
        if groups or ended:
            return events.TokensReceived(groups, ended)
        self._trifles += 1
        return None

    def _on_done(self, frame: frames.Done) -> MuxEvent | None:
        return self._tokens_event({}, frame.sids)

    def _on_error(self, frame: frames.Error) -> MuxEvent | None:
        if not self._ended(frame.sid, FrameType.ERROR):
            return None
        return events.StreamFinished(frame.sid, told(frame), frame.begun)

    def _on_draining(self, frame: frames.Draining) -> MuxEvent:
        if frame.notice <= self._noticed:
            raise RemoteProtocolError(f"DRAINING {frame.notice} after {self._noticed}")
        self._noticed = frame.notice
        self._trifles += 1
        return events.PathsDraining(frame.notice, tuple(frame.paths))

    def _on_serving(self, frame: frames.Serving) -> MuxEvent:
        self._trifles += 1
        return events.PathsServing(tuple(frame.paths))

    # --- helpers -------------------------------------------------------------------------

    @property
    def _highest(self) -> int:
        return self._out.highest

    def _forget(self, stream: Stream) -> None:
        """The input of a stream has all left; its answer is still to come."""

    def _ended(self, sid: int, kind: FrameType) -> bool:
        stream = self._theirs(sid, kind)
        if stream is None:
            return False
        stream.receives(Side.WORKER, kind)
        self._over(stream)
        return True

    def _over(self, stream: Stream) -> None:
        del self._streams[stream.sid]
        self._out.drop(stream)

    def _check_room(self, size: int) -> None:
        if not self._may_speak() or self._peer is None:
            raise LocalProtocolError("a connection that is not established, or over, opens nothing")
        if len(self._streams) >= self._peer.max_streams or self._last_sid >= MAX_SID:
            raise Overloaded(f"The worker takes {self._peer.max_streams} streams at once.")
        if size > self._peer.max_message:
            raise PayloadTooLarge(
                f"The request takes {size} bytes, above the limit of {self._peer.max_message}."
            )


def _misplaced(stream: Stream) -> RemoteProtocolError:
    if stream.answering:
        return RemoteProtocolError(f"tokens without credit on stream {stream.sid}")
    return stream.wrong(Side.WORKER, FrameType.TOKENS)


def _by_stream(flat: list[int]) -> dict[int, list[int]]:
    """Tokens by stream, in order. Nearly always each stream has one."""
    sids, tokens = flat[::2], flat[1::2]
    groups = {sid: [token] for sid, token in zip(sids, tokens, strict=True)}
    if len(groups) == len(sids):
        return groups
    groups = {sid: [] for sid in groups}
    for sid, token in zip(sids, tokens, strict=True):
        groups[sid].append(token)
    return groups


def _check_head(path: str, request_id: str, metadata: Mapping[str, str]) -> None:
    if len(path) > MAX_PATH or len(request_id) > MAX_REQUEST_ID:
        raise InvalidArgument(
            f"a path of {len(path)} characters (max: {MAX_PATH}), a request id of"
            f" {len(request_id)} characters (max: {MAX_REQUEST_ID})"
        )
    try:
        size = len("".join([*metadata, *metadata.values()]).encode())
        (path + request_id).encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"the head of a request cannot be spelled: {exc}") from exc
    if size > MAX_METADATA or len(metadata) > MAX_METADATA_ITEMS:
        raise InvalidArgument(
            f"metadata of {size} bytes (max: {MAX_METADATA})"
            f" in {len(metadata)} entries (max: {MAX_METADATA_ITEMS})"
        )
