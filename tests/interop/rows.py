"""What a worker can do to a request, and what NVIDIA's frontend 1.5.1 makes of it.

``docs/interop.md`` shows these rows as its tables, and a test compares the two.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any

import attrs

from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.call_home_states import CompleteFinal, Item, Refused, Sentinel
from dynamo_trio.wire.dynamo.wire_errors import WireError
from tests.interop.scripted_worker import CLOSE, SILENCE, Answer, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many letters are sent before something goes wrong, of 8.
BEFORE = 3
#: How long a worker leaves a connection open for nothing, in seconds.
LEFT_OPEN = 1.0


class Moves(enum.Enum):
    """What the frontend does when there is another worker and it may migrate."""

    WHOLE = "no need"  # there is no need: the answer is whole
    YES = "yes"
    NO = "no"
    LATE = "when the key goes"  # it hangs until the instance leaves discovery


@attrs.frozen
class Row:
    """One row. ``stream`` and ``unary``: what the caller sees if the frontend may not migrate.

    An HTTP status, or for a stream that has begun ``ok`` or ``error chunk``.
    """

    name: str
    fault: Fault
    moves: Moves
    stream: str
    unary: str
    #: Nobody listens where the instance says.
    dead: bool = False
    #: Tokens that come before something goes wrong.
    before: int = BEFORE
    #: Tokens that the second worker is asked for, if it is asked.
    rest: int = 8
    #: The status of a further request right after, with no other worker: 503 if this one gets
    #: nothing for 5 s, 529 if it counts as busy.
    after: int = attrs.field()

    @after.default
    def _after_default(self) -> int:
        return 503 if self.moves is Moves.YES else 200

    @property
    def hangs(self) -> bool:
        return self.moves is Moves.LATE

    @property
    def cells(self) -> str:
        """The end of its line in the table."""
        after = "-" if self.hangs else f"{self.after}"
        return f"| {self.moves.value} | {self.stream} | {self.unary} | {after} |"


# --- faults --------------------------------------------------------------------------------------


def _plays(*steps: Callable[[Answer], object]) -> Fault:
    def script(answer: Answer) -> None:
        for step in steps:
            step(answer)

    return Fault(answer=script)


def _some(answer: Answer) -> None:
    answer.begin()
    answer.letters(BEFORE)


def _all(answer: Answer) -> None:
    answer.begin()
    answer.letters()
    answer.finish()


def _complete(answer: Answer) -> None:
    answer.say(CompleteFinal())


def _sentinel(answer: Answer) -> None:
    answer.say(Sentinel())
    answer.wait_gone()


def _stay_open(_answer: Answer) -> None:
    time.sleep(LEFT_OPEN)


def _end(answer: Answer) -> None:
    _complete(answer)
    _sentinel(answer)


def _finish(reason: object) -> Callable[[Answer], None]:
    return lambda answer: answer.finish(reason)


def _refuse(error_type: Any) -> Fault:
    def refuse(answer: Answer) -> None:
        typed = None if error_type is None else WireError(error_type=error_type, message="why")
        answer.say(Refused("why", typed))
        answer.wait_gone()

    return _plays(Answer.greet, refuse)


def _error(error_type: Any) -> Callable[[Answer], None]:
    item = {"event": "error", "error": {"error_type": error_type, "message": "why"}}
    return lambda answer: answer.say(Item(answer.codec.encode(item)))


def _no_data(answer: Answer) -> None:
    answer.socket.sendall(two_part.encode(data=answer.codec.encode({"complete_final": False})))


def _no_token_ids(answer: Answer) -> None:
    answer.item({"text": "x"})


def _bare_token(answer: Answer) -> None:
    answer.bare({"token_ids": [answer.vocabulary["z"]]})


# --- the tables ----------------------------------------------------------------------------------

YES, NO = Moves.YES, Moves.NO  # short, since they stand in every line
CHUNK = "error chunk"

ACKS = [
    Row("empty", Fault(answer=Answer.well), Moves.WHOLE, "ok", "200"),
    Row("`Server overloaded: …`", Fault("Server overloaded: why"), YES, "529", "529", after=529),
    Row("`Server unavailable: …`", Fault("Server unavailable: why"), NO, "503", "503"),
    Row(
        "any other text",
        Fault("Unknown endpoint: 1/generate"),
        *(Moves.LATE, "hangs", "hangs"),
    ),
    Row("closed before it", Fault(CLOSE), YES, "500", "500"),
    Row("nothing for 5 s", Fault(SILENCE), YES, "500", "500"),
    Row("connection refused", Fault(answer=Answer.well), YES, "500", "500", dead=True),
]

_UNBEGUN = [
    Row("never calls home", Fault(), Moves.LATE, "hangs", "hangs"),
    Row("closes after the handshake", _plays(Answer.greet), YES, "500", "500"),
    Row("error prologue, untyped", _refuse(None), YES, "500", "500"),
    Row("error prologue `WorkerOverloaded`", _refuse("WorkerOverloaded"), YES, "529", "529"),
    Row(
        "error prologue `EngineShutdown`",
        _refuse({"Backend": "EngineShutdown"}),
        *(YES, "500", "500"),
    ),
    Row(
        "error prologue `InvalidArgument`",
        _refuse({"Backend": "InvalidArgument"}),
        *(YES, "400", "400"),
    ),
]

_WHOLE = [
    Row("complete_final, sentinel", _plays(_all, _end), Moves.WHOLE, "ok", "200"),
    Row("complete_final, FIN", _plays(_all, _complete), Moves.WHOLE, "ok", "200"),
    Row(
        "complete_final, left open",
        _plays(_all, _complete, _stay_open),
        *(Moves.WHOLE, "ok", "200"),
    ),
]

_CUT = [
    Row("FIN mid-stream", _plays(_some), YES, CHUNK, "500", rest=5),
    Row("RST mid-stream", _plays(_some, Answer.reset), YES, CHUNK, "500", rest=5),
    Row("sentinel, no complete_final", _plays(_some, _sentinel), YES, CHUNK, "500", rest=5),
    Row("all tokens, no complete_final", _plays(_all, _sentinel), YES, CHUNK, "500", rest=0),
]

_MIGRATABLE: list[Any] = [
    *("Disconnected", "CannotConnect", "ConnectionTimeout", "ResponseTimeout"),
    *({"Backend": name} for name in ("EngineShutdown", "StreamIncomplete")),
]
_FINAL: list[Any] = [
    *("Unknown", "Cancelled", "InvalidArgument"),
    *({"Backend": name} for name in ("Unknown", "Cancelled", "InvalidArgument")),
]


def _error_row(error_type: Any, moves: Moves, **more: Any) -> Row:
    is_engines = isinstance(error_type, dict)
    name = f"Backend {error_type['Backend']}" if is_engines else error_type
    fault = _plays(_some, _error(error_type), _end)
    return Row(f"error item `{name}`", fault, moves, CHUNK, "500", rest=5, **more)


_ERRORS = [
    *(_error_row(error_type, YES) for error_type in _MIGRATABLE),
    _error_row("WorkerOverloaded", YES, after=200),
    *(_error_row(error_type, NO) for error_type in _FINAL),
    Row(
        "error item `Backend InvalidArgument` first",
        _plays(Answer.begin, _error({"Backend": "InvalidArgument"}), _end),
        *(NO, CHUNK, "400"),
        before=0,
    ),
    Row(
        "error item `Backend Unknown` first",
        _plays(Answer.begin, _error({"Backend": "Unknown"}), _end),
        *(NO, CHUNK, "500"),
        before=0,
    ),
]

_STRANGE = [
    Row(
        'finish_reason `{"error":"x"}`',
        _plays(_some, _finish({"error": "x"}), _end),
        NO,
        CHUNK,
        "500",
    ),
    Row("finish_reason `cancelled`", _plays(_some, _finish("cancelled"), _end), NO, "ok", "200"),
    Row("unknown finish_reason", _plays(_some, _finish("tool_calls"), _end), NO, CHUNK, "500"),
    Row("item without data", _plays(_some, _no_data, _finish("length"), _end), NO, CHUNK, "500"),
    Row("no token_ids", _plays(_some, _no_token_ids, _finish("length"), _end), NO, CHUNK, "500"),
    Row(
        "item without its inner `data`",
        _plays(Answer.begin, _bare_token, Answer.letters, Answer.finish, _end),
        *(Moves.WHOLE, "ok", "200"),
    ),
]

ANSWERS = [*_UNBEGUN, *_WHOLE, *_CUT, *_ERRORS, *_STRANGE]
