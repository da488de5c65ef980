"""The fixtures of tests/programs, for processes that are attacked."""

from tests.programs.conftest import fleet, model_folder  # noqa: F401
