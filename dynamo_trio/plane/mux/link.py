"""One mux connection: its reader, and its end.

Theory of operation
-------------------
Three tasks share a connection. The **reader** takes all that has arrived, and hands on event by
event with plain calls; it awaits nothing but data, and now and then lets others run. The
writer (:mod:`~dynamo_trio.plane.mux.writer`) sends what was said to the wire, and the watch
(:mod:`~dynamo_trio.plane.mux.watch`) sees whether the peer lives, and takes anything.

A peer whose own frames cause more answers than it takes is not read until it takes them, and is
cut when it does not. So is one that says too much that leads to nothing
(:mod:`~dynamo_trio.plane.mux.allowance`).

A link ends once, in :meth:`Link._end`, with a reason for the log; from then on it is ``over``, and
nobody calls the wire any more but the writer, for the last words.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import attrs
import trio

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.plane.mux.allowance import Allowance
from dynamo_trio.plane.mux.complaints import Complaints
from dynamo_trio.plane.mux.heartbeat import Heartbeat, Verdict
from dynamo_trio.plane.mux.kernel import bound_buffer, read_now, socket_below
from dynamo_trio.plane.mux.starving import LOOKS
from dynamo_trio.plane.mux.unread import Unread
from dynamo_trio.plane.mux.watch import Watch
from dynamo_trio.plane.mux.writer import GONE, Writer
from dynamo_trio.plane.net.tls import explain
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.mux.events import Breath, Established, GoneAway, StreamOpened
from dynamo_trio.wire.mux.frames import GoAwayCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.plane.mux.settings import MuxSettings
    from dynamo_trio.wire.mux.connection import MuxConnection
    from dynamo_trio.wire.mux.events import MuxEvent

logger = logging.getLogger("dynamo_trio.plane.mux")

#: Bytes that are read at once, and as long as that is all that has come: room for much costs
#: more than a step of the engine.
READ_PIECE: Final = 256 * 1024
SMALL_PIECE: Final = 16 * 1024
#: Events that are handed on before other tasks get their turn. A request counts for many: it
#: makes work for others.
BATCH: Final = 256
REQUEST_WEIGHT: Final = 16
#: Seconds for the last words of a connection to leave, and for the peer to have read them.
LAST_WORDS_TIME: Final = 1.0
#: Why it most often has gone who was connected and said no hello.
NO_HELLO: Final = (
    "it closed the connection before it said hello;"
    " does it speak mux there, and is TLS set alike on both sides (DYN_TCP_TLS_...)?"
)


@attrs.define(eq=False)
class Link(ABC):
    """One connection to a peer; :meth:`run` is its task, and closes it."""

    #: This side has made the connection.
    _dials: ClassVar[bool] = False
    _stream: trio.abc.Stream
    settings: MuxSettings
    #: Who is at the other end, for the log.
    peer: str
    #: Invariant: once set, nobody but the writer calls the wire, and no stream is left.
    over: bool = False
    #: The peer's HELLO has come, and it may be told things.
    established: bool = False
    #: Why it ended, for the log; empty if it ended in good order.
    reason: str = ""
    #: The log has been told so, as a warning.
    told: bool = False
    #: The peer's last words, if it said some.
    gone_away: GoneAway | None = None
    #: It was given up because it was silent.
    given_up: bool = False
    #: It never said hello, though it was connected.
    unanswered: bool = False
    #: Which process is at the other end, if it says so.
    process: str = ""
    #: Bytes that it keeps of a message that is just arriving.
    arriving: int = 0
    #: What its streams were given and have not consumed.
    unread: Unread = attrs.field(init=False)
    _complaints: Complaints = attrs.field(factory=Complaints, kw_only=True)
    _writer: Writer = attrs.field(init=False)
    _watch: Watch = attrs.field(init=False)
    #: A plain socket, to be read past its stream.
    _socket: trio.socket.SocketType | None = attrs.field(init=False, default=None)
    _piece: int = SMALL_PIECE
    _allowance: Allowance = attrs.field(init=False)
    #: It is closed from this end, behind what waits.
    _leaving: bool = False
    #: The peer is to read why it is closed.
    _has_last_words: bool = False
    #: Around the reader.
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: When the frame must be whole that is just arriving.
    _frame_due: float = math.inf
    #: The reader is handing on what has arrived, and looks at what that led to in the end.
    _hands_on: bool = False

    def __attrs_post_init__(self) -> None:
        kernel = socket_below(self._stream)
        if isinstance(self._stream, trio.SocketStream):
            self._socket = self._stream.socket
        if kernel is not None:
            bound_buffer(kernel)
        self._watch = Watch(self._make_pulse(), kernel, self.settings.stall_time / LOOKS)
        self._writer = Writer(
            *(self._stream, self.wire, self.settings),
            on_ends=self._ends_sent,
            on_sent=self._all_sent,
            on_flow=self._credit_returns,
            on_gone=self._cannot_send,
            on_stalled=self._is_stalled,
        )
        self._allowance = Allowance(trio.current_time())
        self.unread = Unread(self.settings.max_unread)

    @property
    def pulse(self) -> Heartbeat:
        """That of the peer."""
        return self._watch.pulse

    @property
    def congested(self) -> bool:
        """Does so much wait to be sent that nothing more should be produced?"""
        return self._writer.congested

    # --- what the two roles differ in ---------------------------------------------------------

    @property
    @abstractmethod
    def wire(self) -> MuxConnection:
        """The protocol."""

    @property
    @abstractmethod
    def _hello_time(self) -> float:
        """Seconds until the peer must have said hello."""

    @abstractmethod
    def _make_pulse(self) -> Heartbeat:
        """How the peer is watched."""

    @abstractmethod
    def _take(self, event: MuxEvent) -> None:
        """One event of the wire. Must not raise for one stream's sake."""

    def _taken(self) -> None:  # noqa: B027 - not all roles gather
        """All that had arrived has been handed on."""

    def _look_arriving(self) -> None:  # noqa: B027 - a client knows whom it asked
        """``arriving`` has changed."""

    @abstractmethod
    def _close_streams(self) -> None:
        """The link is over: end everything that runs on it. Must not raise."""

    def _ends_sent(self, sids: Sequence[int]) -> None:  # noqa: B027 - a client waits for answers
        """The last of what we send on these streams has left this process."""

    @abstractmethod
    def _credit_returns(self) -> None:
        """The link is congested no more."""

    @abstractmethod
    def _peer_is_silent(self) -> None:
        """It was asked whether it is there, and does not answer."""

    def _end_starving(self) -> None:  # noqa: B027 - a client waits as long as it likes
        """Looked in once in a while: end streams that the peer does not let go on."""

    # --- what others may do -------------------------------------------------------------------

    def wake(self) -> None:
        """Something was said to the wire. Costs next to nothing if it is known already."""
        self._writer.wake()

    def look(self) -> None:
        """As :meth:`wake`, if there is something to send, and see whether that is too much."""
        if not self._hands_on:
            self._writer.look()

    def leave(self, text: str) -> None:
        """Say the last words, and close when they are sent."""
        if self.over or self._leaving:
            return
        self._leaving = self._has_last_words = True
        self.wire.go_away(GoAwayCode.CLOSING, text)
        self._reading.deadline = trio.current_time() + LAST_WORDS_TIME
        self.wake()

    def cut(self, why: str, code: GoAwayCode = GoAwayCode.STALLED) -> None:
        """Close because of what the peer does, or does not do; it and the log are told."""
        if not self.over:
            self.wire.go_away(code, why)
            self._complain(why)
            self._end()
            self._reading.cancel(why)

    def lose(self, why: str) -> None:
        """Close without a word."""
        self.reason = self.reason or why
        self._reading.cancel(why)

    async def wait_sent(self) -> None:
        """Wait until something more has been sent, or the link is over."""
        if self.over:
            await trio.lowlevel.checkpoint()
        else:
            await self._writer.sent.park()

    # --- its life -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry streams until the connection ends. A fault of the peer is logged, not raised."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._writer.run)
                await self._converse(nursery)
                self._end()
                await self._say_last_words()
                nursery.cancel_scope.cancel("the connection has ended")
        finally:
            self._end()
            await trio.aclose_forcefully(self._stream)

    async def _converse(self, nursery: trio.Nursery) -> None:
        self._reading.deadline = trio.current_time() + self._hello_time
        with self._reading:
            try:
                await self._read(nursery)
            except RemoteProtocolError as exc:
                self._complain(explain(exc, dialled=self._dials))
            except GONE as exc:
                self.reason = self.reason or self._left(f"it is gone: {_root(exc)}")
        if self._reading.cancelled_caught and not (
            self.established or self._leaving or self.reason
        ):
            self.unanswered = True
            self.reason = f"it has not said hello within {self._hello_time:g} s"

    def _left(self, how: str) -> str:
        """Why a peer has gone. Before its hello it does not matter how: it may be no peer."""
        return how if self.established else NO_HELLO

    def _complain(self, why: str) -> None:
        self.reason, self.told = why, True
        self._has_last_words = True
        if self.wire.incompatible:
            self._complaints.incompatible(self.peer, why)
        else:
            self._complaints.closed(self.peer, why)

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        self._writer.congested = False
        self._close_streams()
        self.wire.stop_receiving()
        self._count_arriving()
        self._writer.sent.unpark_all()

    async def _say_last_words(self) -> None:
        """Let a GOAWAY leave, and be read: a reset must not overtake it."""
        if not self._has_last_words:
            return
        with trio.move_on_after(LAST_WORDS_TIME), suppress(*GONE):
            self.wake()
            while self.wire.wants_to_send:
                await self._writer.sent.park()
            await self._read_away()

    async def _read_away(self) -> None:
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()
        while await self._stream.receive_some(READ_PIECE):
            pass

    # --- in -----------------------------------------------------------------------------------

    async def _read(self, nursery: trio.Nursery) -> None:
        """Until the peer has no more to say; a reason that is not in good order is noted."""
        wire = self.wire
        while not self.over:
            if wire.congested:
                await self._wait_taken()
            self._watch.waits()
            data = await (self._receive_whole() if wire.receiving else self._receive())
            now = trio.current_time()
            self._watch.hears(now)
            self._hands_on = True
            if (step := wire.receive_step(data)) is not None:
                self._take(step)
                self._taken()
            else:
                wire.receive_data(data)
                ended = await self._hand_on(nursery)
                self._taken()
                self._count_arriving()
                if ended:
                    self._hands_on = False
                    return
            self._hands_on = False
            self._writer.look()
            if self._is_flooded(now):
                self.cut("it sends too much that leads to nothing", GoAwayCode.FLOOD)

    def _is_flooded(self, now: float) -> bool:
        """Has too much come that leads to nothing?"""
        return not self._allowance.spend(self.wire.trifles, now)

    async def _wait_taken(self) -> None:
        """Wait until the peer takes the answers to what it sends."""
        limit = self.settings.frame_time
        due = trio.current_time() + limit
        with trio.CancelScope(deadline=due):
            while self.wire.congested:
                await self._writer.sent.park()
        if self.wire.congested and trio.current_time() - due <= self.settings.heartbeat:
            self.cut(f"it has not taken the answers to what it sends for {limit:g} s")

    async def _hand_on(self, nursery: trio.Nursery) -> bool:
        """Hand on all that has arrived. True: that was the last."""
        count, some, wire = 0, False, self.wire
        while not self.over and (event := wire.next_event()) is not None:
            if type(event) is Breath:
                await self._pause()
                continue
            if isinstance(event, Closed):
                how = "it ended inside a frame" if event.inside else "it has left"
                self.reason = self._left(how)
                return True
            if isinstance(event, GoneAway):
                self.gone_away = event
                return True
            if isinstance(event, Established):
                self.process = event.process
                self._is_established(nursery)
            self._take(event)
            some = True
            count += REQUEST_WEIGHT if type(event) is StreamOpened else 1
            if count >= BATCH:
                count = 0
                await self._pause()
        if some:
            self._frame_due = math.inf  # what is arriving now began later
        return False

    async def _pause(self) -> None:
        """Let others run."""
        self._hands_on = False
        self.look()
        await trio.lowlevel.checkpoint()
        self._hands_on = True

    def _count_arriving(self) -> None:
        arriving = self.wire.arriving
        if arriving != self.arriving:
            self.arriving = arriving
            self._look_arriving()

    async def _receive(self) -> bytes | bytearray:
        self._frame_due = math.inf
        if self._socket is None:
            return await self._stream.receive_some(READ_PIECE)
        # There is seldom anything left of what came before, so it waits before it reads.
        await trio.lowlevel.wait_readable(self._socket)
        while (data := read_now(self._socket, self._piece)) is None:
            await trio.lowlevel.wait_readable(self._socket)
        self._piece = READ_PIECE if len(data) == self._piece else SMALL_PIECE
        return data

    async def _receive_whole(self) -> bytes | bytearray:
        """The rest of what has begun to arrive, or a part of that."""
        if self._frame_due == math.inf:
            self._frame_due = trio.current_time() + self.settings.frame_time
        with trio.CancelScope(deadline=self._frame_due):
            return await self._stream.receive_some(READ_PIECE)
        if trio.current_time() - self._frame_due > self.settings.heartbeat:
            self._frame_due = math.inf  # it was this process that did not run
            return await self._receive_whole()
        text = f"a frame or message took over {self.settings.frame_time:g} s to arrive"
        self.wire.go_away(GoAwayCode.STALLED, text)
        raise RemoteProtocolError(text)

    def _is_established(self, nursery: trio.Nursery) -> None:
        self.established = True
        if not self._leaving:
            self._reading.deadline = math.inf
        nursery.start_soon(self._watch.run, self._judge, self._look_at_streams)

    # --- out ----------------------------------------------------------------------------------

    def _all_sent(self) -> None:
        if self._leaving:
            self._reading.cancel("the last words are said")

    def _cannot_send(self, exc: BaseException) -> None:
        self.lose(self._left(f"it does not take what is sent: {_root(exc)}"))

    def _is_stalled(self) -> None:
        text = f"it has taken nothing for {self.settings.stall_time:g} s"
        self._complaints.closed(self.peer, text)
        self.told = True
        self.lose(text)

    # --- the watch ----------------------------------------------------------------------------

    def _judge(self, verdict: Verdict) -> None:
        if self.over:
            return
        if verdict is Verdict.ASK:
            self.wire.ping()
            self.wake()
        elif verdict is Verdict.SILENT:
            self._peer_is_silent()
            self.look()
        elif verdict is Verdict.LOST:
            text = f"nothing was heard for {trio.current_time() - self.pulse.heard:.3g} s"
            self._complaints.closed(self.peer, text)
            self.given_up = self.told = True
            self.lose(text)

    def _look_at_streams(self) -> None:
        if not self.over:
            self._end_starving()


def _root(exc: BaseException) -> str:
    """What lies below an error, in words: some of those above it have none."""
    text = ""
    cause: BaseException | None = exc
    while cause is not None:
        text, cause = str(cause) or text, cause.__cause__
    return text or "the connection broke"
