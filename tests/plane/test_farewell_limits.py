"""The farewell of a plane ends with the stop, whoever does not listen to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.context import Cleanup

LIMIT = 1.0


@attrs.define(eq=False)
class Stuck:
    """An answer that is finished and does not leave, or a link whose peer takes nothing."""

    finished = True
    has_last_words = True
    left: list[float] = attrs.field(factory=list)

    async def wait_sent(self) -> None:
        await trio.sleep_forever()

    def leave(self, why: str) -> None:
        self.left.append(trio.current_time())


async def farewell(name: str, close_scope: Cleanup, lifecycle: Lifecycle) -> Stuck:
    """Open a plane that has somebody stuck, and leave it in a stop."""
    stuck: Any = Stuck()
    if name == "tcp":
        async with open_tcp_plane(TcpSettings(), close_scope=close_scope) as tcp:
            tcp.server._answers.add(stuck)
            lifecycle.request_stop("SIGTERM")
    else:
        async with open_mux_plane(MuxSettings(), close_scope=close_scope) as mux:
            mux.server._links.add(stuck)
            lifecycle.request_stop("SIGTERM")
    assert isinstance(stuck, Stuck)
    return stuck


@pytest.mark.parametrize("total", [0.0, 0.4, 10.0])
@pytest.mark.parametrize("name", ["tcp", "mux"])
async def test_it_ends_with_the_stop(name: str, total: float, autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(total=total))
    await farewell(name, lifecycle.cleanup, lifecycle)
    assert trio.current_time() == min(total, LIMIT)


async def test_clients_hear_of_it_while_there_is_time(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(total=0.4))
    stuck = await farewell("mux", lifecycle.cleanup, lifecycle)
    assert stuck.left
    assert max(stuck.left) < 0.4


@pytest.mark.parametrize("name", ["tcp", "mux"])
async def test_without_a_lifecycle_it_has_its_own_limit(
    name: str, autojump_clock: MockClock
) -> None:
    await farewell(name, plain_cleanup, Lifecycle(Timetable(total=0.4)))
    assert trio.current_time() == LIMIT
