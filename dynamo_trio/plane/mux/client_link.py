"""A client's connection to one worker: requests out, answers in.

Theory of operation
-------------------
What arrives is handed on by stream. Tokens are gathered over all frames that one read gave, so
a stream is told once, however many steps of the engine lie in it; anything else of the wire is
handed on behind the tokens that came before it.

A worker that says nothing although it was asked is *silent* (:mod:`.heartbeat`): what has not
begun to be answered there ends at once, and may go elsewhere; what has begun waits until the
connection is given up, for the worker may only have been held up.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final

import attrs
import trio

from dynamo_trio.errors import CannotConnect, Disconnected, Draining, NotConnected
from dynamo_trio.plane.abc import INITIAL_CREDIT
from dynamo_trio.plane.mux.heartbeat import Heartbeat
from dynamo_trio.plane.mux.link import Link, logger
from dynamo_trio.plane.mux.stream import MuxStream, deliver
from dynamo_trio.plane.mux.unread import Share
from dynamo_trio.wire.mux.client_connection import ClientConnection
from dynamo_trio.wire.mux.events import (
    CreditReceived,
    Established,
    ItemReceived,
    PathsDraining,
    PathsServing,
    StreamAccepted,
    StreamFinished,
    TokensReceived,
)
from dynamo_trio.wire.mux.limits import MuxLimits
from dynamo_trio.wire.trace import into_metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.plane.abc import ItemSink, RequestHead
    from dynamo_trio.wire.mux.events import MuxEvent

#: Paths of one worker that are draining. It has one for each endpoint of each of its instances.
MAX_DRAINING: Final = 4096


@attrs.define(eq=False)
class ClientLink(Link):
    """``on_established`` is told when requests may be sent."""

    _dials: ClassVar[bool] = True
    _on_established: Callable[[ClientLink], object] = attrs.field(kw_only=True)
    #: What tells this process from others.
    _own_process: str = attrs.field(kw_only=True)
    _wire: ClientConnection = attrs.field(init=False)
    #: Invariant: a stream is in here exactly until it has ended or its client has left.
    _streams: dict[int, MuxStream] = attrs.field(factory=dict)
    #: Paths of the worker to which nothing new may go.
    draining: set[str] = attrs.field(factory=set)
    #: Tokens that one read gave, and that are not handed on yet.
    _tokens: dict[int, list[int]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        limits = MuxLimits(max_message=self.settings.max_message)
        self._wire = ClientConnection(limits, process=self._own_process)
        super().__attrs_post_init__()

    @property
    def wire(self) -> ClientConnection:
        return self._wire

    @property
    def _hello_time(self) -> float:
        return self.settings.connect_time

    def _make_pulse(self) -> Heartbeat:
        settings = self.settings
        return Heartbeat(settings.heartbeat, settings.patience, trio.current_time())

    # --- requests -----------------------------------------------------------------------------

    def open(self, path: str, head: RequestHead, payload: bytes, sink: ItemSink) -> MuxStream:
        """Send a request.

        Raises:
            NotConnected: the connection has just ended.
            CannotConnect: the worker is silent.
            Draining: it gets nothing new on this path.
            Overloaded: it takes no more streams.
            PayloadTooLarge, InvalidArgument: the request is too large for it.
        """
        if self.over or self._leaving:
            raise NotConnected("the worker is not connected")
        if self.pulse.silent:
            raise CannotConnect("the worker does not answer")
        if path in self.draining:
            raise Draining("the worker is closed to new requests")
        sid = self._wire.open(
            path,
            head.request_id,
            payload,
            codec=head.codec,
            credit=INITIAL_CREDIT,
            streams_in=head.streams_in,
            sent_at_ns=time.time_ns(),
            metadata=into_metadata(head.headers, head.metadata),
        )
        stream = self._streams[sid] = MuxStream(
            sid, path, self, sink, Share(self.unread), head.streams_in
        )
        self.look()
        return stream

    def drop(self, stream: MuxStream) -> None:
        """Its client has left."""
        if self._streams.pop(stream.sid, None) is None or self.over:
            return
        self._wire.cancel(stream.sid)
        self.look()

    def give_up(self, stream: MuxStream) -> None:
        """What this connection's answers were given, and nobody reads, is too much."""
        size = self.settings.max_unread // 2**20
        text = f"the answers of the worker that nobody has read are above {size} MiB"
        self._complaints.given_up(self.peer, text)
        self.drop(stream)
        stream.finish(Disconnected(text))

    # --- what the worker says -----------------------------------------------------------------

    def _take(self, event: MuxEvent) -> None:
        if type(event) is TokensReceived:
            self._gather(event)
            return
        if self._tokens:
            self._taken()
        match event:
            case ItemReceived():
                if (stream := self._streams.get(event.sid)) is not None:
                    stream.feed(event.payload)
            case StreamAccepted():
                if (stream := self._streams.get(event.sid)) is not None:
                    stream.accept()
            case StreamFinished():
                if (stream := self._streams.pop(event.sid, None)) is not None:
                    stream.finish(event.error)
            case CreditReceived():
                for sid in event.sids:
                    if (stream := self._streams.get(sid)) is not None:
                        stream.wake()
            case PathsDraining():
                self.draining.update(event.paths)
                self._wire.acknowledge(event.notice)
                if len(self.draining) > MAX_DRAINING:
                    self.cut("it withdraws more paths than a worker has")
            case PathsServing():
                self.draining.difference_update(event.paths)
            case Established():
                logger.debug(
                    "connected to %s, a %s (process %s)",
                    *(self.peer, event.software, event.process or "unknown"),
                )
                self._on_established(self)

    def _gather(self, event: TokensReceived) -> None:
        if not self._tokens and not event.finished:
            self._tokens = dict(event.tokens)
            return
        gathered = self._tokens
        for sid, token_ids in event.tokens.items():
            if (before := gathered.get(sid)) is None:
                gathered[sid] = token_ids
            else:
                before += token_ids
        if event.finished:
            self._taken()
            for sid in event.finished:
                if (stream := self._streams.pop(sid, None)) is not None:
                    stream.finish(None)

    def _taken(self) -> None:
        gathered, self._tokens = self._tokens, {}
        deliver(self._streams, gathered)

    # --- its end, and the worker's silence ----------------------------------------------------

    def _close_streams(self) -> None:
        self._taken()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.finish(self._loss(stream))

    def _loss(self, stream: MuxStream) -> CannotConnect | Disconnected:
        if stream.accepted:
            return Disconnected("the connection to the worker was lost")
        if not self._wire.has_left(stream.sid):
            return NotConnected("the connection to the worker was lost")
        return CannotConnect("the connection to the worker was lost")

    def _credit_returns(self) -> None:
        for stream in list(self._streams.values()):
            stream.wake()

    def _peer_is_silent(self) -> None:
        self._complaints.silent(self.peer)
        for stream in [s for s in self._streams.values() if not s.touched]:
            del self._streams[stream.sid]
            self._wire.cancel(stream.sid)
            if stream.accepted:
                stream.finish(Disconnected("the worker does not answer"))
            else:
                stream.finish(CannotConnect("the worker does not answer"))
