"""The benchmark of the planes still runs; its figures are nobody's business here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.planes import Plan, read_plan, run, table

if TYPE_CHECKING:
    from pathlib import Path


def test_a_small_run_gives_every_figure() -> None:
    plan = Plan(
        planes=("tcp", "mux"),
        streams=(2,),
        tokens=4,
        rounds=1,
        step_ms=50.0,
        open_streams=2,
        http=True,
        idle_step=0.05,
    )
    said: list[str] = []
    result = run(plan, said.append)
    costs, sizes = result["cpu_us_per_token"], result["bytes_per_open_stream"]
    for plane in plan.planes:
        assert {(e["load"], e["process"]) for e in costs if e["plane"] == plane} == {
            *(("client", "client"), ("client", "worker")),
            *(("http", "frontend"), ("http", "worker")),
        }
        assert {(e["load"], e["process"]) for e in sizes if e["plane"] == plane} == {
            *(("client", "client"), ("client", "worker"), ("http", "frontend")),
        }
    assert all(entry["median"] > 0 for entry in costs)
    assert said[0] == "round 0 of 1"
    lines = table(plan, json.loads(json.dumps(result))).splitlines()
    assert lines[0].split() == ["CPU", "us", "per", "token", "tcp", "mux"]
    assert len(lines) == 1 + 4 + 1 + 1 + 3


def test_memory_alone_has_one_table() -> None:
    plan = Plan(("mux",), (1,), 4, 0, 50.0, 2, http=False, idle_step=0.05)
    result = run(plan, lambda words: None)
    assert result["cpu_us_per_token"] == []
    lines = table(plan, result).splitlines()
    assert lines[0].split() == ["KiB", "per", "open", "stream", "mux"]
    assert len(lines) == 1 + 2


def test_the_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_plan(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"(default: {value})" in said for value in ("[32, 128]", 128, 5, 10.0, 1000))


def test_the_command_line_compares_both_planes(tmp_path: Path) -> None:
    plan, file = read_plan(["--json", str(tmp_path / "out.json"), "--rounds", "3"])
    assert (plan.streams, plan.tokens, plan.step_ms, plan.rounds) == ([32, 128], 128, 10.0, 3)
    assert (plan.planes, plan.open_streams, plan.http) == (["tcp", "mux"], 1000, True)
    assert file == tmp_path / "out.json"
