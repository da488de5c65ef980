"""What becomes of a request whose stream has ended, and what is counted of it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from dynamo_trio.errors import DynamoException
    from dynamo_trio.migration.answer import Part


class MoveKind(StrEnum):
    """Dynamo's values of the label ``migration_type``."""

    #: Its client has seen nothing of it.
    NEW_REQUEST = "new_request"
    #: Its client has seen a part of the answer.
    ONGOING_REQUEST = "ongoing_request"


class MoveOutcome(StrEnum):
    """Dynamo's values of the label ``outcome``."""

    #: The next worker has sent something.
    SUCCESS = "success"
    #: It has not, or there was none.
    FAILURE = "failure"
    #: The caller wanted no more before either was known.
    CANCELLED = "cancelled"


class Reason(StrEnum):
    """Why a request does not go on."""

    NOT_MIGRATABLE = "not_migratable"  # the failure is not one of the worker
    STOPPED = "stopped"  # whoever sent it wants no more
    PINNED = "pinned"  # it is for one worker and no other
    MAX_SEQ_LEN = "max_seq_len"
    EXHAUSTED = "exhausted"  # the retries are spent
    NOT_REPLAYABLE = "not_replayable"
    NO_WORKER = "no_worker"  # there is no other, or none with room


@attrs.define(eq=False)
class Move:
    """A request on its way from a worker that failed it, or handed it over, to the next."""

    kind: MoveKind
    #: The ``reason`` of the error that began it.
    reason: str
    planned: bool
    #: Number of the attempt that the move leads to; the first attempt of a request has number 0.
    attempt: int
    from_instance: int
    #: Tokens that had come by then, of all choices.
    tokens_completed: int
    #: None: nobody has it yet.
    to_instance: int | None = None
    #: Invariant: set once. None: it is not known yet.
    outcome: MoveOutcome | None = None


@attrs.frozen
class GoOn:
    """Send ``parts`` to an instance that is not in ``without``, all to the same one.

    ``afresh``: what has come is thrown away, and the answer begins anew with a new
    :class:`~dynamo_trio.tokenizers.OutputProcessor`. Otherwise the one at hand goes on: it holds
    half a character, the beginning of a stop string, and the counts.
    """

    parts: tuple[Part, ...]
    without: frozenset[int]
    afresh: bool
    move: Move


@attrs.frozen
class End:
    """The request has failed. ``error`` is what its caller is told."""

    error: DynamoException
    why: Reason
    #: Who had it last; None: nobody.
    instance: int | None
    #: How many tokens its client may have seen something of.
    tokens_delivered: int
    #: How the last stream ended; None: there was none.
    cause: DynamoException | None


@attrs.frozen
class Done:
    """All that was asked for is there, whatever the end of the stream looked like.

    A choice whose OutputProcessor has no finish reason yet gets one from its ``flush``.
    """


Decision = GoOn | End | Done
