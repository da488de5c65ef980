"""The last thing that a store does ends with the stop, whatever the store does."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.discovery import FileSettings
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_store
from dynamo_trio.discovery.file import FAREWELL, open_file_store
from dynamo_trio.lifecycle import Lifecycle, Timetable
from tests.discovery.fake_etcd import FakeEtcd, hangs, in_turn, says_json
from tests.discovery.file_backend import KEY, inline, wall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock

    from dynamo_trio.context import Cleanup

    Opening = Callable[[Path, Cleanup], AbstractAsyncContextManager[None]]

T = TypeVar("T")

ETCD = EtcdSettings(endpoints=("http://a",))


@asynccontextmanager
async def hanging_etcd(_: Path, close_scope: Cleanup) -> AsyncIterator[None]:
    lease = says_json({"ID": "7", "TTL": "10"})
    fake = FakeEtcd({"a": in_turn(lease, hangs)})
    async with open_etcd_store(ETCD, fake, close_scope=close_scope):
        yield


@asynccontextmanager
async def hanging_folder(path: Path, close_scope: Cleanup) -> AsyncIterator[None]:
    is_frozen = False

    async def run(call: Callable[[], T], /) -> T:
        if is_frozen:
            await trio.sleep_forever()
        return await inline(call)

    opening = open_file_store(FileSettings(path), wall=wall, run=run, close_scope=close_scope)
    async with opening as store:
        await store.put(KEY, b"1")
        is_frozen = True
        yield


BOTH = pytest.mark.parametrize(
    ("opening", "limit"), [(hanging_etcd, ETCD.close_time), (hanging_folder, FAREWELL)]
)


@BOTH
async def test_a_store_that_hangs_is_left_at_the_hard_end_of_a_stop(
    opening: Opening, limit: float, tmp_path: Path, autojump_clock: MockClock
) -> None:
    lifecycle = Lifecycle(Timetable(total=limit / 2))
    async with opening(tmp_path, lifecycle.cleanup):
        lifecycle.request_stop("SIGTERM")
    assert trio.current_time() == limit / 2


@BOTH
async def test_an_escalation_shortens_the_close_that_is_under_way(
    opening: Opening, limit: float, tmp_path: Path, autojump_clock: MockClock
) -> None:
    lifecycle = Lifecycle(Timetable(total=100.0, fatal=limit / 4))

    async def fail() -> None:
        await trio.sleep(limit / 4)
        lifecycle.fail(OSError("dead"))

    async with trio.open_nursery() as nursery:
        async with opening(tmp_path, lifecycle.cleanup):
            lifecycle.request_stop("SIGTERM")
            nursery.start_soon(fail)
    assert trio.current_time() == limit / 2


@BOTH
async def test_without_a_lifecycle_it_has_its_own_limit(
    opening: Opening, limit: float, tmp_path: Path, autojump_clock: MockClock
) -> None:
    with trio.CancelScope() as scope:
        async with opening(tmp_path, plain_cleanup):
            scope.cancel()
    assert trio.current_time() == limit
