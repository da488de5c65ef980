"""Rules for plain numbers, and for numbers that can be switched off by a word."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import frozen

if TYPE_CHECKING:
    from dynamo_trio.config.rules import Rule

T = TypeVar("T")

_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


@frozen
class Number:
    """A number within bounds, both of them allowed."""

    minimum: float
    maximum: float
    unit: str = ""
    metavar: str = "X"

    @property
    def text(self) -> str:
        return f"a number from {self.minimum:.12g} to {self.maximum:.12g}"

    def parse(self, text: str) -> float:
        if not _DECIMAL.fullmatch(text.strip()):
            raise ValueError(text)
        value = float(text) + 0.0  # -0 becomes 0
        self.check(value)
        return value

    def check(self, value: float) -> None:
        if not (math.isfinite(value) and self.minimum <= value <= self.maximum):
            raise ValueError(value)

    def show(self, value: float) -> str:
        return f"{value:.12g}"


@frozen
class OrNone(Generic[T]):
    """What another rule allows, or the word ``none``, which is as if nothing were set."""

    rule: Rule[T]

    @property
    def text(self) -> str:
        return f"{self.rule.text}, or none"

    @property
    def unit(self) -> str:
        return self.rule.unit

    @property
    def metavar(self) -> str:
        return self.rule.metavar

    def parse(self, text: str) -> T | None:
        return None if text.strip().lower() == "none" else self.rule.parse(text)

    def check(self, value: T | None) -> None:
        if value is not None:
            self.rule.check(value)

    def show(self, value: T | None) -> str:
        return "none" if value is None else self.rule.show(value)
