"""How many file descriptors a program asks for."""

from __future__ import annotations

import resource

import pytest

from dynamo_trio.config.programs import FRONTEND, WORKER
from dynamo_trio.program.entry import raise_file_limit

FREE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("target", "soft", "hard", "asked"),
    [
        (None, 1024, 4096, 4096),
        (None, 1024, FREE, FREE),
        (None, 4096, 4096, None),
        (8192, 1024, 4096, 4096),
        (8192, 1024, 100_000, 8192),
        (8192, 1024, FREE, 8192),
        (8192, 10_000, 100_000, None),  # it is never lowered
        (8192, FREE, FREE, None),
        (0, 1024, 4096, None),
    ],
)
def test_the_limit_is_raised_and_never_lowered(
    target: int | None,
    soft: int,
    hard: int,
    asked: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits[0]))
    raise_file_limit(target)
    assert calls == ([] if asked is None else [asked])


@pytest.mark.parametrize(
    ("text", "target"), [("8192", 8192), ("0", 0), ("-5", 0), ("many", 0), ("", 0), (" 12 ", 12)]
)
def test_the_variable_is_read_as_dynamo_reads_it(
    text: str, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FRONTEND_FD_LIMIT_TARGET", text)
    assert FRONTEND.read_config([]).frontend_fd_limit == target
    assert WORKER.read_config([]).frontend_fd_limit is None
