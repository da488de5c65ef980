"""The benchmark of the frontend still runs; its figures are nobody's business here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.frontend import Plan, Side, ratios, read_plan, run, table
from benchmarks.sse_load import Load, Result, _Connection

if TYPE_CHECKING:
    from pathlib import Path


def test_a_small_run_gives_every_figure() -> None:
    plan = Plan(
        streams=(2,), tokens=4, requests=2, rounds=1, step_ms=20.0, slow_streams=3, slow_step=0.05
    )
    said: list[str] = []
    result = json.loads(json.dumps(run(plan, said.append)))
    told = result["loads"]["2 streams"]["ours"]
    assert (told["errors"], told["error_examples"]) == (0, [])
    assert told["us_per_token"]["median"] > 0
    assert told["memory_mib"] > 0
    assert result["slow"]["errors"] == 0
    assert said == ["round 0 of 1", "round 1 of 1", "3 slow streams"]
    lines = table(result).splitlines()
    assert lines[0].split()[:2] == ["load", "side"]
    assert lines[1].split()[:3] == ["2", "streams", "ours"]
    assert lines[2].startswith("3 slow streams: 0 errors")


def test_the_ratio_is_that_of_the_medians() -> None:
    def told(median: float) -> dict[str, object]:
        return {"us_per_token": {"median": median}}

    assert ratios({"ours": told(30.0), "dynamo": told(60.0)}) == 0.5
    assert ratios({"ours": told(30.0)}) is None


def unconnected(result: Result) -> _Connection:
    return _Connection(Load(1, "m", 4), result, None, 1)  # type: ignore[arg-type]  # never sent


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 503 \r\n\r\n{}", "503"),
        (b"", "''"),
        (
            b'HTTP/1.1 200 \r\n\r\ndata: {"completion_tokens":3}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n',
            "3",
        ),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(said: bytes, error: str) -> None:
    result = Result()
    connection = unconnected(result)
    assert connection.take(said)
    assert error in result.errors[0]
    assert result.tokens == 0


def test_an_answer_in_many_pieces_is_whole() -> None:
    result = Result()
    connection = unconnected(result)
    said = (
        b'HTTP/1.1 200 \r\n\r\n1\r\ndata: {"completion_tokens":4}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    )
    assert [connection.take(said[i : i + 1]) for i in range(len(said))].index(True) == len(said) - 1
    assert (result.tokens, result.errors, len(result.first)) == (4, [], 1)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, file = read_plan(["--oracle", "/x/python", "--json", str(tmp_path / "out.json")])
    assert (plan.oracle, plan.streams, plan.tokens, plan.rounds) == ("/x/python", [32, 128], 128, 5)
    assert file == tmp_path / "out.json"
    assert Side("ours", None, 7).load(4).port == 7  # type: ignore[arg-type]  # not asked for
    with pytest.raises(SystemExit):
        read_plan(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"(default: {value})" in said for value in ("[32, 128]", 128, 5, 10.0, 1000))
