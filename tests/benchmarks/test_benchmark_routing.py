"""The benchmark of routing still runs; its figures are nobody's business here."""

from __future__ import annotations

import random

from benchmarks.routing import Plan, modes, read_plan, run


def test_a_small_run_has_a_line_for_every_mode() -> None:
    plan = Plan(workers=6, requests=3, running=2, rounds=1, blocks=6)
    said: list[str] = []
    run(plan, said.append)
    lines = [line.split("  ")[0] for line in said]
    assert lines[1:-4] == list(modes(plan, random.Random(0)))
    assert lines[-1] == "dropping a worker"
    assert all(float(line.split()[-1]) >= 0 for line in said[1:])


def test_the_plan_is_that_of_the_command_line() -> None:
    assert read_plan([]) == Plan()
    assert read_plan(["--workers", "7"]).workers == 7
