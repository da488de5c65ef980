"""A worker that calls this process: which of its requests, and what for.

A call brings an answer (:mod:`~dynamo_trio.plane.tcp.answer`), or asks for the items of a
request that streams in (:mod:`~dynamo_trio.plane.tcp.items_out`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.plane.net.tls import explain
from dynamo_trio.plane.tcp.answer import Answer, receive
from dynamo_trio.wire.dynamo.call_home import ClientEnd
from dynamo_trio.wire.dynamo.call_home_states import Handshake
from dynamo_trio.wire.dynamo.control import REQUEST
from dynamo_trio.wire.dynamo.receiver import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.plane.tcp.streams import StreamTable

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Bytes that a caller may send before it has said which request it calls for.
MAX_GREETING = 4096


@attrs.define(eq=False)
class IncomingCall:
    """One connection of a worker; :meth:`run` is its task. ``limit``: bytes of a message."""

    _transport: trio.abc.Stream
    _limit: int
    #: Called when it has named a stream of ours.
    _on_found: Callable[[], object] = lambda: None
    #: Who it is, for the log.
    _peer: str = "an unknown peer"
    _end: ClientEnd = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._end = ClientEnd(limit=self._limit)

    async def run(self, streams: StreamTable, handshake_time: float) -> None:
        """Find what it calls for, and do that. Whoever called this closes the connection."""
        handshake = await self._greeted(handshake_time)
        if handshake is None:
            return
        if handshake.stream_type == REQUEST:
            await self._send_items(streams, handshake.subject)
        else:
            await self._take_answer(streams, handshake.subject)

    async def _take_answer(self, streams: StreamTable, subject: str) -> None:
        answer = Answer(self._transport, self._end)
        stream = streams.called_home(subject, answer)
        if stream is None:
            self._miss(subject)
            return
        self._on_found()
        await answer.run(stream)

    async def _send_items(self, streams: StreamTable, subject: str) -> None:
        items = streams.items_wanted(subject)
        if items is None:
            self._miss(subject)
            return
        self._on_found()
        await items.run(self._transport)

    def _miss(self, subject: str) -> None:
        # Usual when a request was given up while its worker was calling.
        logger.debug("a call home for request %.64r, which nobody waits for", subject)

    # --- its greeting ---------------------------------------------------------------------

    async def _greeted(self, limit: float) -> Handshake | None:
        with trio.move_on_after(limit):
            return await self._handshake()
        self._turn_away(f"it did not say within {limit:g} s which request it answers")
        return None

    async def _handshake(self) -> Handshake | None:
        try:
            while (event := self._end.next_event()) is None:
                if self._end.buffered > MAX_GREETING:
                    raise RemoteProtocolError("its handshake is too long")
                self._end.receive_data(await receive(self._transport))
        except RemoteProtocolError as exc:
            self._turn_away(explain(exc))
            return None
        if isinstance(event, Closed) and event.inside:
            self._turn_away("it left inside its handshake")
        return event if isinstance(event, Handshake) else None

    def _turn_away(self, why: str) -> None:
        logger.warning("a call home from %s is closed: %s", self._peer, why)
