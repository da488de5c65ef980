"""The way back of one request at the worker: an outbox on a connection that many share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.plane.abc import AcceptedCall, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.lifecycle import Peer
    from dynamo_trio.plane.mux.server_link import ServerLink
    from dynamo_trio.plane.mux.unread import Share


class _Nobody(AcceptedCall):
    """The call behind an answer whose request is not taken on yet."""

    def cancel(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


@attrs.define(eq=False)
class Answer(Outbox):
    """The outbox of one call. Calls on it only append to what the connection's writer sends."""

    sid: int
    _link: ServerLink
    #: What the client has streamed in.
    share: Share
    call: AcceptedCall = attrs.field(factory=_Nobody)
    finished: bool = False
    #: All of it has left.
    _sent: bool = False
    #: Invariant: once set nothing is sent, and the call was told.
    _gone: bool = False
    _begun: bool = False
    _waiters: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- the outbox ---------------------------------------------------------------------------

    @property
    def peer(self) -> Peer:
        return self._link.client

    def begin(self) -> None:
        self._begun = True

    def put(self, payload: bytes) -> None:
        if not self._gone and not self.finished:
            self._link.wire.send_item(self.sid, payload)
            self._link.look()

    def put_tokens(self, token_ids: Sequence[int]) -> None:
        if not self._gone and not self.finished:
            self._link.wire.send_tokens(self.sid, token_ids)
            self._link.wake()

    def finish(self, error: DynamoException | None) -> None:
        if not self.finished:
            self.finished = True
            self.share.clear()
            self._link.finish(self, error, begun=self._begun)

    @property
    def has_credit(self) -> bool:
        if self._gone:
            return True  # what is put leads nowhere, and nobody is held back
        return not self._link.congested and self._link.wire.has_credit(self.sid)

    async def wait_credit(self) -> None:
        await self._waiters.park()

    def wake(self) -> None:
        self._waiters.unpark_all()

    @property
    def delivered(self) -> bool | None:
        return self._sent or (False if self._gone else None)

    async def wait_delivered(self) -> None:
        await self._waiters.park()

    def recall(self, error: DynamoException) -> bool:
        return not self._gone and self._link.recall(self, error)

    def grant(self, items: int) -> None:
        self.share.consume(items)
        if not self._gone and not self.finished:
            self._link.wire.grant(self.sid, items)
            self._link.look()

    # --- as its connection sees it ------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """Does somebody wait for credit?"""
        return bool(self._waiters)

    def left(self) -> None:
        """All of it has, the end included."""
        self._sent = True
        self.wake()

    def leave(self) -> None:
        """The client has left, or its stream is given up."""
        if not self._gone:
            self._gone = True
            self.call.cancel()
            self.wake()
