"""docs/graceful-shutdown.md: what it says is held by tests that exist, and its tables are whole."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from docs._ext import stop_tables
from dynamo_trio.config import Config, Group
from dynamo_trio.config.later import VARIABLES
from dynamo_trio.config.option import options_of
from dynamo_trio.lifecycle import MOVES, Phase
from dynamo_trio.process import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "graceful-shutdown.md").read_text()
PROMISES = "## What NVIDIA's page promises"
#: A link to a test: its name, its file, and whether the page says that it takes minutes.
LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)( \(soak\))?")
NAMED = sorted({(file, name, bool(soak)) for name, file, soak in LINK.findall(PAGE)})
SOAK = "pytest.mark.soak"


@cache
def in_minutes(path: Path) -> dict[str, bool]:
    """Every test of a file, and whether it runs only when soak tests are asked for."""
    body = ast.parse(path.read_text()).body
    assigned = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in body
        if isinstance(node, ast.Assign)
    }
    marks = {SOAK} | {name for name, value in assigned.items() if value == SOAK}
    all_of_them = SOAK in assigned.get("pytestmark", "")
    return {
        node.name: all_of_them or any(ast.unparse(mark) in marks for mark in node.decorator_list)
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("file", "name", "soak"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str, soak: bool) -> None:
    assert (ROOT / file).exists(), f"{file} is not there"
    tests = in_minutes(ROOT / file)
    assert name in tests, f"{file} has no {name}"
    assert soak is tests[name], f"{name}: is it marked as soak there, and here?"


def test_each_promise_is_held_by_a_test() -> None:
    lines = PAGE.partition(PROMISES)[2].splitlines()
    rows = [line for line in lines if line.startswith("| ") and "held by" not in line]
    assert len(rows) > 20
    assert [row for row in rows if not LINK.search(row)] == []
    assert {name for name, *_ in LINK.findall(PAGE)} == set(
        re.findall(r"\btest_\w+\b(?!\.py)", PAGE)
    )


def test_the_drawing_shows_every_phase_and_move() -> None:
    drawing = stop_tables.diagram()
    assert [phase.name for phase in Phase if f">{phase.name}<" not in drawing] == []
    causes = [(ending, cause) for move in MOVES for ending, cause in move.when.items()]
    assert drawing.count('class="ending"') == len(causes)
    assert [cause for _, cause in causes if f">{cause}<" not in drawing] == []
    assert "\n\n" not in drawing  # or Markdown would take it for text


def test_the_table_of_variables_is_whole() -> None:
    table = stop_tables.settings()
    telling = re.compile("SHUTDOWN|GRACE|DRAIN|HEALTH|CANARY|FATAL|FAILOVER|LOSS")
    stop = {Group.STOP, Group.STOP_WORKER, Group.STOP_FRONTEND}
    missing = [
        option.env
        for option in options_of(Config).values()
        if option.env and (option.group in stop or telling.search(option.env))
        if f"| `{option.env}` |" not in table
    ]
    assert missing == []
    assert table.count("\n") > 20


def test_the_timetable_tells_each_program() -> None:
    head, _, *rows = stop_tables.timetable().splitlines()
    assert head.count("`dynamo_trio") == 3
    by_name = {row.split("|")[1].strip(): [c.strip() for c in row.split("|")[2:5]] for row in rows}
    assert by_name["drain"] == ["900", "", "900"]
    assert by_name["grace"] == ["5", "", ""]
    assert by_name["HTTP drain"] == ["", "5", "5"]


def test_the_page_names_every_exit_code() -> None:
    section = PAGE.partition("## Exit codes")[2].partition("## ")[0]
    assert [code for code in ExitCode if f"| {int(code)} |" not in section] == []


def test_the_page_names_no_variable_that_is_none() -> None:
    known = {option.env for option in options_of(Config).values()} | set(VARIABLES)
    assert set(re.findall(r"\bDYN_\w+", PAGE)) <= known
