"""``{from-code} NAME``: tables that are made from the code at build time, so they never age."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar

from sphinx.util.docutils import SphinxDirective

from dynamo_trio import errors
from dynamo_trio.config import show
from dynamo_trio.lifecycle.phases import MOVES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from docutils import nodes
    from sphinx.application import Sphinx


def _first_line(thing: type) -> str:
    return (thing.__doc__ or "").splitlines()[0]


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in lines
    )


def _children(base: type[Exception]) -> Iterator[type[Exception]]:
    for child in vars(errors).values():
        if inspect.isclass(child) and issubclass(child, base) and child is not base:
            yield child


def request_errors() -> str:
    """Every error of a request, with what a client sees and whether it may move."""
    head = ("class", "status", "reason", "may go elsewhere", "meaning")
    rows = (
        (
            f"{{py:class}}`~dynamo_trio.errors.{e.__name__}`",
            str(e.status),
            f"`{e.reason}`",
            "yes" if e.migratable else "no",
            _first_line(e),
        )
        for e in _children(errors.DynamoException)
        if issubclass(e, errors.DynamoException)
    )
    return _table(head, rows)


def startup_errors() -> str:
    """Every error that ends a start, with its exit code."""
    rows = (
        (f"{{py:class}}`~dynamo_trio.errors.{e.__name__}`", str(e.exit_code), _first_line(e))
        for e in _children(errors.StartupError)
        if issubclass(e, errors.StartupError)
    )
    return _table(("class", "exit code", "meaning"), rows)


def phases() -> str:
    """The moves of the lifecycle."""
    rows = (
        (f"**{move.source.name}**", move.target.name, str(ending), cause)
        for move in MOVES
        for ending, cause in move.when.items()
    )
    return _table(("phase", "next", "outcome", "because"), rows)


class FromCode(SphinxDirective):
    """Insert one of the tables above."""

    required_arguments = 1
    tables: ClassVar[dict[str, Callable[[], str]]] = {
        "settings": show.markdown,
        "request-errors": request_errors,
        "startup-errors": startup_errors,
        "phases": phases,
    }

    def run(self) -> list[nodes.Node]:
        text = self.tables[self.arguments[0]]()
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def flatten_headings(app: Sphinx, what: str, name: str, obj: object, options: object,
                     lines: list[str]) -> None:  # fmt: skip
    """Headings in docstrings become rubrics: several modules may have the same one."""
    for at in range(len(lines) - 1, 0, -1):
        if lines[at] and set(lines[at]) == {"-"} and len(lines[at]) == len(lines[at - 1]):
            lines[at - 1 : at + 1] = [f".. rubric:: {lines[at - 1]}", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("from-code", FromCode)
    app.connect("autodoc-process-docstring", flatten_headings)
    return {"parallel_read_safe": True}
