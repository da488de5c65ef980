"""For tests of programs that use dynamo_trio: no network, no waiting.

What is shipped here keeps the same contracts as the real thing, and is held to it by the
same tests: :class:`MemoryDiscovery`, :class:`MemoryPlane` and :class:`MemoryEvents` are what
one process runs on, and an engine over :class:`SimCore` on an :class:`InlineHost` runs in
virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio
import trio.testing

from dynamo_trio.discovery import MemoryDiscovery as MemoryDiscovery
from dynamo_trio.engines import InlineHost as InlineHost
from dynamo_trio.engines.faults import Fault as Fault
from dynamo_trio.engines.sim import SimCore as SimCore
from dynamo_trio.engines.sim import SimSettings as SimSettings
from dynamo_trio.events import MemoryEvents as MemoryEvents
from dynamo_trio.plane import MemoryPlane as MemoryPlane
from dynamo_trio.testing.model_folder import make_model_folder as make_model_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


def run_in_virtual_time(async_fn: Callable[..., Awaitable[T]], *args: object) -> T:
    """``trio.run`` on a clock that jumps to the next deadline as soon as all tasks wait.

    900 seconds of a drain cost milliseconds. It sees no threads and no sockets: what waits
    for those looks idle to it.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(async_fn, *args, clock=clock)
