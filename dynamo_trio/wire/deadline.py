"""How long a caller still waits, as it stands in the metadata of its request."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The key in a request's metadata; its value is a number of seconds from the sending on.
DEADLINE_KEY = "dynamo_trio_deadline_secs"
#: The longest time that is told or taken, in seconds.
MAX_SECONDS = 315_360_000.0

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def parse_seconds(text: str) -> float | None:
    """A time in seconds in plain decimal digits; None if it is none, or too long."""
    seconds = float(text) if _NUMBER.fullmatch(text) else math.inf
    return seconds if seconds <= MAX_SECONDS else None


def with_deadline(metadata: Mapping[str, str], seconds: float) -> Mapping[str, str]:
    """The metadata of a request whose caller waits so long; infinity: for ever.

    What it had said before of its time is replaced.
    """
    if seconds > MAX_SECONDS:
        return metadata
    return {**metadata, DEADLINE_KEY: f"{max(0.0, seconds):.3f}"}


def time_left(metadata: Mapping[str, str]) -> float:
    """Seconds for which the caller of a request waits; infinity if it says nothing readable."""
    seconds = parse_seconds(metadata.get(DEADLINE_KEY, ""))
    return math.inf if seconds is None else seconds
