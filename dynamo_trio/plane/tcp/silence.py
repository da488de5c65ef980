"""Is a worker that has left discovery still alive? Dynamo's wire has no heartbeat.

Theory of operation
-------------------
An instance that leaves discovery ends no stream: a worker that stops in good order serves its
streams to their end. But a worker that died without a word (its machine is gone, its process
is frozen) leaves discovery too, and then nothing more is ever heard on its connections.

So streams of such an instance that stay silent for :data:`SILENCE` seconds are doubted, and
the worker is asked: a request for an endpoint that it does not serve, on a fresh connection.
Any acknowledgement shows that it lives, and the doubt begins anew; without one the silent
streams are given up. A stream that waits for its own client is never doubted.

A request that was acknowledged, but whose worker has not called home, is treated alike; but it
is given up after :data:`PATIENCE` seconds even if the worker answers: the real worker drops a
request that it cannot read without a word, and its peers give such a request up at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Disconnected, DynamoException
from dynamo_trio.wire.dynamo.request_frame import RequestFrame

if TYPE_CHECKING:
    from dynamo_trio.plane.tcp.pool import RequestPool
    from dynamo_trio.plane.tcp.streams import StreamTable, TcpStream
    from dynamo_trio.wire.dynamo.addresses import TcpTarget

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Seconds without a word until a stream is doubted, and for the answer to the question.
SILENCE = ANSWER_TIME = 5.0
#: Seconds after which a request whose worker has not called home is given up.
PATIENCE = 30.0


@attrs.define(eq=False)
class SilenceWatch:
    """Watches the streams of instances that have left, in ``nursery``."""

    _streams: StreamTable
    _pool: RequestPool
    _nursery: trio.Nursery
    _watched: set[str] = attrs.field(factory=set)

    def begin(self, target: TcpTarget) -> None:
        """The instance at ``target`` has left."""
        address = str(target)
        if address in self._watched or not self._streams.running(address):
            return
        self._watched.add(address)
        try:
            self._nursery.start_soon(self._watch, target)
        except RuntimeError:  # the plane is closed, and its streams with it
            self._watched.discard(address)

    async def _watch(self, target: TcpTarget) -> None:
        address, began = str(target), trio.current_time()
        try:
            while streams := self._streams.running(address):
                await self._doubt(target, streams)
                if trio.current_time() - began >= PATIENCE:
                    self._give_up_strays(address)
        finally:
            self._watched.discard(address)

    async def _doubt(self, target: TcpTarget, streams: list[TcpStream]) -> None:
        """One round: wait, and ask if somebody was silent."""
        for stream in streams:
            stream.heard = False
        await trio.sleep(SILENCE)
        silent = _silent(streams)
        if not silent or await self._answers(target):
            return
        for stream in _silent(silent):
            logger.warning("the worker at %s is silent; request given up", target)
            stream.give_up(Disconnected("the worker left, and answers no more"))

    async def _answers(self, target: TcpTarget) -> bool:
        asked = trio.current_time()
        with trio.move_on_after(ANSWER_TIME):
            try:
                await self._pool.ask_alone(target.address, _question(target))
            except DynamoException:
                return False
            return True
        # A process that was itself frozen for a while has no right to judge.
        return trio.current_time() - asked > 2 * ANSWER_TIME

    def _give_up_strays(self, address: str) -> None:
        for stream in self._streams.running(address):
            if stream.home is None:
                stream.give_up(Disconnected("the worker left, and never answered"))


def _silent(streams: list[TcpStream]) -> list[TcpStream]:
    return [s for s in streams if not (s.over or s.heard or s.is_starved)]


def _question(target: TcpTarget) -> RequestFrame:
    """A request for an endpoint that nobody serves, under the worker's own prefix."""
    prefix, _, _ = target.path.rpartition("/")
    return RequestFrame(f"{prefix}/dynamo-trio-are-you-there", b"")
