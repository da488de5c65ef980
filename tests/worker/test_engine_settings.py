"""What the settings of a worker make of its engine's limits and faults."""

from __future__ import annotations

import math

import pytest

from dynamo_trio.config.programs import LIBRARY, STANDALONE, WORKER, ProgramSpec
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import ConfigError
from dynamo_trio.worker.assembly import Model, build_core, engine_limits


def test_limits_are_those_of_the_settings() -> None:
    config = WORKER.read_config(
        ["--engine-health-check-timeout", "4", "--engine-health-shutdown-timeout", "5"]
    )
    limits = engine_limits(config, close=6.0)
    assert (limits.check, limits.close_failed, limits.close) == (4.0, 5.0, 6.0)


def test_0_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_ENGINE_HEALTH_CHECK_TIMEOUT", "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "0")
    limits = engine_limits(WORKER.read_config([]), close=6.0)
    assert limits.check == limits.close_failed == math.inf


@pytest.mark.parametrize(
    ("flags", "check"),
    [
        (["--engine-step-timeout-secs", "100"], 100.0),
        (["--engine-step-timeout-secs", "0"], math.inf),
        (["--engine-step-timeout-secs", "3"], 30.0),
        (["--engine-step-timeout-secs", "100", "--engine-health-check-timeout", "9"], 9.0),
    ],
)
def test_who_allows_a_step_more_time_allows_it_to_a_check(flags: list[str], check: float) -> None:
    assert engine_limits(WORKER.read_config(flags), close=6.0).check == check


@pytest.mark.parametrize("spec", [WORKER, STANDALONE])
def test_defaults_are_dynamos(spec: ProgramSpec) -> None:
    config = spec.read_config([])
    assert config.health_interval == 2.0
    assert config.health_limit == config.health_close_limit == 30.0
    assert config.warnings == ()


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "", "soon"])
def test_a_bad_value_names_variable_and_rule(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_INTERVAL", text)
    with pytest.raises(ConfigError, match=r"DYN_ENGINE_HEALTH_CHECK_INTERVAL.*number of seconds"):
        WORKER.read_config([])


def test_who_has_no_engine_is_not_told_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_INTERVAL", "1")
    assert LIBRARY.read_config([]).warnings == ()


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--engine-step-timeout-secs", "31", "--engine-health-check-timeout", "30"], True),
        (["--engine-step-timeout-secs", "0", "--engine-health-check-timeout", "30"], True),
        (["--engine-step-timeout-secs", "30", "--engine-health-check-timeout", "30"], False),
        (["--engine-step-timeout-secs", "31"], False),
        (["--engine-step-timeout-secs", "0", "--engine-health-check-timeout", "0"], False),
        (["--engine-step-timeout-secs", "0", "--engine-health-check-interval", "0"], False),
        (["--engine-health-check-timeout", "5"], False),
    ],
)
def test_a_step_limit_that_a_check_cuts_short_is_told_of(flags: list[str], warned: bool) -> None:
    warnings = WORKER.read_config(flags).warnings
    assert any("fails the health check before" in warning for warning in warnings) is warned


@pytest.mark.parametrize(
    ("flags", "struck"), [([], False), (["--sim-fault-after", "0"], True)], ids=["waits", "counts"]
)
def test_a_fault_waits_to_be_set_off_unless_its_calls_are_counted(
    flags: list[str], struck: bool
) -> None:
    config = WORKER.read_config(["--engine", "sim", "--sim-fault", "leak-child", *flags])
    core = build_core(config, Model.read(config, None))
    assert isinstance(core, SimCore)
    core.faults.strike("step")
    assert bool(core.faults.children) is struck
    core.faults.set_off()
    core.faults.strike("check")
    core.faults.strike("check")
    [child] = core.faults.children
    child.kill()
    child.wait()


@pytest.mark.parametrize("fault", [Fault.LOAD_HANG, Fault.LOAD_STALL])
def test_a_fault_of_loading_waits_for_nobody(fault: Fault) -> None:
    core = SimCore(SimSettings(virtual=True))
    core.arm(fault, None)
    core.faults.strike("load")
    assert core.faults.stuck is fault
