"""What every test here can lean on.

* A skip is honest or it fails. Its reason carries the command that enables the test, in the
  form ``enable with: COMMAND``; and with ``DYN_TRIO_TEST_NO_SKIP=1`` (CI) a skip is a failure.
* Hypothesis has no deadline of its own: on a machine that others share an example may take
  any time, and what hangs is ended by pytest's timeout.
* ``model_path``: the default model, only ever taken from the cache, so that ``pytest`` needs
  no network.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

NO_SKIP = os.environ.get("DYN_TRIO_TEST_NO_SKIP") == "1"
ENABLE = "enable with: "

hypothesis.settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shared machine")

FETCH = "pip install -e '.[llama]' && python -m dynamo_trio.models fetch"


def _complaint(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """What is wrong with this report's skip, if it is one and something is."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if NO_SKIP:
        return f"skipped although DYN_TRIO_TEST_NO_SKIP=1: {reason}"
    if ENABLE not in reason:
        return f"the reason of a skip must say {ENABLE!r} and a command, but is: {reason}"
    return None


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    complaint = _complaint(report)
    if complaint is not None:
        report.outcome = "failed"
        report.longrepr = complaint


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip(f"needs root; {ENABLE}sudo -E $(which pytest) -m root")
    if item.get_closest_marker("llama") and importlib.util.find_spec("cyllama") is None:
        pytest.skip(f"needs the llama extra; {ENABLE}{FETCH}")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, from the cache; a test that asks for it is marked llama."""
    from dynamo_trio.config import Config, Group
    from dynamo_trio.models import cached_model

    path = cached_model(Config.from_args_and_env([], groups=[Group.PROGRAM]).cache_dir)
    if path is None:
        pytest.skip(f"the default model is not in the cache; {ENABLE}{FETCH}")
    return path
