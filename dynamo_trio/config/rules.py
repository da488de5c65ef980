"""Rules: how the text of a flag or variable becomes a value, and what is wrong with it.

A rule never guesses. ``parse`` takes text, ``check`` a value that a program passed itself; both
raise :exc:`ValueError` for anything outside the rule, and ``text`` says the rule in words, ready
to stand after "must be". Numbers are plain ASCII decimals: what Python accepts beyond that
(``1_000``, ``infinity``, digits of other scripts) is more often a slip than an intention.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from attrs import field, frozen

from dynamo_trio.config.numbers import Number

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Ten years. A longer wait is a slip, and Trio's clock loses precision far beyond it.
MAX_SECONDS = 315_360_000.0

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

T = TypeVar("T")
W = TypeVar("W", bound=str)

#: As a browser sends it: in small letters, no path, and no port that goes without saying.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._~-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")


class Rule(Protocol[T]):
    """How one kind of value is read, checked and shown."""

    @property
    def text(self) -> str:
        """The rule in words, to stand after "must be"."""

    @property
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""

    @property
    def unit(self) -> str:
        """The unit that is shown after a value; empty if there is none."""

    def parse(self, text: str) -> T:
        """The value that ``text`` means. Raises ValueError."""

    def check(self, value: T) -> None:
        """Accept a value from code. Raises ValueError."""

    def show(self, value: T) -> str:
        """The text that :meth:`parse` turns back into ``value``."""


def _number(value: float) -> str:
    """``5``, ``0.25``, ``315360000``: no exponent, no needless ``.0``."""
    return f"{value:.0f}" if value == int(value) else repr(value)


_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}


@frozen
class Seconds(Number):
    """A time in seconds; 0 means at once."""

    minimum: float = 0.0
    unit: str = "s"
    metavar: str = "SECONDS"
    maximum: float = MAX_SECONDS

    @property
    def text(self) -> str:
        noun = f"a number of {_UNITS[self.unit]}"
        return f"{noun} from {_number(self.minimum)} to {_number(self.maximum)}"

    def show(self, value: float) -> str:
        return _number(value)


def milliseconds() -> Seconds:
    """A time in milliseconds; 0 means at once."""
    return Seconds(unit="ms", metavar="MS", maximum=MAX_SECONDS * 1000)


@frozen
class Integer:
    """A whole number within bounds, both of them allowed."""

    minimum: int
    maximum: int
    unit: str = ""
    metavar: str = "N"

    @property
    def text(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        if not _INTEGER.fullmatch(text.strip()):
            raise ValueError(text)
        value = int(text)
        self.check(value)
        return value

    def check(self, value: int) -> None:
        if not self.minimum <= value <= self.maximum:
            raise ValueError(value)

    def show(self, value: int) -> str:
        return str(value)


@frozen
class PortOrOff:
    """A port to listen on, 0 for any free one, -1 for none."""

    text: str = "a port from 0 to 65535, or -1 for none"
    unit: str = ""
    metavar: str = "PORT"

    def parse(self, text: str) -> int:
        if not _INTEGER.fullmatch(text.strip()):
            raise ValueError(text)
        self.check(int(text))
        return int(text)

    def check(self, value: int) -> None:
        if not -1 <= value <= 65535:
            raise ValueError(value)

    def show(self, value: int) -> str:
        return str(value)


class Refused(ValueError):
    """A value that is known and not offered. The text says so, in place of the rule."""


@frozen
class Choice(Generic[W]):
    """One of a few words."""

    words: tuple[W, ...]
    unit: str = ""
    #: Words of Dynamo that are not offered here, and what to say of them.
    refused: Mapping[str, str] = field(factory=dict, kw_only=True)

    @property
    def text(self) -> str:
        return "one of " + ", ".join(self.words)

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    def parse(self, text: str) -> W:
        for word in self.words:
            if word == text.strip().lower():
                return word
        if text.strip().lower() in self.refused:
            raise Refused(self.refused[text.strip().lower()])
        raise ValueError(text)

    def check(self, value: W) -> None:
        if value not in self.words:
            raise ValueError(value)

    def show(self, value: W) -> str:
        return value


@frozen
class Boolean:
    """Yes or no, in the spellings that people use."""

    text: str = "one of 1, 0, true, false, yes, no, on, off"
    unit: str = ""
    metavar: str = "BOOL"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(text)
        return word in _TRUE

    def check(self, value: bool) -> None:
        """Every bool is right."""

    def show(self, value: bool) -> str:
        return "true" if value else "false"


@frozen
class Text:
    """Any text that is not empty and prints on one line."""

    text: str = "text that is not empty"
    unit: str = ""
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        self.check(text.strip())
        return text.strip()

    def check(self, value: str) -> None:
        if not value or not value.isprintable():
            raise ValueError(value)

    def show(self, value: str) -> str:
        return value


@frozen
class Secret(Text):
    """Text that is never shown, in no message either."""

    metavar: str = "SECRET"

    def show(self, value: str) -> str:
        del value
        return "(not shown)"


@frozen
class FilePath:
    """A path. Whether it can be used is found out by whoever uses it."""

    text: str = "a path"
    unit: str = ""
    metavar: str = "PATH"

    def parse(self, text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError(text)
        return Path(text)

    def check(self, value: Path) -> None:
        """Every Path is right."""

    def show(self, value: Path) -> str:
        return str(value)


@frozen
class OriginsRule:
    """Origins of web pages, separated by commas, or a star for all."""

    text: str = "* or origins such as https://example.com:8443, separated by commas"
    unit: str = ""
    metavar: str = "ORIGIN[,ORIGIN...]"

    def parse(self, text: str) -> tuple[str, ...]:
        value = tuple(part.strip().lower() for part in text.split(","))
        self.check(value)
        return value

    def check(self, value: tuple[str, ...]) -> None:
        if value != ("*",) and not (value and all(map(_ORIGIN.fullmatch, value))):
            raise ValueError(value)

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value)
