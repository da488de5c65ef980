"""The table of phases."""

from __future__ import annotations

import itertools

import pytest

from dynamo_trio.lifecycle import MOVES, Ending, Phase, diagram
from dynamo_trio.lifecycle.phases import path


def test_each_phase_but_the_last_leads_to_the_next() -> None:
    assert [(move.source, move.target) for move in MOVES] == list(itertools.pairwise(Phase))


def test_a_path_enters_every_phase_between() -> None:
    assert path(Phase.SERVING, Phase.STOPPED) == tuple(Phase)[1:]
    assert path(Phase.GRACE, Phase.DRAINING) == (Phase.DRAINING,)
    assert path(Phase.GRACE, Phase.GRACE) == ()


@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a, b in itertools.product(Phase, Phase) if b < a],
)
def test_phases_only_go_forward(source: Phase, target: Phase) -> None:
    with pytest.raises(ValueError, match="phases only go forward"):
        path(source, target)


def test_the_diagram_shows_every_move_and_cause() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == 3 + sum(len(move.when) for move in MOVES)
    assert "    DRAINING --> STOPPING: completed (nothing in flight)" in lines


def test_no_phase_ends_as_failed() -> None:
    assert all(Ending.FAILED not in move.when for move in MOVES)
