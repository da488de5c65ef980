"""Errors between dynamo_trio peers: each arrives as the class that it was.

Theory of operation
-------------------
A class travels as its name followed by those of its bases, so that a peer of another
version takes the nearest that it knows. Three kinds change on the way:

* what a worker could not *read* is an invalid request to who sent it, as on Dynamo's plane:
  no other worker could read it either;
* that a worker's own plane has no connection (``NotConnected``) says nothing about the
  connection over which the error comes;
* what is not ours is ``Unknown``, and keeps its class in the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio import errors
from dynamo_trio.errors import DynamoException, EngineShutdown, InvalidArgument, Unknown
from dynamo_trio.wire.dynamo.wire_errors import MAX_ERROR_TEXT
from dynamo_trio.wire.mux.frames import Error
from dynamo_trio.wire.mux.limits import MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def _travels(thing: object) -> bool:
    if not isinstance(thing, type) or not issubclass(thing, DynamoException):
        return False
    return not issubclass(thing, (errors.ProtocolError, errors.NotConnected))


_KNOWN: Mapping[str, type[DynamoException]] = {
    name: thing for name, thing in vars(errors).items() if _travels(thing)
}
_ANY = DynamoException.__name__


def tell(sid: int, error: BaseException, *, begun: bool) -> Error:
    """The frame that tells this error."""
    ours = isinstance(error, DynamoException)
    message = error.message if isinstance(error, DynamoException) else _foreign(error)
    return Error(
        sid,
        list(_names(error)) if ours else [Unknown.__name__, _ANY],
        _cut(message, MAX_ERROR_TEXT),
        begun,
        isinstance(error, EngineShutdown) and error.planned,
        _param(error),
    )


def told(frame: Error) -> DynamoException:
    """The exception that a peer's error becomes here."""
    kind = next((_KNOWN[name] for name in frame.kinds if name in _KNOWN), Unknown)
    if kind is DynamoException:
        kind = Unknown
    if issubclass(kind, InvalidArgument):
        return kind(frame.message, param=frame.param)
    if issubclass(kind, EngineShutdown):
        return kind(frame.message, planned=frame.planned)
    return kind(frame.message)


def _names(error: BaseException) -> Iterator[str]:
    if isinstance(error, errors.RemoteProtocolError):
        yield InvalidArgument.__name__
    for kind in type(error).__mro__:
        if _KNOWN.get(kind.__name__) is kind:
            yield kind.__name__


def _param(error: BaseException) -> str | None:
    param = error.param if isinstance(error, InvalidArgument) else None
    return None if param is None else _cut(param, MAX_TEXT)


def _foreign(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cut(text: str, limit: int) -> str:
    # In bytes, for it must fit a frame; it may quote anything, a lone surrogate too.
    return text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
