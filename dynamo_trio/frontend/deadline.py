"""How long an HTTP client waits for its answer, as it says in a header."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.deadline import MAX_SECONDS, parse_seconds

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Scope

DEADLINE_HEADER = "x-dynamo-trio-deadline-secs"
_NAME = DEADLINE_HEADER.encode()


def deadline_of(scope: Scope) -> float:
    """When the client stops waiting, on Trio's clock: counted from now. Infinity: never.

    Raises:
        InvalidArgument: the header is there, but not once with a number of seconds.
    """
    values = [value for key, value in scope["headers"] if key == _NAME]
    if not values:
        return math.inf
    seconds = parse_seconds(values[0].decode("latin-1"))
    if seconds is None or len(values) > 1:
        given = ", ".join(value.decode("latin-1") for value in values)[:100]
        raise InvalidArgument(
            f"The header {DEADLINE_HEADER} must be a decimal number of seconds from 0 to "
            f"{MAX_SECONDS:.0f}, given once; it is {given!r}."
        )
    return trio.current_time() + seconds
