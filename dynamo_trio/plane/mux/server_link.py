"""A worker's connection to one client: requests in, answers out, and what the client is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Cancelled, Overloaded
from dynamo_trio.lifecycle.prospects import Peer
from dynamo_trio.plane.abc import INITIAL_CREDIT, AcceptedCall, Outbox, RequestHead
from dynamo_trio.plane.mux.allowance import REQUEST_RATE, Allowance
from dynamo_trio.plane.mux.answer import Answer
from dynamo_trio.plane.mux.heartbeat import Heartbeat
from dynamo_trio.plane.mux.link import Link
from dynamo_trio.plane.mux.starving import MAX_STARVED, Starving
from dynamo_trio.plane.mux.unread import Share
from dynamo_trio.wire.mux.events import (
    CreditReceived,
    DrainAcknowledged,
    Established,
    InputFinished,
    ItemReceived,
    StreamCancelled,
    StreamOpened,
    StreamStopped,
)
from dynamo_trio.wire.mux.limits import MAX_PATHS, MuxLimits
from dynamo_trio.wire.mux.worker_connection import WorkerConnection
from dynamo_trio.wire.trace import out_of_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.mux.events import MuxEvent

logger = logging.getLogger("dynamo_trio.plane.mux")

#: Finds the endpoint of a request and lets it decide; raises its refusal, a DynamoException.
Accept = Callable[[str, RequestHead, bytes, Outbox], AcceptedCall]


@attrs.define(eq=False)
class ServerLink(Link):
    """``accept`` decides on each request; it is called in the order in which they came."""

    _accept: Accept = attrs.field(kw_only=True)
    #: Told when the client has shown that it is one, when it has acknowledged a notice, and when
    #: ``arriving`` has changed.
    _on_established: Callable[[ServerLink], object] = attrs.field(kw_only=True)
    _on_acknowledged: Callable[[], object] = attrs.field(kw_only=True)
    _on_arriving: Callable[[ServerLink], object] = attrs.field(kw_only=True)
    #: What tells this process from others.
    _own_process: str = attrs.field(kw_only=True)
    #: Its process has connected anew, and sends nothing over this any more.
    superseded: bool = False
    _wire: WorkerConnection = attrs.field(init=False)
    #: Invariant: a call is in here from its request until it has ended; and from then on in the
    #: second until all of it has left.
    _answers: dict[int, Answer] = attrs.field(factory=dict)
    _departing: dict[int, Answer] = attrs.field(factory=dict)
    #: The last notice that it was given, and that it has acknowledged.
    _notice: int = 0
    _acknowledged: int = 0
    _starving: Starving = attrs.field(factory=Starving)
    #: For requests of which nothing is answered.
    _requests: Allowance = attrs.field(init=False)
    #: The client, and how many of its streams it can place on other workers.
    client: Peer = attrs.field(factory=Peer)

    def __attrs_post_init__(self) -> None:
        limits = MuxLimits(
            max_streams=self.settings.max_streams, max_message=self.settings.max_message
        )
        self._wire = WorkerConnection(limits, process=self._own_process)
        self._requests = Allowance(trio.current_time(), REQUEST_RATE)
        super().__attrs_post_init__()

    @property
    def wire(self) -> WorkerConnection:
        return self._wire

    @property
    def _hello_time(self) -> float:
        return self.settings.handshake_time

    def _make_pulse(self) -> Heartbeat:
        # A worker that nobody asks for anything has no need to know that a client hangs; only
        # for ever must it not keep what it holds for one.
        half = self.settings.stall_time / 2
        return Heartbeat(half, self.settings.stall_time, trio.current_time())

    def _is_flooded(self, now: float) -> bool:
        return super()._is_flooded(now) or not self._requests.spend(self._wire.fruitless, now)

    # --- what the worker says -----------------------------------------------------------------

    def drain(self, paths: Sequence[str]) -> None:
        """Ask for no new requests to these paths."""
        if not self.over:
            for some in _pieces(paths):
                self._notice += 1
                self._wire.drain(self._notice, some)
            self.look()

    def serve_again(self, paths: Sequence[str]) -> None:
        """These paths take requests again."""
        if not self.over:
            for some in _pieces(paths):
                self._wire.serve_again(some)
            self.look()

    @property
    def has_acknowledged(self) -> bool:
        """Does nothing new come over this? The client has said that it obeys all that it was
        told, or left in good order, or has connected anew."""
        obeys = self._acknowledged >= self._notice
        return obeys or self.superseded or self.gone_away is not None

    @property
    def has_last_words(self) -> bool:
        """Is there something finished that has not left yet?"""
        held = self._wire.streams > len(self._answers)  # for want of credit
        return not self.over and (held or self._wire.wants_to_send)

    def finish(self, answer: Answer, error: DynamoException | None, *, begun: bool) -> None:
        """A call has ended."""
        self._answers.pop(answer.sid, None)
        if self.over:
            return
        if answer.delivered is None:
            self._departing[answer.sid] = answer
        if error is None:
            self._wire.finish(answer.sid)
        else:
            self._wire.fail(answer.sid, error, begun=begun)
        self.look()

    def recall(self, answer: Answer, error: DynamoException) -> bool:
        """End in this error what was finished, if it waits for credit."""
        if self.over or not self._wire.recall(answer.sid, error):
            return False
        self.look()
        return True

    def _ends_sent(self, sids: Sequence[int]) -> None:
        for sid in sids:
            if (answer := self._departing.pop(sid, None)) is not None:
                answer.left()

    # --- what the client says -----------------------------------------------------------------

    def _take(self, event: MuxEvent) -> None:
        match event:
            case CreditReceived():
                for sid in event.sids:
                    if (answer := self._answers.get(sid)) is not None:
                        answer.wake()
            case StreamOpened():
                self._open(event)
            case ItemReceived():
                if (answer := self._answers.get(event.sid)) is not None:
                    self._feed(answer, event.payload)
            case InputFinished():
                if (answer := self._answers.get(event.sid)) is not None:
                    answer.call.finish_input(None)
            case StreamStopped():
                if (answer := self._answers.get(event.sid)) is not None:
                    answer.call.stop()
            case StreamCancelled():
                self._lose(event.sid)
            case DrainAcknowledged():
                self._acknowledged = event.notice
                self.client.renew(event.places)
                self._on_acknowledged()
            case Established():
                self._on_established(self)
                logger.debug(
                    "%s is connected, a %s (process %s)",
                    *(self.peer, event.software, event.process or "unknown"),
                )

    def _open(self, opened: StreamOpened) -> None:
        headers, metadata = out_of_metadata(opened.metadata)
        head = RequestHead(
            opened.request_id,
            metadata,
            opened.codec,
            opened.sent_at_ns,
            opened.streams_in,
            headers=headers,
        )
        answer = Answer(opened.sid, self, Share(self.unread))
        try:
            if opened.payload and not answer.share.item(len(opened.payload)):
                raise Overloaded("The requests of this connection take too much memory.")
            answer.call = self._accept(opened.path, head, opened.payload, answer)
        except Exception as exc:
            answer.share.clear()
            self._wire.fail(opened.sid, exc, begun=False)
            return
        self._answers[opened.sid] = answer
        self._wire.accept(opened.sid, INITIAL_CREDIT if opened.streams_in else 0)

    def _feed(self, answer: Answer, payload: bytes) -> None:
        if answer.share.item(len(payload)):
            answer.call.feed((payload,))
        else:
            text = "what it has sent and nobody has read is too much"
            self._give_up(answer.sid, Overloaded(text))

    # --- streams that are given up ------------------------------------------------------------

    def _end_starving(self) -> None:
        lacking = dict(self._wire.lacking_credit())
        for sid, answer in self._answers.items():
            given = self._wire.credit_given(sid) if answer.is_held_back else None
            if given is not None:
                lacking[sid] = given
        starving = self._starving.look(lacking, self._wire.grants)
        text = f"nothing of the answer was taken for {self.settings.stall_time:g} s"
        for sid in starving:
            self._give_up(sid, Cancelled(text))
        if starving and self._starving.starved >= MAX_STARVED:
            self.cut(f"it takes nothing of {self._starving.starved} answers in a row")
        self.look()

    def _give_up(self, sid: int, error: DynamoException) -> None:
        """End a stream, whether its call still runs or not."""
        self._complaints.given_up(self.peer, error.message)
        self._wire.give_up(sid, error)
        self._lose(sid)

    def _lose(self, sid: int) -> None:
        """The client of a stream has left."""
        answer = self._answers.get(sid) or self._departing.pop(sid, None)
        if answer is not None:
            answer.leave()

    def _look_arriving(self) -> None:
        self._on_arriving(self)

    def _close_streams(self) -> None:
        answers = [*self._answers.values(), *self._departing.values()]
        self._answers, self._departing = {}, {}
        for answer in answers:
            try:
                answer.leave()
            except Exception:
                logger.exception("a call could not be cancelled")

    def _credit_returns(self) -> None:
        for answer in list(self._answers.values()):
            answer.wake()

    def _peer_is_silent(self) -> None:
        """It is given up later, and gets what there is until then."""


def _pieces(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(paths), MAX_PATHS):
        yield paths[start : start + MAX_PATHS]
