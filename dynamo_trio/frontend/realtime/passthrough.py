"""A session whose worker speaks the Realtime API's events itself.

Theory of operation
-------------------
Every event of the client goes to the worker as it is, and every event of the worker to the
client. One task (:class:`~.intake.Intake`) reads the socket into a bounded inbox; another sends
from there as the worker grants credit; the session's own task puts what the worker says into the
session's outbox, and reads on when the client has taken enough. So each side holds the other back.

A session belongs to a worker, but not for ever. When the worker leaves (its instance is gone from
discovery), or is lost, another one is sent what :class:`~.kept.Kept` has, and goes on; the client
does not notice. Where that cannot be done, a worker that leaves keeps the session, and the end of
one that is lost is told: a notice, and Close 1012.

For a drain of the frontend the session counts as busy: only the client and its worker know
whether it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.context import Context
from dynamo_trio.errors import (
    Cancelled,
    DynamoException,
    InvalidArgument,
    LocalProtocolError,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    RequestCut,
    ResponseTimeout,
    Unknown,
)
from dynamo_trio.frontend.metrics import error_type
from dynamo_trio.frontend.placement import OTHERS
from dynamo_trio.frontend.realtime.intake import BINARY, MALFORMED, Intake
from dynamo_trio.frontend.realtime.kept import Frame, Kept
from dynamo_trio.frontend.realtime.overheard import Overheard
from dynamo_trio.frontend.realtime.owed import Owed
from dynamo_trio.frontend.realtime.socket import LATER, LEFT, RESTART, Close
from dynamo_trio.frontend.trace import note_session
from dynamo_trio.lifecycle import CutReason, Outcome
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.openai.realtime.selection import event_id_of

if TYPE_CHECKING:
    from dynamo_trio.bidirectional import BidirectionalStream
    from dynamo_trio.discovery import Instance
    from dynamo_trio.frontend.admission import Admitted
    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.realtime.session import Session
    from dynamo_trio.wire.openai.fields import Json

logger = logging.getLogger("dynamo_trio.frontend")

#: Seconds that a worker has for its end when the client has closed the session.
CLOSE_DRAIN = 5.0
#: Seconds after which a worker that is lost was no mistake of the one who chose it.
PROVEN = 30.0

#: How Dynamo ends a session (RFC 6455, 7.4.1).
COMPLETE = Close(1000, "stream complete")


async def run_passthrough(session: Session, model: ServedModel, first: str | None) -> Close:
    """Hand every frame to a worker of the model, and what it says to the client.

    Runs inside the session's soft scope: a cut cancels it; the notice and Close 1012 are the
    session's.

    Args:
        first: the frame that selected the model, as it came; None when the URL did.

    Returns:
        How to close the socket.
    """
    return await PassThrough(session, model).run(first)


@attrs.define(eq=False)
class PassThrough:
    """One such session. ``run`` is called once."""

    _session: Session
    _model: ServedModel
    _kept: Kept = attrs.field(init=False)
    _owed: Owed = attrs.field(factory=Owed)
    _overheard: Overheard = attrs.field(init=False)
    _intake: Intake = attrs.field(init=False)
    #: The request, as it is counted.
    _admitted: Admitted = attrs.field(init=False)
    #: Around the exchange with workers; cancelled when ``_close`` is known.
    _talking: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _close: Close | None = None
    #: The client has left in good order when its worker owed it nothing; and then the worker has
    #: come to its end.
    _may_be_done: bool = False
    _done: bool = False
    #: Around that with one of them; cancelled to go on with another.
    _link: trio.CancelScope | None = None
    _moving: bool = False
    #: Why its link was cancelled, if it fell silent.
    _stall: ResponseTimeout | None = None
    #: The worker that has the session now, once it has accepted it.
    _stream: BidirectionalStream[Any] | None = None
    #: Ids of those that must not be asked: they have failed it since anything came of it.
    _tried: list[int] = attrs.field(factory=list)
    #: When the worker took it on, on Trio's clock; whether the client has heard from it.
    _since: float = 0.0
    _progress: bool = False
    # For the log.
    _worker: int = 0
    _events_in: int = 0
    _events_out: int = 0
    _moves: int = 0

    def __attrs_post_init__(self) -> None:
        self._kept = Kept(self._session.frontend.kept)
        self._overheard = Overheard(self._model.name)
        self._intake = Intake(self._session, self._kept, self)

    async def run(self, first: str | None) -> Close:
        """Serve until one of the sides ends it. ``first``: as in :func:`run_passthrough`."""
        if first is None:
            welcome: dict[str, Json] = {"type": "realtime", "model": self._model.name}
            self._session.send("session.created", session=welcome)
        try:
            with self._intake.watching():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._intake.run, first, self._model.name)
                    with self._talking:
                        close = await self._serve()
                        self._close = self._close or close
                    nursery.cancel_scope.cancel("the session is over")
        finally:
            self._kept.close()
        return self._close or LEFT

    # --- what its client does (see Reader) -------------------------------------------------

    def client_lost(self) -> None:
        if self._close is None and not self._session.socket.left_in_order:
            self._session.admission.cut(CutReason.CLIENT_LEFT)

    def client_failed(self, close: Close) -> None:
        self._close = close
        self._talking.cancel(close.reason)

    def client_left(self) -> None:
        self._close = LEFT
        in_order = self._session.socket.left_in_order and not self._intake.inbox.waiting
        self._may_be_done = in_order and self._owed.nothing
        if self._stream is None:
            self._talking.cancel("the client has left")
        else:  # the worker may come to an end
            self._stream.stop_generating()
            self._talking.deadline = trio.current_time() + CLOSE_DRAIN

    def worker_stalled(self, seconds: float) -> None:
        if self._link is not None:
            said = f"the worker took nothing, and said nothing, for {seconds:g} seconds"
            self._stall = ResponseTimeout(said)
            self._link.cancel(said)

    # --- one worker after the other -------------------------------------------------------

    async def _serve(self) -> Close:
        await self._intake.inbox.first()  # an idle client costs no worker anything
        self._session.set_busy()
        session, frontend = self._session, self._session.frontend
        session.on_drain = session.tell_draining
        session.replay = lambda: (self._kept.settings or {"type": "realtime"}, [])
        try:
            with frontend.admit(
                self._model, endpoint="realtime", request_type="stream", request_id=session.id
            ) as self._admitted:
                try:
                    return await self._talk()
                finally:
                    self._tell()
        except DynamoException as exc:  # nobody was asked
            note_session(error_type(exc), model=self._model.name)
            session.error(exc)
            return Close(LATER, exc.reason)

    async def _talk(self) -> Close:
        failure: DynamoException | None = None
        while True:
            try:
                instance = self._choose()
            except (NoWorker, Overloaded) as exc:
                return self._given_up(failure or exc)  # that nobody else is there is no reason
            failure = await self._with(instance)
            if self._close is not None:  # the client has left
                self._done = self._may_be_done and failure is None
                return self._close
            if self._moving:
                self._tried = [instance.instance_id]
            elif failure is None:
                self._admitted.record.error_type = ""
                return COMPLETE
            elif not self._may_move(failure):
                return self._failed(failure)
            self._moves += 1

    def _choose(self) -> Instance:
        """A worker; the model may have gone and come back since the last was chosen."""
        frontend = self._session.frontend
        model = frontend.find(self._model.name)
        if not model.speaks_realtime:
            raise NoWorker(f"model {model.name!r} is no longer served at /v1/realtime")
        self._model = model
        return frontend.choose(model, self._tried)

    def _may_move(self, failure: DynamoException) -> bool:
        """Is it for another worker to go on?"""
        if self._progress or trio.current_time() - self._since > PROVEN:
            self._tried = self._tried[-1:]  # it was no mistake to ask these
        return self._kept.movable and _is_gone(failure) and len(self._tried) <= OTHERS

    def _failed(self, failure: DynamoException) -> Close:
        """The worker, or the way to it, has failed the session, which ends with it."""
        if _is_gone(failure):
            return self._given_up(failure)
        self._settle(Outcome.FAILED, failure)
        self._session.error(failure if failure.status < 500 else Unknown("Internal server error."))
        return COMPLETE

    def _given_up(self, failure: DynamoException) -> Close:
        """There is no worker that could go on; other frontends may know one."""
        if not self._events_in:
            self._settle(Outcome.FAILED, failure)
            self._session.error(failure)
            return Close(LATER, failure.reason)
        self._settle(Outcome.CUT, failure)
        self._session.restart(failure.reason)
        return Close(RESTART, failure.reason)

    def _settle(self, outcome: Outcome, failure: DynamoException) -> None:
        if self._admitted.admission.settle(outcome):
            self._admitted.record.error_type = error_type(failure)

    def _tell(self) -> None:
        """One line for the operator, whatever became of it."""
        admission = self._session.admission
        if self._close in (BINARY, MALFORMED):
            self._settle(Outcome.FAILED, InvalidArgument(self._close.reason))
        elif self._done:
            self._admitted.record.error_type = ""
        elif admission.reason is CutReason.CLIENT_LEFT or self._close is LEFT:
            self._settle(Outcome.CANCELLED, Cancelled())
        elif admission.reason is not None:
            self._settle(Outcome.CUT, RequestCut())
        outcome = self._admitted.admission.outcome
        logger.info(
            "realtime session of %s by %x%s: %s, %d events in, %d out, %.2f s",
            *(self._model.name, self._worker),
            f", after {self._moves} other{'s' * (self._moves > 1)}" if self._moves else "",
            outcome.value if outcome else admission.reason or "complete",
            *(self._events_in, self._events_out, self._admitted.record.age()),
        )

    # --- one worker -----------------------------------------------------------------------

    async def _with(self, instance: Instance) -> DynamoException | None:
        """Let it have the session. Returns why it failed; None: it has ended, or we go on."""
        context = Context(self._session.id)
        opening = self._model.client.bidirectional(context, instance_id=instance.instance_id)
        self._worker = instance.instance_id
        self._tried.append(self._worker)
        self._admitted.record.asks(instance)
        self._moving, self._progress, self._since = False, False, trio.current_time()
        failure: DynamoException | None = None
        try:
            async with opening as self._stream, trio.open_nursery() as nursery:
                self._admitted.record.taken_on()
                self._link = nursery.cancel_scope
                nursery.start_soon(self._hand_on, self._stream)
                nursery.start_soon(self._watch_worker)
                failure = await self._listen(self._stream)
                nursery.cancel_scope.cancel("the worker has ended it")
        except DynamoException as exc:  # it has not accepted the session
            failure = exc
        finally:
            self._stream = self._link = None
            self._overheard.end("cancelled" if self._close is LEFT else "unavailable")
        stall, self._stall = self._stall, None
        return stall or failure

    async def _hand_on(self, stream: BidirectionalStream[Any]) -> None:
        """What the client sends, behind what the worker has missed."""
        try:
            for frame in self._kept.begin():
                await stream.send(frame.event)
            while (following := await self._intake.inbox.first()) is not None:
                await self._send(stream, following)
        except trio.BrokenResourceError:
            pass  # the worker's stream has ended: who listens to it hears why
        except trio.ClosedResourceError:
            pass  # the client has left

    async def _send(self, stream: BidirectionalStream[Any], frame: Frame) -> None:
        try:
            await stream.send(frame.event)
        except (LocalProtocolError, PayloadTooLarge) as exc:
            self._intake.inbox.taken()
            self._session.error(_public(exc), event_id_of(frame.event))
            return
        # Nothing is waited for since it was sent: so it is either there or here.
        self._intake.inbox.taken()
        self._kept.sent(frame)
        self._owed.sent(frame)
        self._events_in += 1

    async def _listen(self, stream: BidirectionalStream[Any]) -> DynamoException | None:
        try:
            async for item in stream:
                await self._said(item)
        except DynamoException as exc:
            return exc
        return None

    async def _said(self, item: object) -> None:
        """Pass on what the worker says, as fast as the client takes it."""
        self._intake.heard()
        try:
            if not isinstance(item, dict):
                raise LocalProtocolError("an event must be a map")
            text = JSON.encode(item).decode()
        except LocalProtocolError as exc:
            logger.warning("worker %x says what is no event: %s", self._worker, exc.message)
            self._session.error(Unknown("Internal server error."))
            return
        kind = item["type"] if isinstance(item.get("type"), str) else ""
        self._owed.heard(kind)
        self._overheard.heard(kind, item, self._worker)
        if self._kept.heard(kind):
            self._progress = True
            self._events_out += 1
            self._session.outbox.put(text)
            await self._session.outbox.wait_room()
        self._consider_moving()

    # --- moving on --------------------------------------------------------------------------

    async def _watch_worker(self) -> None:
        while True:
            self._consider_moving()
            await self._model.client.wait_changed()

    def _consider_moving(self) -> None:
        """Leave a worker that is to get no new sessions, if its part can be taken by another."""
        if self._link is not None and self._kept.movable and self._is_leaving():
            self._moving = True
            self._link.cancel("its worker leaves")

    def _is_leaving(self) -> bool:
        """Has the worker, and not every other, left discovery?"""
        if self._worker in self._model.client.instance_ids():
            return False
        try:
            self._session.frontend.choose(self._model, [self._worker])
        except (NoWorker, Overloaded):
            return False
        return True


def _is_gone(failure: DynamoException) -> bool:
    """Has the session lost its worker, rather than been failed by it?"""
    return failure.migratable or isinstance(failure, NoWorker | RequestCut)


def _public(exc: DynamoException) -> DynamoException:
    """Why an event of the client cannot be sent."""
    if isinstance(exc, PayloadTooLarge):
        return exc
    return InvalidArgument("the event holds a value that cannot be handed on")
