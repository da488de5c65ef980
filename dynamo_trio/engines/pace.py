"""How fast an engine generates: the seconds between two tokens of one request, as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The weight of a new measurement; the older ones share the rest.
WEIGHT = 0.1


@define(eq=False)
class Pace:
    """Told of each step of a busy engine."""

    #: None until something was generated.
    seconds_per_token: float | None = None
    #: Spent in steps that gave those who wait no token (for long prompts), since one that did.
    _in_vain: float = 0.0

    def note(self, seconds: float, counts: Sequence[int], *, waiting: bool) -> None:
        """A step took so many seconds.

        Args:
            seconds: how long it took.
            counts: what each request got that had tokens before: its first one says how long
                its prompt took, not how fast it goes on.
            waiting: there are such requests, whether they got something or not.
        """
        if counts:
            # Each of these requests has waited that long for its share of the tokens.
            self._measured((self._in_vain + seconds) * len(counts) / sum(counts))
        self._in_vain = self._in_vain + seconds if waiting and not counts else 0.0

    def _measured(self, sample: float) -> None:
        known = self.seconds_per_token
        self.seconds_per_token = sample if known is None else known + WEIGHT * (sample - known)
