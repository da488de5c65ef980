"""One request at the client: a stream on a connection that many share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.errors import DynamoException, Unknown
from dynamo_trio.plane.abc import ClientStream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_trio.plane.abc import ItemSink, Rest
    from dynamo_trio.plane.mux.client_link import ClientLink
    from dynamo_trio.plane.mux.unread import Share

logger = logging.getLogger("dynamo_trio.plane.mux")


def deliver(streams: Mapping[int, MuxStream], tokens: Mapping[int, Sequence[int]]) -> None:
    """Deliver what a step, or several, had for each stream; all of it here, without a call for each
    stream but that of its sink."""
    rests: list[tuple[MuxStream, Rest]] = []
    for sid, token_ids in tokens.items():
        stream = streams.get(sid)
        if stream is None or (sink := stream._sink) is None:
            continue
        stream.touched = True
        stream._share.came += len(token_ids)
        try:
            rest = sink.feed_tokens(token_ids)
        except Exception:
            stream._mistake()
        else:
            if rest is not None:
                rests.append((stream, rest))
    for stream, (write, data) in rests:
        try:
            write(data)
        except Exception:
            stream._mistake()


@attrs.define(eq=False)
class MuxStream(ClientStream):
    """From before its OPEN leaves until its end. All calls but the waits are synchronous."""

    plane: ClassVar[str] = "mux"
    sid: int
    path: str
    _link: ClientLink
    #: Invariant: None as soon as the stream has ended or its client has left; nothing is
    #: delivered afterwards.
    _sink: ItemSink | None
    #: What was delivered.
    _share: Share
    #: The request streams in, and its client has not ended that.
    _input_open: bool = False
    #: The worker has taken the request on.
    accepted: bool = False
    #: Something of the answer was delivered.
    touched: bool = False
    #: What ended it, if that was an error.
    _error: DynamoException | None = None
    #: Accepted or refused.
    _answered: trio.Event = attrs.field(factory=trio.Event)
    _waiters: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- as its client sees it ----------------------------------------------------------------

    async def wait_accepted(self) -> None:
        """Wait for the worker's decision.

        Raises:
            DynamoException: it refused, or there will be none.
        """
        await self._answered.wait()
        if not self.accepted:
            raise self._error or Unknown("the worker refused the request")

    def grant(self, items: int) -> None:
        self._share.consume(items)
        if self._sink is not None:
            self._link.wire.grant(self.sid, items)
            self._link.look()

    def stop(self) -> None:
        if self._sink is not None:
            self._input_open = False
            self._link.wire.stop(self.sid)
            self._link.wake()

    def detach(self) -> None:
        """Deliver nothing from now on, and tell the worker if it still runs."""
        if self._sink is not None:
            self._sink = None
            self._link.drop(self)
        self._share.clear()
        self.wake()

    def put(self, payload: bytes) -> None:
        if self._sink is not None and self._input_open:
            self._link.wire.send_item(self.sid, payload)
            self._link.look()

    def finish_input(self) -> None:
        if self._sink is not None and self._input_open:
            self._input_open = False
            self._link.wire.finish_input(self.sid)
            self._link.wake()

    @property
    def has_credit(self) -> bool:
        if self._sink is None or not self._input_open:
            return True  # nothing is taken, so nothing need wait
        return not self._link.congested and self._link.wire.has_credit(self.sid)

    async def wait_credit(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.has_credit:
            await self._waiters.park()

    # --- as its connection sees it ------------------------------------------------------------

    def accept(self) -> None:
        """The worker has taken the request on."""
        self.accepted = True
        self._answered.set()

    def wake(self) -> None:
        """There may be credit."""
        if self._waiters:
            self._waiters.unpark_all()

    def feed(self, payload: bytes) -> None:
        """Deliver an item."""
        if self._sink is not None:
            self.touched = True
            if not self._share.item(len(payload)):
                self._link.give_up(self)
                return
            try:
                self._sink.feed((payload,))
            except Exception:
                self._mistake()

    def _mistake(self) -> None:
        logger.exception("an answer could not be taken")
        self._link.drop(self)
        self.finish(Unknown("the answer could not be taken"))

    def finish(self, error: DynamoException | None) -> None:
        """The stream is over; the first end counts."""
        sink, self._sink = self._sink, None
        self._error = self._error or error
        self._answered.set()
        self.wake()
        # One that was not accepted raises its refusal from ``wait_accepted``.
        if sink is not None and self.accepted:
            try:
                sink.finish(error)
            except Exception:
                logger.exception("the end of an answer could not be taken")
