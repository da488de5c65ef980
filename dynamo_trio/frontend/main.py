"""The entry point behind ``python -m dynamo_trio.frontend``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from dynamo_trio.config.programs import FRONTEND
from dynamo_trio.program.entry import enter

if TYPE_CHECKING:
    from dynamo_trio.program.entry import Body


def main() -> NoReturn:
    """Run the program and exit."""
    enter(FRONTEND, _load)


def _load() -> Body:
    from dynamo_trio.frontend.program import BODY

    return BODY
