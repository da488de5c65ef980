"""What a canary came back with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import DynamoException, RemoteProtocolError, Unknown
from dynamo_trio.plane.abc import INITIAL_CREDIT, Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.wire.dynamo.codec import Codec


@attrs.define(eq=False)
class Answer(Outbox):
    """The way back of one canary: it keeps no item, only whether there was one, and what failed."""

    _codec: Codec
    is_repeat: bool = False
    items: int = 0
    #: Why the answer is not a good one; None as long as nothing is known against it.
    fault: str | None = None
    finished: bool = False
    #: The handler broke: it raised what the log has a traceback of.
    broken: bool = False
    #: Set when nothing more need be waited for.
    _known: trio.Event = attrs.field(factory=trio.Event)
    _read: Callable[[bytes], object] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._read = self._codec.decoder(object, "item of a canary")

    @property
    def verdict(self) -> str | None:
        """What is wrong with the answer as it stands; None if it is good."""
        if self.fault is None and not self.items:
            return "it ended without an item" if self.finished else "no answer"
        return self.fault

    @property
    def is_known(self) -> bool:
        """Is there nothing that :meth:`wait` would wait for?"""
        return self._known.is_set()

    async def wait(self) -> None:
        """Wait until it has ended, or more has come than a health check needs."""
        await self._known.wait()

    def begin(self) -> None:
        """That a handler starts says nothing."""

    def put(self, payload: bytes) -> None:
        self._count(1)
        try:
            item = self._read(payload)
        except RemoteProtocolError as exc:  # codecs read what they have spelled
            item = {"event": "error", "comment": [str(exc)]}
        if (fault := fault_in(item)) is not None:
            self._fail(fault)

    def put_tokens(self, token_ids: Sequence[int]) -> None:
        self._count(len(token_ids))

    def finish(self, error: DynamoException | None) -> None:
        if not self.finished:
            self.finished = True
            self.broken = isinstance(error, Unknown)
            if error is not None:
                self._fail(f"{type(error).__name__}: {error.message}")
            self._known.set()

    def _count(self, items: int) -> None:
        self.items += items
        if self.items >= INITIAL_CREDIT:
            self._known.set()

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._known.set()

    @property
    def has_credit(self) -> bool:
        return True

    async def wait_credit(self) -> None:
        await trio.lowlevel.checkpoint()

    def wake(self) -> None:
        """Nobody waits."""

    @property
    def delivered(self) -> bool | None:
        return True

    async def wait_delivered(self) -> None:
        await trio.lowlevel.checkpoint()


def fault_in(item: object) -> str | None:
    """What an item says has failed, in Dynamo's two ways to say it; None if it says no such thing.

    An engine's item has a ``finish_reason`` that is ``{"error": ...}`` or the word itself; an
    ``Annotated`` has the event ``error``.
    """
    if not isinstance(item, dict):
        return None
    reason = item.get("finish_reason")
    if reason == "error":
        return "the engine failed it"
    if isinstance(reason, dict) and "error" in reason:
        return f"the engine failed it: {reason['error']}"
    if item.get("event") == "error":
        return f"an error: {item.get('comment') or item.get('error')}"
    return None
