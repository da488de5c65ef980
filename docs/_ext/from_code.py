"""``{from-code} NAME``: tables that are made from the code at build time, so they never age."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sphinx.util.docutils import SphinxDirective

from docs._ext import error_tables, stop_tables
from dynamo_trio.config import show
from dynamo_trio.lifecycle.phases import MOVES
from dynamo_trio.wire.mux import described

if TYPE_CHECKING:
    from collections.abc import Callable

    from docutils import nodes
    from sphinx.application import Sphinx


def phases() -> str:
    """The moves of the lifecycle."""
    rows = (
        (f"**{move.source.name}**", move.target.name, str(ending), cause)
        for move in MOVES
        for ending, cause in move.when.items()
    )
    return stop_tables.table(("phase", "next", "outcome", "because"), rows)


class FromCode(SphinxDirective):
    """Insert one of the tables above."""

    required_arguments = 1
    tables: ClassVar[dict[str, Callable[[], str]]] = {
        "settings": show.markdown,
        "request-errors": error_tables.request_errors,
        "startup-errors": error_tables.startup_errors,
        "phases": phases,
        "stop-diagram": stop_tables.diagram,
        "stop-timetable": stop_tables.timetable,
        "stop-settings": stop_tables.settings,
        "mux-frames": described.frames,
        "mux-goaway": described.go_away_codes,
        "mux-fixed-limits": described.fixed_limits,
        "mux-agreed-limits": described.agreed_limits,
        "mux-states": described.states,
        "mux-moves": described.moves,
        "mux-diagram": described.diagram,
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
