"""A model under names that no other test has."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count(1)


def unique(word: str) -> str:
    """A name that no other test has."""
    return f"{word}{next(_numbers)}"


@attrs.frozen
class Model:
    """A model folder, the name under which it is offered, and where it is served."""

    folder: Path
    name: str = attrs.field(factory=lambda: unique("tiny-"))
    namespace: str = attrs.field(factory=lambda: unique("ns"))

    @property
    def endpoint(self) -> str:
        return f"{self.namespace}.backend.generate"

    def flags(self) -> list[str]:
        """For a worker of either make."""
        endpoint = f"dyn://{self.endpoint}"
        return [
            *("--model-path", str(self.folder), "--model-name", self.name),
            *("--endpoint", endpoint),
        ]
