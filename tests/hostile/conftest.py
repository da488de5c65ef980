"""The processes of tests/programs, to be attacked."""

from tests.programs.conftest import model_folder as model_folder
