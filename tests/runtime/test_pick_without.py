"""The choice among instances when some of them have failed the request already."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from trio.testing import wait_all_tasks_blocked

from dynamo_trio.client import Client, open_client
from dynamo_trio.discovery import EndpointId, Instance, MemoryDiscovery
from dynamo_trio.errors import CannotConnect, NoWorker
from tests.runtime.fake_planes import FakePlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from trio.testing import MockClock

    Pick = Callable[[Client, Collection[int]], Instance]

ENDPOINT = EndpointId.parse("a.b.c")
both = pytest.mark.parametrize("pick", [Client.pick, Client.pick_random])


@asynccontextmanager
async def open_fleet(count: int) -> AsyncIterator[tuple[Client, FakePlane]]:
    """Instances 1, 2, ... at x-1, x-2, ..."""
    discovery, plane = MemoryDiscovery(), FakePlane("x")
    async with open_client(ENDPOINT, discovery, {"x": plane}) as client:
        for number in range(1, count + 1):
            await discovery.register(Instance(ENDPOINT, number, {"x": f"x-{number}"}))
        await wait_all_tasks_blocked()
        yield client, plane


def picked(client: Client, pick: Pick, without: Collection[int], times: int) -> Counter[int]:
    return Counter(pick(client, without).instance_id for _ in range(times))


@both
async def test_those_that_are_excluded_are_not_chosen(pick: Pick) -> None:
    async with open_fleet(4) as (client, _):
        assert picked(client, pick, (), 200).keys() == {1, 2, 3, 4}
        assert picked(client, pick, {2}, 200).keys() == {1, 3, 4}
        assert picked(client, pick, [1, 2, 4], 10) == {3: 10}


async def test_in_turn_means_evenly_also_among_the_others() -> None:
    async with open_fleet(4) as (client, _):
        assert picked(client, Client.pick, {2}, 30) == {1: 10, 3: 10, 4: 10}


async def test_a_second_choice_takes_nobodys_turn() -> None:
    async with open_fleet(2) as (client, _):
        firsts = []
        for _ in range(6):
            first = client.pick().instance_id
            firsts.append(first)
            assert client.pick({first}).instance_id == 3 - first
        assert firsts == [1, 2] * 3


@both
async def test_nobody_is_left(pick: Pick) -> None:
    async with open_fleet(2) as (client, _):
        with pytest.raises(NoWorker, match="no other worker of"):
            pick(client, {1, 2})
        assert pick(client, {1, 77}).instance_id == 2  # of one that is unknown nothing is said


@both
async def test_one_that_a_plane_avoids_is_no_second_choice(pick: Pick) -> None:
    async with open_fleet(3) as (client, plane):
        plane.avoided = {"x-2"}
        assert picked(client, pick, {1}, 20) == {3: 20}
        plane.avoided = {"x-2", "x-3"}
        with pytest.raises(NoWorker):
            pick(client, {1})


@both
async def test_one_that_is_left_out_for_a_while_is_the_last_choice(
    autojump_clock: MockClock, pick: Pick
) -> None:
    async with open_fleet(3) as (client, _):
        client.inhibitions.note(client.find(2), CannotConnect("why"))
        assert picked(client, pick, {1}, 20) == {3: 20}
        assert picked(client, pick, {1, 3}, 20) == {2: 20}
