"""What a person sees while a process stops: one line that says what it waits for."""

from __future__ import annotations

import io
import shutil
from functools import cached_property
from math import isinf
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.console.inflight import describe_inflight

if TYPE_CHECKING:
    from dynamo_trio.console.inflight import InFlight

#: Phase -> what is waited for in it, where no request is.
_WAITS = {"grace": "others may still send requests here", "stopped": "closing what is left"}


@frozen(eq=False, slots=False)
class StopLine:
    """How far a stop is at one moment. A value: another thread renders it."""

    phase: str
    #: Seconds until who is running has to end, or, where nobody is, until the phase is over at
    #: the latest; or inf.
    left: float
    running: tuple[InFlight, ...] = ()
    #: Steps of the stop that run now, by name.
    steps: tuple[str, ...] = ()
    color: bool = True

    @property
    def is_worth_a_line(self) -> bool:
        """Is there something that a person could wait for, or is it over in a moment?"""
        return bool(self.running or self.steps or self.phase == "grace")

    @cached_property
    def words(self) -> str:
        """All of it, without the phase."""
        if self.running:
            oldest = max(self.running, key=lambda one: one.age)
            served_on = self.phase == "grace"
            lines = describe_inflight(self.running, left=self.left, served_on=served_on)
            count, _, _ = lines.partition("\n")
            text = f"{count}; the oldest: {oldest}"
        else:
            limit = "" if isinf(self.left) else f", for {self.left:.1f} s at most"
            text = f"{_WAITS.get(self.phase, 'nothing is in flight')}{limit}"
        return f"{text} ({', '.join(self.steps)})" if self.steps else text

    def __call__(self) -> str:
        """The line for the bottom of a terminal, no wider than it is."""
        return self._rendered

    @cached_property
    def _rendered(self) -> str:
        # It takes a while to load, so a process that is not watched never does.
        from rich.console import Console
        from rich.text import Text

        # The last column stays free: a character there may wrap the line.
        width = max(1, shutil.get_terminal_size().columns - 1)
        text = Text(end="").append(f"{self.phase}  ", style="bold yellow").append(self.words)
        text.truncate(width, overflow="ellipsis")
        console = Console(
            file=io.StringIO(),
            width=width,
            force_terminal=self.color,
            color_system="standard" if self.color else None,
            no_color=not self.color,
            legacy_windows=False,
        )
        with console.capture() as capture:
            console.print(text, end="", soft_wrap=True, highlight=False)
        return capture.get()
