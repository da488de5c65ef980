"""Errors as they travel: a class by name, a message, and what caused it.

Theory of operation
-------------------
Dynamo names a class of its runtime by a string and one of an engine by
``{"Backend": name}``, and decides by the class alone whether a request moves to another
worker. Our classes are finer, so each travels as the nearest that the real frontend knows
and treats alike (:data:`_SPELLED`), and comes back as ours (:data:`_KNOWN`). A name that is
not known is read as :class:`~dynamo_trio.errors.Unknown`, which stays where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dynamo_trio.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    Draining,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    NoWorker,
    Overloaded,
    RemoteProtocolError,
    StreamIncomplete,
    Unknown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Characters of a message that are sent. Some engines put whole tracebacks into theirs.
MAX_ERROR_TEXT = 16 * 2**10

_BACKEND = "Backend"


class WireError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on its way."""

    error_type: str | dict[str, str]
    message: str = msgspec.field(default_factory=str)
    caused_by: WireError | None = None

    @property
    def name(self) -> str:
        """The class's name, whether of the runtime or of an engine."""
        if isinstance(self.error_type, str):
            return self.error_type
        return self.error_type.get(_BACKEND, "")


def _backend(name: str) -> dict[str, str]:
    return {_BACKEND: name}


#: The first class that fits counts.
_SPELLED: tuple[tuple[type[DynamoException], str | dict[str, str]], ...] = (
    (InvalidArgument, _backend("InvalidArgument")),
    # What a worker cannot read, the sender has spelled wrongly: no other worker could either.
    (RemoteProtocolError, _backend("InvalidArgument")),
    (Cancelled, _backend("Cancelled")),
    (EngineShutdown, _backend("EngineShutdown")),
    (Draining, _backend("EngineShutdown")),
    (StreamIncomplete, _backend("StreamIncomplete")),
    (Overloaded, "WorkerOverloaded"),
    (CannotConnect, "CannotConnect"),
    (Disconnected, "Disconnected"),
    (ConnectionTimeout, "ConnectionTimeout"),
)
_UNSPELLED = _backend("Unknown")

_KNOWN: Mapping[str, type[DynamoException]] = {
    "InvalidArgument": InvalidArgument,
    "CannotConnect": CannotConnect,
    "Disconnected": Disconnected,
    "ConnectionTimeout": ConnectionTimeout,
    "ResponseTimeout": ConnectionTimeout,
    "Cancelled": Cancelled,
    "WorkerOverloaded": Overloaded,
    "Unavailable": NoWorker,
    "EngineShutdown": EngineShutdown,
    "StreamIncomplete": StreamIncomplete,
}


def to_wire(error: BaseException) -> WireError:
    """How an error leaves this process. One that is not ours keeps its class in the message."""
    if not isinstance(error, DynamoException):
        return WireError(error_type=_UNSPELLED, message=_text(f"{type(error).__name__}: {error}"))
    fitting = (spelled for kind, spelled in _SPELLED if isinstance(error, kind))
    return WireError(error_type=next(fitting, _UNSPELLED), message=_text(error.message))


def from_wire(error: WireError) -> DynamoException:
    """The exception that an error of a peer becomes here."""
    return _KNOWN.get(error.name, Unknown)(error.message)


def _text(message: str) -> str:
    # A message may quote anything; a lone surrogate in it could not be spelled.
    return message[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode()
