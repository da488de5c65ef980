"""What befalls an etcd, and what registrations and readers make of it.

Leases are short here, so that three of them pass in seconds; limits are far above them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.discovery import Instance, Put, Removed
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_store
from dynamo_trio.discovery.stored import open_stored_discovery
from tests.discovery.backends import instance
from tests.discovery.etcd_server import EtcdServer, open_etcd

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.discovery import Discovery, Watch

TTL = 2.0
#: An instance that went is put back after this (Dynamo's readers ask for 6 s).
QUIET = 0.5
HEAL = 1.0
#: Far above what anything here needs, in seconds.
SOON = 20.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    async with open_etcd(tmp_path / "etcd") as server:
        yield server


def settings_for(server: EtcdServer) -> EtcdSettings:
    return EtcdSettings(
        endpoints=(server.url,),
        ttl=TTL,
        heal_time=HEAL,
        connect_time=0.5,
        answer_time=1.0,
        close_time=0.5,
    )


@asynccontextmanager
async def open_discovery(server: EtcdServer) -> AsyncIterator[Discovery]:
    async with open_etcd_store(settings_for(server)) as store:
        async with open_stored_discovery(store, quiet=QUIET) as discovery:
            yield discovery


async def wait_for_key(server: EtcdServer, record: Instance, lease: int) -> None:
    """Until the record stands in etcd, on this lease."""
    with trio.fail_after(SOON):
        while (await server.keys()).get(f"v1/instances/{record.key}") != lease:  # noqa: ASYNC110 - polls a process
            await trio.sleep(0.05)


async def wait_for_no_key(server: EtcdServer) -> None:
    with trio.fail_after(SOON):
        while await server.keys():  # noqa: ASYNC110 - polls a process
            await trio.sleep(0.05)


async def assert_silent(watch: Watch[Instance], seconds: float) -> None:
    with trio.move_on_after(seconds) as silent:
        change = await watch.next_change()
        raise AssertionError(f"a reader was told {change}")
    assert silent.cancelled_caught


async def killed(server: EtcdServer, *, keeps_data: bool = True) -> AsyncIterator[None]:
    """The outage is while the block runs."""
    await server.kill()
    yield
    await (server.start() if keeps_data else server.restart_empty())


async def frozen(server: EtcdServer) -> AsyncIterator[None]:
    """When it wakes up all leases have run out, and it says so at once."""
    server.freeze()
    yield
    server.thaw()
    await trio.lowlevel.checkpoint()


Outage = Callable[[EtcdServer], AbstractAsyncContextManager[None]]
OUTAGES: dict[str, Outage] = {
    "data kept": asynccontextmanager(killed),
    "data lost": asynccontextmanager(partial(killed, keeps_data=False)),
    "frozen": asynccontextmanager(frozen),
}


async def test_three_ttls_without_a_server_cost_nobody_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whatever kind the outage is; they are tried side by side to save time."""
    async with trio.open_nursery() as nursery:
        for name, outage in OUTAGES.items():
            nursery.start_soon(assert_costs_nothing, tmp_path / name, outage)
    assert "etcd has been failing" in caplog.text


async def assert_costs_nothing(folder: Path, outage: Outage) -> None:
    """Readers keep their view, and the registration is there again on the same lease."""
    async with (
        open_etcd(folder) as server,
        open_discovery(server) as worker,
        open_discovery(server) as reader,
    ):
        lease = worker.assign_instance_id()
        record = instance(lease)
        await worker.register(record)
        async with reader.watch(Instance) as watch:
            assert dict(watch.snapshot) == {record.key: record}
            async with outage(server):
                await assert_silent(watch, 3.2 * TTL)
            await wait_for_key(server, record, lease)
            # Nothing was said, and the time for which it might still have been is over.
            await assert_silent(watch, TTL + HEAL + 1.0)
            async with reader.watch(Instance) as later:
                assert dict(later.snapshot) == {record.key: record}
            # It is not deaf either.
            await worker.register(instance(lease, port=9001))
            with trio.fail_after(SOON):
                assert await watch.next_change() == Put(instance(lease, port=9001))


