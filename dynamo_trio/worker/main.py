"""The entry point behind ``python -m dynamo_trio.worker``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from dynamo_trio.config.programs import WORKER
from dynamo_trio.program.entry import enter

if TYPE_CHECKING:
    from dynamo_trio.program.entry import Body


def main() -> NoReturn:
    """Run the program and exit."""
    enter(WORKER, _load)


def _load() -> Body:
    from dynamo_trio.worker.program import BODY

    return BODY
