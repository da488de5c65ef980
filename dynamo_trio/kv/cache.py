"""Follows one worker's KV cache: applies what it tells, and asks for what was missed.

Theory of operation
-------------------
Two tasks share a :class:`~dynamo_trio.wire.dynamo.kv_view.KvView`. One takes messages off the
wire as fast as they come. The other asks the worker's query endpoint: at the beginning for
everything, and whenever a message shows a gap, for that. While it waits, messages go on being
taken; the view holds what it cannot apply yet, in bounds.

A message that is lost shows when the next one comes. That the *last* one was lost shows only
when somebody asks, so the second task asks once soon after the beginning, when the
subscription may have come after the dump, and then now and then.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Protocol

import attrs
import trio
from msgspec import structs

from dynamo_trio.client import Client
from dynamo_trio.errors import Disconnected, DynamoException, RemoteProtocolError
from dynamo_trio.plane import RequestHead
from dynamo_trio.wire.dynamo.events import decode_event
from dynamo_trio.wire.dynamo.kv_events import decode_kv_events
from dynamo_trio.wire.dynamo.kv_query import KvQuery, TooNew, decode_answer
from dynamo_trio.wire.dynamo.kv_view import KvView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.discovery import EventChannel, EventSource, Instance
    from dynamo_trio.events import Inlet
    from dynamo_trio.runtime import DistributedRuntime
    from dynamo_trio.wire.dynamo.codec import Codec
    from dynamo_trio.wire.dynamo.events import EventMessage
    from dynamo_trio.wire.dynamo.kv_query import Answer

logger = logging.getLogger("dynamo_trio.kv")

#: Longer answers are read in a thread.
READ_INLINE_BYTES = 256 * 1024
#: Messages of one publisher that may make no sense before it is given up.
NONSENSE = 100


@attrs.frozen(kw_only=True)
class FollowSettings:
    """How a fleet is followed. Seconds."""

    #: Until it is first asked whether nothing was missed.
    first_audit: float = 1.0
    #: Between such questions to a worker that tells nothing.
    audit: float = 30.0
    #: Between two questions to one worker, at least; after failures up to ``longest_pause``.
    pause: float = 0.1
    longest_pause: float = 5.0
    #: For an answer to be there.
    answer_time: float = 10.0


class Takes(Protocol):
    """Takes a message; raises RemoteProtocolError where it makes no sense."""

    def __call__(self, message: EventMessage) -> None: ...


async def listen(inlet: Inlet, channel: EventChannel, take: Takes) -> None:
    """Take messages until too many make no sense. Of that the log hears once."""
    nonsense = 0
    while nonsense < NONSENSE:
        frames = await inlet.receive()
        try:
            take(_read(frames, channel))
        except RemoteProtocolError as exc:
            if not nonsense:
                logger.warning("%s from %s make no sense: %s", *_name(channel), exc)
            nonsense += 1
    logger.info("%s from %s are no longer listened to", *_name(channel))


def _name(channel: EventChannel) -> tuple[str, str]:
    return channel.topic, f"{channel.address} (publisher {channel.publisher_id:x})"


def _read(frames: list[bytes], channel: EventChannel) -> EventMessage:
    message = decode_event(frames)
    if (message.topic, message.publisher_id) != (channel.topic, channel.publisher_id):
        raise RemoteProtocolError("they are of another topic or publisher than was announced")
    return message


@attrs.define(eq=False)
class CacheFollower:
    """Follows the cache that ``source`` is about. ``run`` is called once."""

    runtime: DistributedRuntime
    #: Whose cache it is.
    source: EventSource
    channel: EventChannel
    settings: FollowSettings
    #: Called when the view has changed.
    changed: Callable[[], None]
    #: What is known of the cache; a new object when the publisher begins anew.
    view: KvView = attrs.field(init=False)
    #: Messages that made sense.
    messages: int = 0
    #: Questions that were asked of the worker.
    queries: int = 0
    #: Times that messages were missed.
    gaps: int = 0
    _sequence: int = -1
    _wanted: trio.Event = attrs.field(factory=trio.Event)

    @view.default
    def _view_default(self) -> KvView:
        return KvView(self.source.worker_id, self.source.dp_rank)

    async def run(self) -> None:
        """Follow until cancelled, or until the publisher has to be given up."""
        recovery = self.source.recovery
        if recovery is None:
            logger.warning("worker %x says not where to ask for its cache", self.source.worker_id)
            return
        planes = self.runtime.planes
        planes.found(recovery.transports)
        try:
            with self.runtime.events.open_inlet(self.channel.address, self.channel.topic) as inlet:
                await self._follow(inlet, recovery)
        except ValueError as exc:
            logger.warning("worker %x cannot be listened to: %s", self.source.worker_id, exc)
        finally:
            planes.gone(recovery.transports)

    async def _follow(self, inlet: Inlet, recovery: Instance) -> None:
        client = Client(recovery.endpoint, self.runtime.planes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_whole, client, recovery)
            await listen(inlet, self.channel, self._take)
            nursery.cancel_scope.cancel("the publisher makes no sense")
        self.view = self._view_default()  # what cannot be kept fresh is not known
        self.changed()

    # --- messages -----------------------------------------------------------------------

    def _take(self, message: EventMessage) -> None:
        if message.sequence <= self._sequence:
            logger.info("publisher %x has begun anew", self.channel.publisher_id)
            self.view = self._view_default()
        elif message.sequence > self._sequence + 1 and self._sequence >= 0:
            self.gaps += 1
        self._sequence = message.sequence
        try:
            for event in decode_kv_events(message.payload):
                self.view.receive(event)
            self.messages += 1
        finally:
            if self.view.missing is not None:
                self._wanted.set()
            self.changed()

    # --- questions ----------------------------------------------------------------------

    async def _keep_whole(self, client: Client, instance: Instance) -> None:
        pause, quiet = self.settings.pause, self.settings.first_audit
        while True:
            if self.view.missing is None:
                with trio.move_on_after(quiet):
                    await self._wanted.wait()
                quiet = self.settings.audit
            self._wanted = trio.Event()
            if await self._repair(client, instance):
                pause = self.settings.pause
            else:
                pause = min(pause * 2, self.settings.longest_pause)
            await trio.sleep(pause)

    async def _repair(self, client: Client, instance: Instance) -> bool:
        """Ask for what is missing, or whether anything is; False: ask again later."""
        view = self.view
        query, audit = self._query()
        try:
            with trio.fail_after(self.settings.answer_time):
                answer = await self._ask(client, instance, query)
            if audit and isinstance(answer, TooNew) and answer.newest_available == _last(view):
                return True
            helped = view.repair(answer)
        except trio.TooSlowError:
            logger.info("worker %x does not tell what it caches", view.worker_id)
            return False
        except DynamoException as exc:
            logger.info("worker %x does not tell what it caches: %s", view.worker_id, exc)
            return False
        self.changed()
        return helped

    def _query(self) -> tuple[KvQuery, bool]:
        if self.view.missing is not None:
            return self.view.query(), False
        last = _last(self.view)
        start = last + 1 if last else None
        return structs.replace(self.view.query(), start_event_id=start, end_event_id=None), True

    async def _ask(self, client: Client, instance: Instance, query: KvQuery) -> Answer:
        self.queries += 1
        sink = _OneItem()
        head = RequestHead(str(uuid.uuid4()), annotated=False)
        async with client.open_stream(instance, head, query, sink):
            codec, item = await sink.wait()
        if len(item) <= READ_INLINE_BYTES:
            return decode_answer(codec, item)
        return await trio.to_thread.run_sync(decode_answer, codec, item, abandon_on_cancel=True)


def _last(view: KvView) -> int:
    return view.last_event_id or 0


@attrs.define(eq=False)
class _OneItem:
    """The sink of a stream of which only the first item counts."""

    _codec: Codec | None = None
    _item: bytes | None = None
    _error: DynamoException | None = None
    _there: trio.Event = attrs.field(factory=trio.Event)

    def expect(self, codec: Codec) -> None:
        self._codec = codec

    def feed(self, payloads: Sequence[bytes]) -> None:
        if self._item is None and payloads:
            self._item = payloads[0]
            self._there.set()

    def feed_tokens(self, token_ids: Sequence[int]) -> None:
        self.finish(RemoteProtocolError("tokens for an answer"))

    def finish(self, error: DynamoException | None) -> None:
        self._error = error
        self._there.set()

    async def wait(self) -> tuple[Codec, bytes]:
        await self._there.wait()
        if self._item is None or self._codec is None:
            raise self._error or Disconnected("the answer was empty")
        return self._codec, self._item
