"""Which failures of a worker let its request go elsewhere.

Theory of operation
-------------------
A class of :mod:`dynamo_trio.errors` says by ``migratable`` whether another worker may help. As in
Dynamo 1.5.1 that may stand anywhere in the chain of causes, and some classes, anywhere in it,
forbid it (:data:`FORBID`). The chain is what ``raise ... from`` has made; an error that only
happened while another one was handled (``__context__``) says nothing about the request.
Of a group of exceptions, the members count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynamo_trio.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoException,
    EngineShutdown,
    MessageTooLarge,
    NoWorker,
    UnreadableItem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The caller wants no more, or has no time left; there is nobody in the whole pool; and what cannot
#: be read, or is too long, would be so from another worker, too, though the broken rule of the
#: wire that led to it may be migratable.
FORBID: Final = (Cancelled, DeadlineExceeded, NoWorker, UnreadableItem, MessageTooLarge)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it; each once, even where the causes form a circle."""
    todo, seen = [error], set[int]()
    while todo:
        at = todo.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        yield at
        if at.__cause__ is not None:
            todo.append(at.__cause__)
        if isinstance(at, BaseExceptionGroup):
            todo.extend(reversed(at.exceptions))


def may_move(error: BaseException) -> bool:
    """Could another worker do better?"""
    causes = list(chain(error))
    if any(isinstance(cause, FORBID) for cause in causes):
        return False
    return any(isinstance(cause, DynamoException) and cause.migratable for cause in causes)


def is_planned(error: BaseException) -> bool:
    """Does a worker that stops hand the request over, before it has to?"""
    return any(isinstance(cause, EngineShutdown) and cause.planned for cause in chain(error))
