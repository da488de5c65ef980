"""Ids that are made for every request."""

from __future__ import annotations

import uuid

from dynamo_trio.wire.ids import new_digits, new_uuid


def test_a_uuid_is_one_of_version_4() -> None:
    for _ in range(200):
        text = new_uuid()
        number = uuid.UUID(text)
        assert str(number) == text
        assert (number.version, number.variant) == (4, uuid.RFC_4122)


def test_no_two_are_alike() -> None:
    assert len({new_uuid() for _ in range(1000)}) == 1000
    assert len({new_digits(16) for _ in range(1000)}) == 1000


def test_as_many_digits_as_were_asked_for() -> None:
    assert len(new_digits(48)) == 48
    assert int(new_digits(48), 16) >= 0
