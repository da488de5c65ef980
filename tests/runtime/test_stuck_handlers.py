"""Handlers that do not leave when they are cut: their clients hear the end all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.lowlevel

from dynamo_trio import open_runtime
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.errors import EngineShutdown
from dynamo_trio.lifecycle import Lifecycle, Outcome, Timetable
from tests.plane.test_plane_contract import KINDS, PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

#: The rest of the stop is not looked at.
SOON = Timetable(grace=0, drain=0, farewell=0.05, stop=0.1)


@attrs.define(eq=False)
class Stuck:
    """A handler that yields once, and leaves when it is let go and no sooner."""

    #: How it does not leave: behind a shield, or because it swallows what should end it.
    shielded: bool
    let_go: trio.Event = attrs.field(factory=trio.Event)

    async def __call__(self, request: object) -> AsyncGenerator[int, None]:
        yield 1
        if self.shielded:
            with trio.CancelScope(shield=True):
                await self.let_go.wait()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except trio.Cancelled:
                await trio.lowlevel.cancel_shielded_checkpoint()
        yield 2  # to nobody


@pytest.mark.parametrize("shielded", [True, False], ids=["shielded", "swallows"])
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("mem", Outcome.CUT),
        ("mux-msgpack", Outcome.CUT),
        ("tcp-msgpack", Outcome.HANDED_OVER),
    ],
)
async def test_its_client_hears_the_farewell_while_it_is_stuck(
    tmp_path: Path, kind: str, outcome: Outcome, shielded: bool
) -> None:
    lifecycle, discovery, handler = Lifecycle(SOON), MemoryDiscovery(), Stuck(shielded)
    with trio.fail_after(PATIENCE):
        async with (
            KINDS[kind].open(tmp_path) as (ours, theirs),
            trio.open_nursery() as nursery,
            open_runtime(lifecycle, discovery=discovery, planes=[ours]) as worker,
            open_runtime(discovery=discovery, planes=[theirs]) as asker,
            worker.endpoint("t.b.generate").serving(handler.__call__),
            asker.endpoint("t.b.generate").client() as client,
        ):
            nursery.start_soon(lifecycle.run)
            await client.wait_for_instances()
            try:
                async with client.generate(None, item_type=int) as stream:
                    assert await anext(stream) == 1
                    lifecycle.request_stop("SIGTERM")
                    with pytest.raises(EngineShutdown):
                        await anext(stream)
                await lifecycle.wait_stopped()
                assert len(lifecycle.in_flight()) == 1
                report = lifecycle.report()
                assert report.requests == {outcome: 1}
                assert [label.split()[0] for label in report.leftovers] == ["generate"]
            finally:
                handler.let_go.set()
            await lifecycle.work.wait_empty()
            assert lifecycle.work.tally == {outcome: 1}
