"""How long a caller waits, in the metadata of its request."""

from __future__ import annotations

import math

import pytest

from dynamo_trio.wire.deadline import DEADLINE_KEY, parse_seconds, time_left, with_deadline


def test_it_is_told_beside_what_is_there() -> None:
    told = with_deadline({"a": "b"}, 2.5)
    assert told == {"a": "b", DEADLINE_KEY: "2.500"}
    assert time_left(told) == 2.5


def test_what_was_said_before_is_replaced_and_never_negative() -> None:
    assert time_left(with_deadline({DEADLINE_KEY: "9"}, -1.0)) == 0.0


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_who_waits_for_ever_says_nothing(seconds: float) -> None:
    assert with_deadline({"a": "b"}, seconds) == {"a": "b"}
    assert time_left({"a": "b"}) == math.inf


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "nan", "inf", "1e3", "1_0", " 1", "1.", "400000000"]
)
def test_what_is_no_time_counts_as_none(text: str) -> None:
    assert parse_seconds(text) is None
    assert time_left({DEADLINE_KEY: text}) == math.inf
