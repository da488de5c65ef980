"""The tables of errors, from the code. Tests read them, so that this module needs no Sphinx."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from docs._ext.stop_tables import table
from dynamo_trio import errors

if TYPE_CHECKING:
    from collections.abc import Iterator


def _first_line(thing: type) -> str:
    return (thing.__doc__ or "").splitlines()[0]


def _children(base: type[Exception]) -> Iterator[type[Exception]]:
    for child in vars(errors).values():
        if inspect.isclass(child) and issubclass(child, base) and child is not base:
            yield child


def request_errors() -> str:
    """Every error of a request, with what a client sees and whether it may move."""
    head = ("class", "status", "`type`", "reason", "retry", "another worker", "meaning")
    rows = (
        (
            f"{{py:class}}`~dynamo_trio.errors.{e.__name__}`",
            str(e.status),
            f"`{e.kind}`",
            f"`{e.reason}`",
            "yes" if e.retry else "no",
            "yes" if e.migratable else "no",
            _first_line(e),
        )
        for e in _children(errors.DynamoException)
        if issubclass(e, errors.DynamoException)
    )
    return table(head, rows)


def startup_errors() -> str:
    """Every error that ends a start, with its exit code."""
    rows = (
        (f"{{py:class}}`~dynamo_trio.errors.{e.__name__}`", str(e.exit_code), _first_line(e))
        for e in _children(errors.StartupError)
        if issubclass(e, errors.StartupError)
    )
    return table(("class", "exit code", "meaning"), rows)
