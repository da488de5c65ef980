"""Every discovery backend keeps these promises; ``mem`` is the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.discovery import (
    Discovery,
    EndpointId,
    Instance,
    MemoryDiscovery,
    ModelCard,
    Put,
    Removed,
)
from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

GENERATE = EndpointId("dynamo", "backend", "generate")


@pytest.fixture(params=[MemoryDiscovery], ids=["mem"])
def discovery(request: pytest.FixtureRequest) -> Discovery:
    make: Callable[[], Discovery] = request.param
    return make()


def instance(number: int, address: str = "x") -> Instance:
    return Instance(GENERATE, number, {"mem": address})


async def test_a_watch_begins_with_what_is_there(discovery: Discovery) -> None:
    await discovery.register(instance(1))
    async with discovery.watch(Instance) as watch:
        assert list(watch.snapshot.values()) == [instance(1)]


async def test_a_watch_sees_each_change_once_and_in_order(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch:
        await discovery.register(instance(1))
        await discovery.register(instance(1, "moved"))
        await discovery.unregister(instance(1))
        seen = [await watch.next_change() for _ in range(3)]
        assert seen == [
            Put(instance(1)),
            Put(instance(1, "moved")),
            Removed(instance(1, "moved")),
        ]
        with trio.move_on_after(0.01) as nothing_more:
            await watch.next_change()
        assert nothing_more.cancelled_caught


async def test_the_snapshot_does_not_move_after_it_was_taken(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch:
        await discovery.register(instance(1))
        assert not watch.snapshot


async def test_a_watch_sees_only_its_own_kind(discovery: Discovery) -> None:
    async with discovery.watch(ModelCard) as watch:
        await discovery.register(instance(1))
        card = ModelCard("smol", GENERATE, 1)
        await discovery.register(card)
        assert await watch.next_change() == Put(card)


async def test_withdrawing_what_is_not_there_is_not_an_error(discovery: Discovery) -> None:
    await discovery.unregister(instance(9))
    async with discovery.watch(Instance) as watch:
        assert not watch.snapshot


async def test_a_waiting_watch_is_woken(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch, trio.open_nursery() as nursery:
        nursery.start_soon(discovery.register, instance(7))
        assert await watch.next_change() == Put(instance(7))


@pytest.mark.parametrize("text", ["dyn://a.b.c", "a.b.c"])
def test_an_endpoint_name_has_three_parts(text: str) -> None:
    assert EndpointId.parse(text) == EndpointId("a", "b", "c")
    assert str(EndpointId.parse(text)) == "dyn://a.b.c"


@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.c.d", "a..c", "dyn://"])
def test_a_bad_endpoint_name_is_named_with_its_rule(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"namespace\.component\.endpoint"):
        EndpointId.parse(text)


def test_a_slug_has_only_what_dynamo_takes() -> None:
    assert ModelCard("Org/Smol LM 2", GENERATE, 1).slug == "org_smol_lm_2"
