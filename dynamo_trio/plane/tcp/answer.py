"""One call home: a worker's connection, and the stream whose answer it brings.

Theory of operation
-------------------
One task reads the connection, and no other task touches it. What has arrived is turned into
items and delivered by one plain call, as far as there is credit; without credit nothing is
read, so the worker is held back by TCP, and only on this stream.

A wish of the client (:attr:`TcpStream.wish`) cancels the reader's wait; then the same task
tells the worker and reads on. Cancelling a wait for bytes loses none.

When the answer is whole, or an item was an error, the client is told at once; the connection
waits a moment longer for the worker's last words, so that its end is no reset for the worker.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import (
    Disconnected,
    DynamoException,
    ProtocolError,
    RemoteProtocolError,
    Unknown,
)
from dynamo_trio.wire.dynamo.annotated import read_item
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Item,
    Kill,
    Sentinel,
    Stop,
    Wish,
)
from dynamo_trio.wire.dynamo.receiver import Closed

if TYPE_CHECKING:
    from dynamo_trio.plane.tcp.streams import TcpStream
    from dynamo_trio.wire.dynamo.call_home import ClientEnd
    from dynamo_trio.wire.dynamo.call_home_states import UpEvent

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Seconds that telling a worker the client's wish may take, and hearing a worker's last words.
TELL_TIME = LAST_WORDS_TIME = 1.0


@attrs.define(eq=False)
class Answer:
    """A worker's connection, from behind its handshake on; :meth:`run` is its task."""

    _transport: trio.abc.Stream
    _end: ClientEnd
    #: Around the waits that a change of the client's wish ends.
    _waiting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: The worker may have more to say although the client has all that it needs.
    _unsaid: bool = False

    def look(self) -> None:
        """The client's wish has changed."""
        self._waiting.cancel("the client's wish has changed")

    async def run(self, stream: TcpStream) -> None:
        """Bring the stream that this answers to its end. The caller closes."""
        self._end.accept(stream.codec)
        stream.heard = True
        try:
            await self._serve(stream)
            if self._unsaid:
                await self._hear_last_words()
        except Exception:  # a mistake of ours or of the sink; nobody must wait for ever
            stream.give_up(Unknown("the answer could not be taken"))
            raise
        finally:
            stream.give_up(Disconnected("the request plane was closed"))

    # --- the stream -----------------------------------------------------------------------

    async def _serve(self, stream: TcpStream) -> None:
        """Listen, and tell the worker what its client wants, until the stream is over."""
        while not stream.over or stream.wish is not self._end.wish:
            with trio.CancelScope() as self._waiting:
                if stream.wish is self._end.wish:
                    await self._listen(stream)
            if stream.wish is not self._end.wish and not await self._tell(stream.wish):
                stream.finish(None)  # it was to stop, and takes nothing
                self._unsaid = False
                return

    async def _listen(self, stream: TcpStream) -> None:
        while not stream.over:
            if not self._deliver(stream):
                if stream.credit <= 0:
                    await stream.wait_granted()
                continue
            if not stream.over:
                self._end.receive_data(await receive(self._transport))
                stream.heard = True

    def _deliver(self, stream: TcpStream) -> bool:
        """Feed what has arrived, and end the stream if its end has. False: credit ran out."""
        values: list[bytes] = []
        failure = None
        try:
            last = self._collect(stream, values)
        except DynamoException as exc:
            last, failure = None, exc
        if values:
            stream.feed(values)
        if failure is not None:
            self._fail(stream, failure)
        elif isinstance(last, Item):
            return False
        elif last is not None:
            self._unsaid = isinstance(last, CompleteFinal)
            stream.finish(self._ending())
        return True

    def _collect(self, stream: TcpStream, values: list[bytes]) -> UpEvent | Closed | None:
        """Take values as far as there is credit.

        Returns what ends the stream; an ``Item`` if there may be more, and no credit; None if
        all has been taken.

        Raises:
            DynamoException: the error that an item is, or a broken rule.
        """
        credit, codec, next_event = stream.credit, stream.codec, self._end.next_event
        annotated = stream.annotated
        event: UpEvent | Closed | None = Item(b"")
        while len(values) < credit:
            event = next_event()
            if type(event) is Item:
                value = read_item(codec, event.data) if annotated else event.data
                if value is not None:
                    values.append(value)
            elif type(event) is not Accepted:
                break
        return event

    def _fail(self, stream: TcpStream, failure: DynamoException) -> None:
        if isinstance(failure, ProtocolError):
            logger.warning("request %s: %s", stream.subject, failure)
            stream.give_up(failure)
        else:  # the worker goes on to end the stream in good order
            self._unsaid = True
            stream.finish(failure)

    def _ending(self) -> DynamoException | None:
        """What the end means. A worker that was told to stop just closes."""
        error = self._end.ending()
        obeyed = self._end.wish is Wish.STOP and isinstance(error, Disconnected)
        return None if obeyed else error

    async def _tell(self, wish: Wish) -> bool:
        """Tell the worker; False if it takes nothing."""
        message = self._end.send(Kill() if wish is Wish.KILL else Stop())
        with trio.move_on_after(TELL_TIME) as scope:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._transport.send_all(message)
        return not scope.cancelled_caught

    async def _hear_last_words(self) -> None:
        with trio.move_on_after(LAST_WORDS_TIME), suppress(RemoteProtocolError):
            while not isinstance(event := self._end.next_event(), Sentinel | Closed):
                if event is None:
                    self._end.receive_data(await receive(self._transport))


async def receive(transport: trio.abc.Stream) -> bytes | bytearray:
    """What has arrived; empty at the end, orderly or not."""
    try:
        return await transport.receive_some()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return b""  # a reset is an end like any other