async def test_who_died_in_an_outage_is_removed_after_it(server: EtcdServer) -> None:
    async with open_discovery(server) as reader:
        async with reader.watch(Instance) as watch:
            async with open_discovery(server) as worker:
                record = instance(1)
                await worker.register(record)
                with trio.fail_after(SOON):
                    assert await watch.next_change() == Put(record)
                await server.kill()
            await server.restart_empty()
            with trio.fail_after(SOON):
                assert await watch.next_change() == Removed(record)


async def test_a_lease_that_a_stranger_revoked_is_granted_again(server: EtcdServer) -> None:
    async with open_discovery(server) as worker, open_discovery(server) as reader:
        lease = worker.assign_instance_id()
        record = instance(lease)
        await worker.register(record)
        async with reader.watch(Instance) as watch:
            await server.call("/v3/lease/revoke", {"ID": str(lease)})
            with trio.fail_after(SOON):
                assert await watch.next_change() == Removed(record)
                assert await watch.next_change() == Put(record)
        assert (await server.keys())[f"v1/instances/{record.key}"] == lease
        assert worker.assign_instance_id() == lease


async def test_a_key_that_a_stranger_took_is_put_back(server: EtcdServer) -> None:
    async with open_discovery(server) as worker:
        lease = worker.assign_instance_id()
        record = instance(lease)
        await worker.register(record)
        await server.delete(f"v1/instances/{record.key}")
        await wait_for_key(server, record, lease)
        await server.put(f"v1/instances/{record.key}", "{}")  # on no lease
        await wait_for_key(server, record, lease)
        before = await server.value(f"v1/instances/{record.key}")
        await server.put(f"v1/instances/{record.key}", "{}", lease)
        with trio.fail_after(SOON):
            while await server.value(f"v1/instances/{record.key}") != before:  # noqa: ASYNC110 - polls a process
                await trio.sleep(0.05)


async def test_what_changed_while_history_was_compacted_is_told(server: EtcdServer) -> None:
    """The watch starts over: its revision is gone from the server's history."""
    async with open_etcd_store(settings_for(server)) as store:
        async with store.watch("v1/mdc") as watch:
            await server.put("v1/mdc/gone", "1")
            await server.put("v1/mdc/changed", "1")
            seen = [await watch.next_change() for _ in range(2)]
            await server.kill()
            await trio.sleep(0.2)
            await server.start()
            await server.delete("v1/mdc/gone")
            await server.put("v1/mdc/changed", "2")
            await server.put("v1/mdc/new", "1")
            revision = str(await server.revision())
            await server.call("/v3/kv/compaction", {"revision": revision, "physical": True})
            told: dict[str, bytes | None] = {}
            with trio.fail_after(SOON):
                while told.keys() != {"gone", "changed", "new"}:
                    change = await watch.next_change()
                    told[change.key] = getattr(change, "value", None)
    assert told == {"gone": None, "changed": b"2", "new": b"1"}
    assert len(seen) == 2


async def test_to_withdraw_while_the_store_is_away_takes_no_longer_than_the_caller_gives(
    server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_discovery(server) as worker:
        await worker.register(instance(1))
        server.freeze()
        began = trio.current_time()
        with trio.move_on_after(0.3):
            await worker.unregister(instance(1))
        closing = trio.current_time()
        assert closing - began < 3.0
    try:
        # The revoke at the end has its own limit (0.5 s), and the lease runs out by itself.
        assert trio.current_time() - closing < 5.0
        assert "not revoked" in caplog.text
    finally:
        server.thaw()
    await wait_for_no_key(server)


async def test_what_was_withdrawn_in_an_outage_goes_when_the_store_is_back(
    server: EtcdServer,
) -> None:
    async with open_discovery(server) as worker:
        await worker.register(instance(1))
        await server.kill()
        await worker.unregister(instance(1))
        await server.start()
        await wait_for_no_key(server)


async def test_a_registration_waits_for_the_store(server: EtcdServer) -> None:
    async with open_discovery(server) as worker:
        lease = worker.assign_instance_id()
        await server.kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.register, instance(lease))
            await trio.sleep(0.3)
            await server.start()
        await wait_for_key(server, instance(lease), lease)
