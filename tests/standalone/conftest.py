"""Processes for the tests; each of them must end by itself or by a polite signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.standalone.harness import Server, close_server, start_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes with these flags and variables, and see them all gone at the end."""
    servers: list[Server] = []

    def start(*flags: str, ready: bool = True, **environ: str) -> Server:
        servers.append(start_server(*flags, **environ))
        return servers[-1].wait_ready() if ready else servers[-1]

    yield start
    wrong = [complaint for server in servers if (complaint := close_server(server))]
    if wrong:
        pytest.fail("; ".join(wrong))


@pytest.fixture
def start_sim(start: Start) -> Start:
    """The same with the simulated engine."""

    def start_sim(*flags: str, ready: bool = True, **environ: str) -> Server:
        return start("--engine", "sim", *flags, ready=ready, **environ)

    return start_sim


@pytest.fixture(scope="session")
def llama_server(model_path: Path) -> Iterator[Server]:
    """One process on the real model, for the tests that do not stop it."""
    server = start_server("--model-path", str(model_path)).wait_ready()
    yield server
    wrong = close_server(server)
    if wrong:
        pytest.fail(wrong)
    assert server.popen.returncode == 0
