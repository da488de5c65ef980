"""Every kind of end that a stream can have, as the error that the plane tells its caller.

The rows are those of Dynamo 1.5.1's request plane (``docs/interop.md`` shows what NVIDIA's frontend
makes of them), and what only our own plane can say. The errors are made by the code that
reads the wire, where that can be had without a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from dynamo_trio.errors import (
    DynamoException,
    RemoteProtocolError,
    RequestCut,
    ResponseTimeout,
    UnreadableItem,
)
from dynamo_trio.wire.dynamo.ack import Ack
from dynamo_trio.wire.dynamo.ack import refused as refused_by_ack
from dynamo_trio.wire.dynamo.call_home_states import Phase, Refused, ending
from dynamo_trio.wire.dynamo.wire_errors import WireError, from_wire
from dynamo_trio.wire.llm import FinishError, LLMEngineOutput
from dynamo_trio.wire.mux.frames import Error
from dynamo_trio.wire.mux.told_errors import told
from tests.migration.simulated import Cut

if TYPE_CHECKING:
    from collections.abc import Callable


@attrs.frozen
class Kind:
    """``moves``: does the request go on? ``begun``: can it come behind the first item?"""

    name: str
    make: Callable[[], DynamoException | None]
    moves: bool
    begun: bool = True
    planned: bool = False
    #: In place of an error: an item that is one.
    item: LLMEngineOutput | None = None

    def cut(self, after: int) -> Cut:
        return Cut(after, self.make(), self.item)


def _item_error(error_type: Any) -> Callable[[], DynamoException]:
    return lambda: from_wire(WireError(error_type=error_type, message="why"))


def _backend(name: str) -> Callable[[], DynamoException]:
    return _item_error({"Backend": name})


def _prologue(error_type: Any) -> Callable[[], DynamoException | None]:
    typed = None if error_type is None else WireError(error_type=error_type, message="why")
    return lambda: ending(Phase.REFUSED, Refused("why", typed))


def _ack(text: str) -> Callable[[], DynamoException | None]:
    return lambda: refused_by_ack(Ack(text))


def _unreadable() -> DynamoException:
    """As the call home raises it: the cause is a class that may move, and it must not."""
    try:
        raise UnreadableItem("an item with nothing in it") from RemoteProtocolError("no envelope")
    except UnreadableItem as exc:
        return exc


def _mux(*kinds: str, planned: bool = False) -> Callable[[], DynamoException]:
    return lambda: told(Error(1, list(kinds), "why", True, planned, None))


YES, NO = True, False
#: Before the handler has begun.
UNBEGUN = (
    Kind("ack: overloaded", _ack("Server overloaded: full"), YES, begun=False),
    Kind("ack: draining", _ack("Server overloaded: draining"), YES, begun=False),
    Kind("ack: unavailable", _ack("Server unavailable: why"), NO, begun=False),
    Kind("ack: unknown endpoint", _ack("Unknown endpoint: x"), YES, begun=False),
    Kind("closes after the handshake", lambda: ending(Phase.GREETED), YES, begun=False),
    Kind("prologue: untyped", _prologue(None), YES, begun=False),
    Kind("prologue: shutdown", _prologue({"Backend": "EngineShutdown"}), YES, begun=False),
    Kind("prologue: overloaded", _prologue("WorkerOverloaded"), YES, begun=False),
    Kind("prologue: invalid", _prologue({"Backend": "InvalidArgument"}), NO, begun=False),
)
#: In the middle, behind any item, and behind all of them.
BEGUN = (
    Kind("FIN, reset, or a sentinel alone", lambda: ending(Phase.STREAMING), YES),
    Kind("complete_final without an end", lambda: ending(Phase.COMPLETE), YES),
    *(
        Kind(f"item: {name}", _item_error(name), YES)
        for name in ("Disconnected", "CannotConnect", "ConnectionTimeout", "ResponseTimeout")
    ),
    Kind("item: WorkerOverloaded", _item_error("WorkerOverloaded"), YES),
    Kind("item: Backend EngineShutdown", _backend("EngineShutdown"), YES),
    Kind("item: Backend StreamIncomplete", _backend("StreamIncomplete"), YES),
    Kind("item: Unknown", _item_error("Unknown"), NO),
    Kind("item: Cancelled", _item_error("Cancelled"), NO),
    *(
        Kind(f"item: Backend {name}", _backend(name), NO)
        for name in ("Cancelled", "Unknown", "InvalidArgument")
    ),
    Kind(
        "finish_reason error",
        lambda: None,
        NO,
        item=LLMEngineOutput(token_ids=[], finish_reason=FinishError("x")),
    ),
    Kind("unreadable item", _unreadable, NO),
    Kind("silence", lambda: ResponseTimeout("nothing for 5 s"), YES),
    Kind("mux: hand-over", _mux("EngineShutdown", planned=True), YES, planned=True),
    Kind("mux: shutdown limit", _mux("EngineShutdown"), YES),
    Kind("mux: cut", _mux(RequestCut.__name__), NO),
)
ALL = (*UNBEGUN, *BEGUN)
