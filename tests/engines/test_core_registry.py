"""Cores by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trio.engines import CoreSpec, make_core
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.llama import LlamaCore
from dynamo_trio.engines.sim import SimCore
from dynamo_trio.errors import ConfigError, LoadError


def test_sim_takes_its_settings() -> None:
    core = make_core(
        CoreSpec(kind="sim", model="m", itl_ms=3, max_running=7, faults=[Fault.LOAD_FAIL])
    )
    assert isinstance(core, SimCore)
    assert (core.info.model, core.info.max_running, core.settings.itl_ms) == ("m", 7, 3)
    with pytest.raises(LoadError):
        core.load(lambda _: None)


def test_llama_is_named_after_its_file_unless_named() -> None:
    core = make_core(CoreSpec(kind="llama", model_path=Path("some/model.gguf"), threads=2))
    assert isinstance(core, LlamaCore)
    assert (core.settings.model, core.settings.threads) == ("model", 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [(CoreSpec(kind="gpt"), "choose one of llama, sim"), (CoreSpec(kind="llama"), "model file")],
)
def test_what_cannot_be_made_is_a_configuration_error(spec: CoreSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(spec)
