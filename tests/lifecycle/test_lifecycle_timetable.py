"""The arithmetic of the shared budget."""

from __future__ import annotations

import math

import pytest

from dynamo_trio.lifecycle import Timetable
from dynamo_trio.lifecycle.timetable import reserve_of


@pytest.mark.parametrize(
    ("total", "reserve"), [(0, 0), (1, 0.2), (10, 2), (25, 5), (57, 5), (math.inf, 0)]
)
def test_the_reserve_is_five_seconds_or_a_fifth(total: float, reserve: float) -> None:
    assert reserve_of(total) == pytest.approx(reserve)


def test_the_budget_is_what_the_reserve_leaves() -> None:
    assert Timetable(total=57).budget == 52
    assert Timetable(total=57).reserve == 5
    assert Timetable().budget == math.inf
    assert Timetable().reserve == 0


def test_the_watchdog_waits_five_seconds_longer_than_the_stop_may_take() -> None:
    assert Timetable(total=57).watchdog_limit == 62
    everything = 2 + 5 + 3 * 30 + 900 + 2 + 30
    assert Timetable().watchdog_limit == everything + 5
    front = 5 + 1 + 2 + 3 * 30 + 900 + 2 + 30
    assert Timetable(http_drain=5).watchdog_limit == front + 5


def test_the_watchdog_comes_before_the_kill() -> None:
    assert Timetable(total=57, killed_after=60).watchdog_limit == 58
    assert Timetable(total=10, killed_after=60).watchdog_limit == 15


@pytest.mark.parametrize(
    ("limits", "second"),
    [
        (Timetable(), Timetable().watchdog_limit + 2),
        (Timetable(total=57, killed_after=60), 59),
        (Timetable(total=52.5, killed_after=60), 59),
        (Timetable(total=10, killed_after=60), 17),
        (Timetable(total=2, killed_after=5), 4),
    ],
)
def test_so_does_its_second_line(limits: Timetable, second: float) -> None:
    assert limits.watchdog_limit + limits.second_line == second


def test_one_line_tells_the_timetable() -> None:
    worker = Timetable(total=57).describe()
    assert worker == (
        "unregister <= 2 s, grace <= 5 s, callbacks <= 30 s each, drain <= 52 s (auto), "
        "farewells <= 1 s, engine close <= 30 s; total 57 s; watchdog after 62 s"
    )
    front = Timetable(http_drain=5, drain=0).describe()
    assert front.startswith("HTTP drain <= 5 s, farewells <= 1 s, unregister <= 2 s, callbacks")
    assert "no total" in front
    assert " drain <=" not in front.removeprefix("HTTP drain <=")


def test_a_process_without_callbacks_has_no_time_for_them() -> None:
    timetable = Timetable(http_drain=5, hooks=0)
    assert timetable.describe() == (
        "HTTP drain <= 5 s, farewells <= 1 s, unregister <= 2 s, drain <= 900 s (auto), "
        "engine close <= 30 s; no total; watchdog after 945 s"
    )


def test_no_warning_without_a_total_or_when_all_fits() -> None:
    assert Timetable().check() == []
    fits = Timetable(drain=10, hook=1, engine_close=5, total=60)
    assert fits.phases == 2 + 5 + 3 + 10
    assert fits.check() == []


@pytest.mark.parametrize(
    ("timetable", "words"),
    [
        (Timetable(drain=900, engine_close=5, total=57), ["phases may take 997 s", "after 52 s"]),
        (
            Timetable(grace=60, drain=1, hook=0, engine_close=5, total=57),
            ["phases may take", "nothing would be left to drain"],
        ),
        (
            Timetable(drain=10, hook=1, engine_close=30, total=60),
            ["closing the engine may take 30 s, but only the 5 s"],
        ),
    ],
)
def test_what_cannot_fit_is_told_at_start(timetable: Timetable, words: list[str]) -> None:
    warnings = timetable.check()
    assert all(word in " ".join(warnings) for word in words)
    assert len(warnings) == (2 if timetable.grace == 60 else 1)


def test_a_front_has_no_grace_to_warn_about() -> None:
    front = Timetable(http_drain=5, grace=60, drain=1, hook=0, engine_close=1, total=57)
    assert front.check() == []
