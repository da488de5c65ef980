"""The verdict on an endpoint: one failure, one pass, and what a relapse costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.health.standing import MOST_PASSES, RELAPSE, Standing


def passes_needed(standing: Standing, now: float) -> int:
    """How many passes in a row make it healthy again, each a second after the other."""
    count = 1
    while not standing.note(passed=True, now=now + count):
        count += 1
    return count


def test_it_is_healthy_once_it_has_answered() -> None:
    standing = Standing()
    assert not standing.healthy
    assert standing.note(passed=True, now=0)
    assert standing.healthy


def test_one_failure_is_enough_and_one_pass() -> None:
    standing = Standing(healthy=True)
    assert standing.note(passed=False, now=1)
    assert not standing.note(passed=False, now=2)
    assert not standing.healthy
    assert standing.note(passed=True, now=3)
    assert not standing.note(passed=True, now=4)
    assert standing.healthy


def test_the_first_illness_is_no_relapse_however_soon() -> None:
    standing = Standing()
    standing.note(passed=True, now=0)
    standing.note(passed=False, now=1)
    assert passes_needed(standing, 2) == 1


def test_each_relapse_doubles_the_passes_that_are_needed() -> None:
    standing, now, needed = Standing(healthy=True), 0.0, []
    for _ in range(6):
        standing.note(passed=False, now=now)
        needed.append(passes_needed(standing, now))
        now += needed[-1] + RELAPSE - 1
    assert needed == [1, 2, 4, 8, 8, 8]
    standing.note(passed=False, now=now + 1)  # long enough after the last recovery
    assert passes_needed(standing, now) == 1


def test_passes_count_in_a_row() -> None:
    standing = Standing(healthy=True)
    standing.note(passed=False, now=0)
    standing.note(passed=True, now=1)
    standing.note(passed=False, now=2)  # a relapse: two are needed
    for passed in (True, False, True, False):
        assert not standing.note(passed=passed, now=3)
    assert not standing.healthy
    assert passes_needed(standing, 4) == 2


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 100)), max_size=60))
def test_it_changes_only_to_what_was_seen_last(results: list[tuple[bool, float]]) -> None:
    standing, now, since_failure = Standing(), 0.0, MOST_PASSES
    for passed, pause in results:
        now += pause
        before = standing.healthy
        changed = standing.note(passed=passed, now=now)
        since_failure = since_failure + 1 if passed else 0
        assert changed == (standing.healthy != before)
        assert not (standing.healthy and not passed)
        assert standing.healthy or since_failure < MOST_PASSES
