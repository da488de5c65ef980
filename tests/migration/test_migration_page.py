"""docs/explanation/migration.md: its table of ends is what the tests do, its names the code's."""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_trio.migration import DECLARED, Replay
from tests.migration.ends import ALL, Kind

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "migration.md").read_text()


def row(kind: Kind) -> str:
    """The line of the table for one kind of end."""
    error = kind.make()
    name = "Unknown" if kind.item else "none" if error is None else type(error).__name__
    done = "goes on" if kind.moves else "ends"
    return f"| {kind.name} | `{name}` | {done}{', and spends nothing' if kind.planned else ''} |"


def rows_below(head: str) -> list[str]:
    _, _, rest = PAGE.partition(head)
    table = rest.partition("\n\n")[0]
    return [line for line in table.splitlines() if line.startswith("| ")]


def test_the_table_of_ends_is_what_the_tests_do() -> None:
    assert rows_below("| end of the stream | error | what is done |\n") == [
        row(kind) for kind in ALL
    ]


def test_every_capability_is_told_of() -> None:
    rows = rows_below("| name | a request needs it if it has | what the engine promises |\n")
    names = [re.match(r"\| `(\w+)` ", line) for line in rows]
    assert [name and name.group(1) for name in names] == list(Replay)


def test_the_page_says_what_our_engines_declare() -> None:
    assert DECLARED["sim"] == {Replay.STOP_STRINGS, Replay.SEED}
    assert DECLARED["llama"] == {Replay.STOP_STRINGS}
    assert "simulated engine declares `stop_strings` and `seed`, llama.cpp `stop_strings`" in PAGE


def test_the_first_sentence_says_that_nothing_uses_it_yet() -> None:
    assert PAGE.startswith("# Migration\n\nThe programs do not use what this page describes yet")
