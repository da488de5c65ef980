"""The model test finds every mutant (minutes: ``pytest -m soak``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.mutants import MUTANTS, Mutant, check, check_healthy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_the_model_test_passes_without_a_mutant(tmp_path: Path) -> None:
    check_healthy(tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_found(mutant: Mutant, tmp_path: Path) -> None:
    assert check(mutant, tmp_path)
