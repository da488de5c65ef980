"""Does a request go on elsewhere when its stream ends badly, and how? A machine without I/O.

Theory of operation
-------------------
One :class:`Migration` follows one request through its *attempts*. An attempt is one instance,
with one stream or, once a request with several choices has moved, with a stream for each choice
that is not over. Who drives the machine tells it what happens::

    asks(instance)      about to send ``parts`` to it
    carry(item) / take(ids)   tokens that came, before they go to the OutputProcessor
    finish(index)       a choice is over: the worker said so, or the OutputProcessor did
    touch()             the client is about to see a piece of the answer
    stop()              the caller wants no more
    ended(error)        the attempt is over: -> GoOn, End or Done
    nobody(error)       there is no instance to go on with: -> End

An attempt with several streams ends with the first of them that fails: all are at the same
worker, so the driver closes the others and tells one end. None of the tokens that came is lost,
for the request that goes on is made of those that the machine was shown, and the next
attempt brings only new ones, so none comes twice.

Failures share one budget, whether the stream had begun or not; a planned hand-over spends nothing.
As long as the client has seen nothing, the budget is at least :data:`OTHERS`. No instance gets the
same request twice.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import attrs

from dynamo_trio.errors import (
    Cancelled,
    DynamoException,
    LocalProtocolError,
    NotReplayable,
    Overloaded,
    StreamIncomplete,
    Unanswered,
)
from dynamo_trio.migration.answer import AnswerSoFar, Part
from dynamo_trio.migration.decisions import (
    Decision,
    Done,
    End,
    GoOn,
    Move,
    MoveKind,
    MoveOutcome,
    Reason,
)
from dynamo_trio.migration.failures import is_planned, may_move
from dynamo_trio.migration.replay import UNDECLARED, Replay, needs
from dynamo_trio.wire.llm import FinishError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.llm import LLMEngineOutput, PreprocessedRequest

#: How many others are asked, whatever the limit, while the client has seen nothing.
OTHERS: Final = 3


@attrs.frozen
class MigrationLimits:
    """``limit``: attempts after the first that failures may cost (``--migration-limit``).

    ``max_seq_len``: a request that has more tokens, prompt and answer together, does not move any
    more when its worker fails (``--migration-max-seq-len``); None: no such limit.
    """

    limit: int = 0
    max_seq_len: int | None = None


class _State(Enum):
    WAITING = auto()  # for an instance
    RUNNING = auto()
    OVER = auto()


class Migration:
    """One request, from its first attempt to its end. ``declared``: see :mod:`.replay`."""

    def __init__(
        self,
        request: PreprocessedRequest,
        limits: MigrationLimits,
        declared: frozenset[Replay] = UNDECLARED,
    ) -> None:
        self._request, self._limits = request, limits
        self._answer = AnswerSoFar(request)
        self._missing = needs(request) - declared
        self._lacks_text = Replay.TEXT not in declared
        self._state = _State.WAITING
        self._stopped = self._touched = False
        #: Invariant: at most max(limit, OTHERS), and at most limit when a failure that is touched
        #: has been taken.
        self._spent = 0
        #: What to send now, or what was sent last.
        self.parts: tuple[Part, ...] = self._answer.parts()
        #: Invariant: nobody is in here twice.
        self.tried: list[int] = []
        #: Invariant: at most the last one has no outcome; when the request has ended, none.
        self.moves: list[Move] = []
        self._under_way: Move | None = None
        self._failure: DynamoException | None = None

    # --- what happens -------------------------------------------------------------------

    def asks(self, instance: int) -> None:
        """``parts`` are about to be sent to this instance.

        Raises:
            LocalProtocolError: it had the request before, or nothing is to be sent.
        """
        self._must_be(_State.WAITING)
        if instance in self.tried:
            raise LocalProtocolError(f"instance {instance:x} had this request before")
        self.tried.append(instance)
        self._state = _State.RUNNING
        if self._under_way is not None:
            self._under_way.to_instance = instance

    def take(self, token_ids: Sequence[int], index: int = 0) -> None:
        """New tokens of a choice, and nothing else."""
        self._must_be(_State.RUNNING)
        self._answer.take(token_ids, index)
        if token_ids and self._under_way is not None:
            self._close_move(MoveOutcome.SUCCESS)

    def carry(self, item: LLMEngineOutput, index: int | None = None) -> LLMEngineOutput:
        """An item of the part with this ``index``; returns it as if no other worker had been asked.

        Its index, its sum of log probabilities and its counts then are those of the whole answer.

        Raises:
            UnreadableItem: it belongs to a choice that there is not.
        """
        at = (item.index or 0) if index is None else index
        self.take(item.token_ids, at)
        carried = self._answer.carried(item, at)
        reason = item.finish_reason
        if reason is not None and not isinstance(reason, FinishError):
            self.finish(at)
        return carried

    def finish(self, index: int = 0) -> None:
        """A choice is over, and needs no more."""
        self._must_be(_State.RUNNING)
        self._answer.choice(index).over = True
        self._close_move(MoveOutcome.SUCCESS)

    def touch(self) -> None:
        """The client is about to see something of the answer, if it has not yet."""
        self._touched = True

    def stop(self) -> None:
        """The caller wants no more: what ends now has ended."""
        self._stopped = True

    # --- what is known ------------------------------------------------------------------

    @property
    def max_seq_len_exceeded(self) -> bool:
        """Has the request become too long to move? Once it is, it stays so."""
        limit = self._limits.max_seq_len
        return limit is not None and self._answer.longest > limit

    # --- what becomes of it -------------------------------------------------------------

    def ended(self, error: DynamoException | None) -> Decision:
        """The attempt is over. None: the worker said that it is whole."""
        self._must_be(_State.RUNNING)
        if self._answer.is_whole:
            return self._done()
        failure = error or StreamIncomplete("the answer broke off")
        self._failure = failure
        why = self._refusal(failure)
        if why is not None:
            return self._end(self._told(failure, why), why)
        return self._go_on(failure)

    def nobody(self, error: DynamoException) -> End:
        """Nobody is left to be asked, or has room; ``error`` says so. That is never retried."""
        self._must_be(_State.WAITING)
        if self._stopped:
            return self._end(self._told(error, Reason.STOPPED), Reason.STOPPED)
        told = error if self._failure is None else self._told(self._failure, Reason.NO_WORKER)
        return self._end(told, Reason.NO_WORKER)

    def _refusal(self, failure: DynamoException) -> Reason | None:
        """Why the request may not go on; in the order in which the rules count."""
        if self._stopped:
            return Reason.STOPPED
        if not may_move(failure):
            return Reason.NOT_MIGRATABLE
        if _is_pinned(self._request):
            return Reason.PINNED
        if not is_planned(failure) and (spent := self._spent_out()) is not None:
            return spent
        if self._touched and self._lost_by_replay():
            return Reason.NOT_REPLAYABLE
        return None

    def _spent_out(self) -> Reason | None:
        limit = self._limits.limit
        if not self._touched:
            limit = OTHERS if self.max_seq_len_exceeded else max(limit, OTHERS)
        elif limit and self.max_seq_len_exceeded:
            return Reason.MAX_SEQ_LEN
        return Reason.EXHAUSTED if self._spent >= limit else None

    def _lost_by_replay(self) -> frozenset[Replay]:
        """What the request needs to go on in its middle, and the engine has not declared."""
        answer = self._answer
        if answer.has_bare_text or (answer.has_text and self._lacks_text):
            return self._missing | {Replay.TEXT}
        return self._missing if answer.count else frozenset()

    def _go_on(self, failure: DynamoException) -> GoOn:
        self._close_move(MoveOutcome.FAILURE)
        self._under_way = move = self._move(failure)
        self.moves.append(move)
        self._spent += not move.planned
        afresh = not self._touched and (self._answer.count == 0 or bool(self._lost_by_replay()))
        if afresh:
            self._answer.forget()
        self.parts = self._answer.parts()
        self._state = _State.WAITING
        return GoOn(self.parts, frozenset(self.tried), afresh, move)

    def _move(self, failure: DynamoException) -> Move:
        return Move(
            kind=MoveKind.ONGOING_REQUEST if self._touched else MoveKind.NEW_REQUEST,
            reason=failure.reason,
            planned=is_planned(failure),
            attempt=len(self.tried),
            from_instance=self.tried[-1],
            tokens_completed=self._answer.count,
        )

    def _told(self, failure: DynamoException, why: Reason) -> DynamoException:
        """What the caller is told: the failure itself, unless more is known than it says."""
        if why is Reason.STOPPED:
            return _from(Cancelled("the caller wants no more of this answer"), failure)
        if why is Reason.NOT_REPLAYABLE:
            lost = ", ".join(sorted(self._lost_by_replay()))
            text = f"The answer broke off, and no other engine can go on with it ({lost})."
            return _from(NotReplayable(text), failure)
        if self._touched or not may_move(failure) or _is_busy(failure):
            return failure
        return _from(Unanswered(failure.message), failure)

    def _done(self) -> Done:
        self._over(MoveOutcome.SUCCESS)
        return Done()

    def _end(self, error: DynamoException, why: Reason) -> End:
        self._over(MoveOutcome.CANCELLED if why is Reason.STOPPED else MoveOutcome.FAILURE)
        instance = self.tried[-1] if self.tried else None
        delivered = self._answer.count if self._touched else 0
        return End(error, why, instance, delivered, self._failure)

    def _over(self, outcome: MoveOutcome) -> None:
        self._close_move(outcome)
        self._state = _State.OVER

    def _close_move(self, outcome: MoveOutcome) -> None:
        if self._under_way is not None:
            self._under_way.outcome = outcome
            self._under_way = None

    def _must_be(self, state: _State) -> None:
        if self._state is not state:
            raise LocalProtocolError(f"the request is {self._state.name}, not {state.name}")


def _is_pinned(request: PreprocessedRequest) -> bool:
    """Does it name its worker? Then it is for no other."""
    routing = request.routing
    if routing is None:
        return False
    named = (routing.backend_instance_id, routing.prefill_worker_id, routing.decode_worker_id)
    return any(isinstance(worker, int) for worker in named)


def _is_busy(failure: DynamoException) -> bool:
    """Such an error tells its client already that the same request may be sent again."""
    return failure.status == 503 or isinstance(failure, Overloaded)


def _from(error: DynamoException, cause: DynamoException) -> DynamoException:
    error.__cause__ = cause
    return error
