"""The way back of one request: the worker calls the client and streams its items.

Theory of operation
-------------------
A :class:`CallHome` is made when its request arrives and is the outbox of the call. It is one
task: it dials, then reads what the client wants (stop, kill, or its leaving) until the
connection ends. Everything that is said before the connection stands waits in ``_unsent``,
the handshake in front.

An item costs its sender one non-blocking write, made in the handler's own task, as long as
the socket takes everything. What it does not take waits in ``_unsent``, and a second task,
started then, sends it. Invariant: while something is unsent, or the stream is not a plain
socket, nobody but that task writes. Above the high-water mark the call has no credit.

An ending is one of these, and the first wins:

* the call finishes: its last words are sent, and the client is expected to close. The call is
  over when they have left, and until then it is cancelled if the client goes;
* the client asked to stop: the call is asked to end, and when it does the connection is
  closed without last words;
* the client is gone (kill, end of stream, reset, or it could not be dialled): the call is
  cancelled, and nothing is sent any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.lifecycle.prospects import Peer
from dynamo_trio.plane.abc import AcceptedCall, Outbox
from dynamo_trio.plane.tcp.items_in import ItemsIn
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.annotated import annotate, annotate_error
from dynamo_trio.wire.dynamo.call_home import WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Phase,
    Refused,
    Sentinel,
    Stop,
    UpEvent,
    Wish,
)
from dynamo_trio.wire.llm import encode_token

if TYPE_CHECKING:
    from dynamo_trio.errors import DynamoException
    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.dynamo.control import ReplyTo

logger = logging.getLogger("dynamo_trio.plane.tcp")


def _is_refusal(error: DynamoException) -> bool:
    """Is an error before the beginning told in the prologue, or as the only item?

    To Dynamo 1.5.1's frontend a refusal in the prologue is a worker that cannot be reached: it
    tries the next one, and sends nothing to this one for 5 s. One bad request would so put
    every worker out of reach. As an item the same error stays with its request.
    """
    return error.migratable or isinstance(error, RemoteProtocolError)


Dial = Callable[[HostPort], Awaitable[trio.abc.Stream]]

#: Bytes that are read, and sent, at once. A client is judged slow by each piece it takes.
PIECE: Final = 16 * 1024
#: All that a stream can raise means the same: the client is gone.
GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)

_UNBEGUN = (Phase.CONNECTED, Phase.GREETED)


class _Nobody(AcceptedCall):
    """The call behind an answer that is only a refusal."""

    def cancel(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


@attrs.define(eq=False)
class CallHome(Outbox):
    """The outbox of one call, and its connection to the client."""

    _reply_to: ReplyTo
    _codec: Codec
    _dial: Dial
    _settings: TcpSettings
    #: Told when the answer is seen to have begun, or has ended.
    _on_settled: Callable[[CallHome], object] = lambda _: None
    #: Do its items lie in Dynamo's ``Annotated``?
    _annotated: bool = attrs.field(default=True, kw_only=True)
    #: Log lines about clients that cannot be called.
    _unreached: Seldom = attrs.field(factory=Seldom, kw_only=True)
    call: AcceptedCall = attrs.field(factory=_Nobody)
    #: What streams in.
    items: ItemsIn | None = None
    #: The last words were said, or nobody wants them.
    finished: bool = False
    _delivered: bool | None = None
    #: Its peer knows whether it began, as far as that can be known here.
    settled: bool = False
    #: Invariant: once set, nothing is sent any more.
    _gone: bool = False
    _wire: WorkerEnd = attrs.field(init=False)
    _unsent: bytearray = attrs.field(factory=bytearray)
    #: Invariant: from the high-water mark until the low-water mark.
    _paused: bool = False
    _credit: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _stream: trio.abc.Stream | None = None
    #: A plain socket, to be written past its stream.
    _socket: trio.socket.SocketType | None = None
    #: Of the connection: there while it stands.
    _nursery: trio.Nursery | None = None
    #: Where the writer waits for something to send; None until there is a writer.
    _work: trio.lowlevel.ParkingLot | None = None

    def __attrs_post_init__(self) -> None:
        self._wire = WorkerEnd(self._codec)
        self._unsent += self._wire.send(Handshake(self._reply_to.subject))

    # --- the outbox: plain calls from the call's task -------------------------------------

    @property
    def peer(self) -> Peer:
        # Whether it would continue anything it has no way to say; but it cannot if it is not even
        # told of the error.
        return Peer(places=None if self._annotated else 0)

    def begin(self) -> None:
        if not self._gone and not self.finished:
            self._send(self._wire.send(Accepted()))
            self._look()

    def put(self, payload: bytes) -> None:
        if not self._gone and not self.finished:
            data = annotate(self._codec, payload) if self._annotated else payload
            self._send(self._wire.send(Item(data)))

    def put_tokens(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.put(encode_token(self._codec, token_id))

    def grant(self, items: int) -> None:
        if self.items is not None:
            self.items.grant(items)

    def finish(self, error: DynamoException | None) -> None:
        if self.finished:
            return
        self.finished = True
        self._close_input()
        if not self._gone and self._wire.wish is Wish.GO_ON:
            self._send(b"".join(map(self._wire.send, self._last_words(error))))
        self._look()

    def _last_words(self, error: DynamoException | None) -> list[UpEvent]:
        events: list[UpEvent] = []
        if self._wire.phase is Phase.GREETED:
            if error is not None and (_is_refusal(error) or not self._annotated):
                return [Refused.because(error)]
            events.append(Accepted())
        if error is not None and not self._annotated:
            return [*events, Sentinel()]  # an end that is not complete: all that can be said
        if error is not None:
            events.append(Item(annotate_error(self._codec, error)))
        return [*events, CompleteFinal(), Sentinel()]

    @property
    def has_credit(self) -> bool:
        return not self._paused

    async def wait_credit(self) -> None:
        await self._credit.park()

    def wake(self) -> None:
        self._credit.unpark_all()

    @property
    def delivered(self) -> bool | None:
        return self._delivered

    async def wait_delivered(self) -> None:
        await self._credit.park()

    # --- sending ----------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if self._socket is None or self._unsent:
            self._keep(data)
        elif (sent := self._write_now(data)) < len(data):
            self._keep(memoryview(data)[sent:])

    def _write_now(self, data: bytes | bytearray) -> int:
        """One write that does not wait; returns what was taken."""
        assert self._socket is not None
        try:
            # The descriptor is asked for each time: a closed socket says -1, while a number
            # kept from before may belong to somebody else by now.
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            self._lose(f"does not take what is sent: {exc.strerror}")
            return len(data)

    def _keep(self, data: bytes | memoryview) -> None:
        self._unsent += data
        self._paused = self._paused or len(self._unsent) >= self._settings.high_water
        if self._work is not None:
            self._work.unpark()
        elif self._nursery is not None:
            self._work = trio.lowlevel.ParkingLot()
            self._nursery.start_soon(self._write)

    async def _write(self) -> None:
        """Send what is unsent, whenever there is something."""
        assert self._stream is not None
        assert self._work is not None
        while True:
            while self._unsent:
                await self._write_piece(self._stream)
            self._look()
            await self._work.park()

    async def _write_piece(self, stream: trio.abc.Stream) -> None:
        taken = 0
        with trio.move_on_after(self._settings.stall_time) as stalled:
            try:
                taken = await self._give(stream, bytes(self._unsent[:PIECE]))
            except GONE as exc:
                self._lose(f"does not take what is sent: {exc.__cause__ or exc}")
        if stalled.cancelled_caught:
            self._lose(f"has taken nothing for {self._settings.stall_time:g} s")
        del self._unsent[:taken]
        if self._paused and len(self._unsent) <= self._settings.low_water:
            self._grant()

    async def _give(self, stream: trio.abc.Stream, piece: bytes) -> int:
        """Wait until the stream takes something of it; returns how much that was."""
        if self._socket is None:
            await stream.send_all(piece)
            return len(piece)
        # With nothing behind the write that lets others run: a client that goes when it has all
        # must not be seen to go before what it has is known to have left.
        await trio.lowlevel.wait_writable(self._socket)
        return self._write_now(piece)

    def _grant(self) -> None:
        self._paused = False
        self._credit.unpark_all()

    def _look(self) -> None:
        """Something may be complete: the beginning of the answer, or all of it."""
        if self._unsent and not self._gone:
            return
        begun = self._nursery is not None and self._wire.phase not in _UNBEGUN
        if self._gone or (begun and (self.items is None or self.items.settled)):
            self._settle()
        if self.finished and self._nursery is not None:
            self._deliver(not self._gone)
            self._linger(self._nursery.cancel_scope)

    def _deliver(self, done: bool) -> None:
        if self._delivered is None:
            self._delivered = done
            self._credit.unpark_all()

    def _linger(self, connection: trio.CancelScope) -> None:
        if self._gone or self._wire.wish is not Wish.GO_ON:
            connection.cancel("the client wants no more")
        else:
            connection.deadline = trio.current_time() + self._settings.linger_time

    def _close_input(self) -> None:
        if self.items is not None:
            self.items.close()

    def _settle(self) -> None:
        if not self.settled:
            self.settled = True
            self._on_settled(self)

    # --- what streams in --------------------------------------------------------------------

    def stream_in(self, place: ReplyTo) -> None:
        """The request streams in from there. To be said before :meth:`run`."""
        killed = partial(self._lose, "cancelled it")
        self.items = ItemsIn(
            *(place, self.call, self._dial, self._settings.max_message),
            on_kill=killed,
            on_settled=self._look,
            unreached=self._unreached,
        )

    # --- the connection ---------------------------------------------------------------------

    async def run(self) -> None:
        """Call the client and stay until the connection has ended. Never raises for its faults."""
        if self.items is None:
            await self._answer()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.items.run)
            await self._answer()

    async def _answer(self) -> None:
        try:
            await self._converse(await self._dial(self._reply_to.address))
        except OSError as exc:
            self._unreached.log(
                *(logger, logging.WARNING, "request %.64s: its client cannot be called at %s: %s"),
                *(self._reply_to.request_id, self._reply_to.address, exc),
            )
            self._lose("cannot be called")
        finally:
            self._lose("is left, since this plane was closed")

    async def _converse(self, stream: trio.abc.Stream) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                if not self._gone:
                    self._connected(stream)
                    self._lose(await self._listen(stream))
        finally:
            self._nursery = self._socket = None
            await trio.aclose_forcefully(stream)

    def _connected(self, stream: trio.abc.Stream) -> None:
        """Say what has waited for the connection."""
        self._stream = stream
        if isinstance(stream, trio.SocketStream):
            self._socket = stream.socket
            del self._unsent[: self._write_now(self._unsent)]
            if self._paused and len(self._unsent) <= self._settings.low_water:
                self._grant()
        if self._unsent:
            self._keep(b"")
        self._look()

    async def _listen(self, stream: trio.abc.Stream) -> str:
        """Take the client's wishes; returns why there will be no more of them."""
        try:
            while True:
                self._wire.receive_data(await stream.receive_some(PIECE))
                while (event := self._wire.next_event()) is not None:
                    if not isinstance(event, Stop):
                        return "cancelled it" if self._wire.wish is Wish.KILL else "left"
                    self.call.stop()
        except GONE as exc:
            return f"is gone: {exc.__cause__ or exc}"
        except RemoteProtocolError as exc:
            logger.warning("request %.64s: %s", self._reply_to.request_id, exc)
            return "broke a rule"

    def _lose(self, why: str) -> None:
        """The client is gone; ``why`` says what it did. Behind the last words an answer ends so."""
        if self._gone:
            return
        self._gone = True
        self._close_input()
        self._unsent.clear()
        self._deliver(False)
        self._grant()
        self._settle()
        if not self._delivered:
            # Its client knows, and the worker counts it: no line for each in the log.
            logger.debug("request %.64s ends: its client %s", self._reply_to.request_id, why)
            self.call.cancel()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(why)
