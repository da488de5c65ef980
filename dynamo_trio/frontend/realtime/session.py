"""One realtime session, from ``session.created`` to its Close frame.

Theory of operation
-------------------
A session has one nursery. In it run the writer (:class:`~dynamo_trio.frontend.realtime.outbox.
Outbox`), a watcher that tells of a drain, and the session's own task, which reads: first until a
model is selected, then as the model's kind has it: :mod:`~.text` answers out of a chat
model, :mod:`~.passthrough` hands everything to a worker that speaks these events itself.

The session is admitted at the HTTP gate until all of that has ended. A cut cancels the soft
scope around the reading; what is said after it (the last notice, Close 1012) has the time of a
farewell.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.console.logs import request_id
from dynamo_trio.errors import DynamoException, ModelNotFound, Unknown
from dynamo_trio.frontend.realtime.outbox import Outbox
from dynamo_trio.frontend.realtime.passthrough import run_passthrough
from dynamo_trio.frontend.realtime.socket import LATER, LEFT, RESTART, Close, RealtimeSocket
from dynamo_trio.frontend.realtime.text import TextSession
from dynamo_trio.frontend.trace import note_session
from dynamo_trio.lifecycle import CutReason, Outcome
from dynamo_trio.wire.openai.realtime.events import ServerEvents
from dynamo_trio.wire.openai.realtime.selection import decode_event, event_id_of, selected_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.lifecycle import Admission
    from dynamo_trio.wire.openai.fields import Json

logger = logging.getLogger("dynamo_trio.frontend")

#: Seconds that stand for "no limit" in a notice.
FOR_EVER = 1e6


@attrs.define(eq=False)
class Session:
    """What the kinds of sessions share. ``run`` is called once."""

    id: str
    frontend: Frontend
    socket: RealtimeSocket
    admission: Admission
    outbox: Outbox = attrs.field(init=False)
    #: Writes the server's events, each with an id of its own.
    events: ServerEvents = attrs.field(init=False)
    #: Called synchronously when a drain begins: tell the client, and close if it is idle.
    on_drain: Callable[[], object] = attrs.field(init=False)
    #: Called synchronously when the reading has ended, however: end what else was begun.
    on_end: Callable[[], object] = attrs.field(init=False, default=lambda: None)
    #: Called synchronously when all is over: nothing of it is wanted any more.
    on_close: Callable[[], object] = attrs.field(init=False, default=lambda: None)
    #: What a client has to repeat elsewhere: the session's settings and its items.
    replay: Callable[[], tuple[dict[str, Json], Sequence[Json]]] = attrs.field(init=False)
    #: For what runs beside the reading. It is not cancelled by a cut.
    tasks: trio.Nursery = attrs.field(init=False)
    #: Around the reading: what :meth:`close` cancels.
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _close: Close | None = attrs.field(default=None, init=False)
    #: Nothing is under way that its end would interrupt.
    _idle: bool = attrs.field(default=True, init=False)
    #: So it was when it was cut.
    _cut_idle: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.outbox = Outbox(self.socket)
        self.events = ServerEvents(self.id.rpartition("_")[2])
        self.on_drain = self.restart  # no model yet: it is idle
        self.replay = lambda: ({"type": "realtime"}, [])

    async def run(self, model: ServedModel | None) -> None:
        """Serve the client until it leaves or the session is closed."""
        try:
            await self._run(model)
        finally:
            self.on_close()
            # These are circles, which would wait for the garbage collector.
            self.on_drain = self.on_end = self.on_close = lambda: None
            self.admission.on_cut.clear()

    async def _run(self, model: ServedModel | None) -> None:
        request_id.set(self.id)
        self.admission.on_cut.append(self._was_cut)
        self.set_idle()
        async with trio.open_nursery() as beside:
            beside.start_soon(self.socket.keep_asking)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                close = await self._attend(model)
                self.outbox.end()
            beside.cancel_scope.cancel("the session has ended")
        await self.socket.close(close)

    # --- for the kinds of sessions ------------------------------------------------------

    def error(
        self, exc: DynamoException, event_id: str | None = None, *, code: str | None = None
    ) -> None:
        """Tell the client of an error; the session goes on. See :meth:`ServerEvents.error`."""
        self.outbox.put(self.events.error(exc, event_id, code=code))

    def send(self, type: str, /, **fields: Json) -> None:
        """Send an event."""
        self.outbox.put(self.events.event(type, **fields))

    def tell_draining(self) -> None:
        """Send the notice, with the time that is left until the session is cut."""
        left = min(self.frontend.lifecycle.until_cut(), FOR_EVER)
        self.outbox.put(self.events.draining("draining", left, *self.replay()))

    def close(self, close: Close) -> None:
        """End the reading, and the session. The first call decides."""
        if self._close is None:
            self._close = close
            self._reading.cancel(close.reason)

    def restart(self, reason: str = "draining", code: int = RESTART) -> None:
        """Close with 1012 now, behind a last notice."""
        if self._close is None:
            self.outbox.put(self.events.draining(reason, 0.0, *self.replay()))
            self.close(Close(code, reason))

    def set_idle(self) -> None:
        """From now on its end interrupts nothing. Called anew, it has been idle since then."""
        self._idle = True
        self.socket.idle(self._make_room)

    def set_busy(self) -> None:
        """From now on its end would interrupt something."""
        self._idle = False
        self.socket.idle(None)

    def _was_cut(self) -> None:
        self._cut_idle = self._idle
        self.socket.hurry()

    def _make_room(self) -> None:
        """Every place is taken, and others want one."""
        self.socket.hurry()
        self.restart("overloaded", LATER)

    # --- its parts --------------------------------------------------------------------

    async def _attend(self, model: ServedModel | None) -> Close:
        """Read until the end, and let what was begun say how it ends."""
        try:
            async with trio.open_nursery() as self.tasks:
                watching = trio.CancelScope()
                self.tasks.start_soon(self._watch_drain, watching)
                with self.admission.scope, self._reading:
                    self.close(await self._serve(model))
                watching.cancel("the session has ended")
                self.on_end()
        except Exception:
            logger.exception("realtime session %s failed", self.id)
            self.error(Unknown("Internal server error."))
            return Close(1011, "internal error")
        reason = self.admission.reason
        if reason is not None and reason is not CutReason.CLIENT_LEFT:
            if self._cut_idle:
                self.admission.settle(Outcome.FINISHED)  # nothing was interrupted
            self.restart(reason.value)
        return self._close or LEFT

    async def _write(self) -> None:
        # A client that has closed the session hears no more; but what was begun may come to an end.
        if not await self.outbox.run() and self.socket.left_with is None:
            self.admission.cut(CutReason.CLIENT_LEFT)

    async def _watch_drain(self, scope: trio.CancelScope) -> None:
        with scope:
            await self.frontend.lifecycle.wait_stop_requested()
            self.on_drain()

    async def _serve(self, model: ServedModel | None) -> Close:
        first: str | None = None
        if model is None:
            self.send("session.created", session={"type": "realtime"})
            selected = await self._select()
            if selected is None:
                return LEFT
            model, first = selected
        if model.speaks_realtime:
            return await run_passthrough(self, model, first)
        text = TextSession(self, model)
        self.on_close = text.close
        try:
            return await text.run(first)
        finally:
            note_session(self._trouble(), model=model.name, request_id=self.id)

    def _trouble(self) -> str:
        """What has ended it but its client and itself, as Dynamo's label of a metric."""
        reason = self.admission.reason
        if reason is None or self._cut_idle:
            return ""
        return "cancelled" if reason is CutReason.CLIENT_LEFT else "unavailable"

    async def _select(self) -> tuple[ServedModel, str] | None:
        """Wait for the event that names a model: the model, and that frame; None: client left."""
        while (frame := await self.socket.receive()) is not None:
            event_id = None
            try:
                event = decode_event(frame)
                event_id = event_id_of(event)
                model = self._find(selected_model(event))
            except DynamoException as exc:
                self.error(exc, event_id)
                event, frame = {}, None  # they may be large, and the next may be long in coming
                await self.outbox.wait_room()
                continue
            assert isinstance(frame, str)
            return model, frame
        return None

    def _find(self, name: str) -> ServedModel:
        try:
            return self.frontend.find(name)
        except ModelNotFound:
            raise ModelNotFound(f"unknown model: {name[:200]}", param="session.model") from None
