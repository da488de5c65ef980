"""Who finishes and who is handed over."""

from __future__ import annotations

import pytest

from dynamo_trio.lifecycle import DrainPolicy
from dynamo_trio.lifecycle.handover import Candidate, choose, estimate

SHORT, LONG, LONGER, UNKNOWN = Candidate(1), Candidate(20), Candidate(30), Candidate()
FIXED = Candidate(30, movable=False)
ALL = [SHORT, LONG, FIXED, LONGER, UNKNOWN]


@pytest.mark.parametrize(
    ("policy", "places", "chosen"),
    [
        (DrainPolicy.FINISH, 99, []),
        (DrainPolicy.MIGRATE, 0, [0, 1, 3, 4]),  # everybody who can go, asked or not
        (DrainPolicy.AUTO, 99, [3, 1]),  # who surely cannot finish, the most hopeless first
        (DrainPolicy.AUTO, 1, [3]),
        (DrainPolicy.AUTO, 0, []),  # nobody takes them: finish
    ],
)
def test_policy(policy: DrainPolicy, places: int, chosen: list[int]) -> None:
    assert choose(ALL, policy, left=10, places=places) == chosen


def test_what_ends_just_in_time_finishes() -> None:
    assert choose([Candidate(10)], DrainPolicy.AUTO, left=10, places=1) == []


def test_without_a_limit_everybody_finishes() -> None:
    assert choose(ALL, DrainPolicy.AUTO, left=float("inf"), places=9) == []


@pytest.mark.parametrize(
    ("tokens", "pace", "seconds"),
    [(100, 0.05, 5.0), (0, 0.05, 0.0), (None, 0.05, None), (100, None, None)],
)
def test_estimate(tokens: int | None, pace: float | None, seconds: float | None) -> None:
    assert estimate(tokens, pace) == seconds
