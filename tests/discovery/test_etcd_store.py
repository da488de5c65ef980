"""The store over a real etcd, in quiet times."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.discovery.etcd import EtcdSettings, EtcdStore, open_etcd_store
from dynamo_trio.discovery.store import StoreKey, StorePut, StoreRemoved
from dynamo_trio.errors import StoreGarbled, StoreRefused, StoreUnavailable
from tests.discovery.etcd_server import EtcdServer, b64, free_port, open_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.discovery.store import StoreChange, StoreWatch

BUCKET = "v1/instances"
AT = StoreKey(BUCKET, "ns/backend/generate/1")
#: Far above what anything here needs, in seconds.
SOON = 10.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    async with open_etcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
async def store(server: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as store:
        yield store


async def next_change(watch: StoreWatch) -> StoreChange:
    with trio.fail_after(SOON):
        return await watch.next_change()


def key(number: int) -> StoreKey:
    return StoreKey(BUCKET, f"ns/backend/generate/{number}")


async def test_the_identity_is_the_lease_and_all_keys_hang_on_it(
    server: EtcdServer, store: EtcdStore
) -> None:
    await store.put(AT, b"{}")
    assert await server.keys() == {f"{BUCKET}/{AT.key}": store.instance_id}
    assert 0 < store.instance_id < 2**63
    assert 0 < await server.ttl(store.instance_id) <= 10


async def test_the_lease_is_revoked_at_the_end(server: EtcdServer) -> None:
    async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as store:
        await store.put(AT, b"{}")
    assert await server.keys() == {}
    assert await server.ttl(store.instance_id) == -1


async def test_a_lease_is_kept_alive(server: EtcdServer) -> None:
    settings = EtcdSettings(endpoints=(server.url,), ttl=1.0)
    async with open_etcd_store(settings) as store:
        await store.put(AT, b"{}")
        await trio.sleep(3.5)
        assert await server.keys() == {f"{BUCKET}/{AT.key}": store.instance_id}


async def test_a_value_is_replaced_by_its_owner_only(server: EtcdServer, store: EtcdStore) -> None:
    await store.put(AT, b"1")
    await store.put(AT, b"2")
    async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as stranger:
        with pytest.raises(StoreRefused, match=f"{AT.key} belongs to .*{store.instance_id:x}"):
            await stranger.put(AT, b"3")
        async with stranger.watch(BUCKET) as watch:
            assert dict(watch.snapshot) == {AT.key: b"2"}


async def test_the_echo_of_an_earlier_try_is_ours(server: EtcdServer, store: EtcdStore) -> None:
    """The first attempt may have worked although its answer was lost."""
    body = {"key": b64(f"{BUCKET}/{AT.key}"), "value": b64("1"), "lease": str(store.instance_id)}
    await server.call("/v3/kv/put", body)
    await store.put(AT, b"2")
    async with store.watch(BUCKET) as watch:
        assert dict(watch.snapshot) == {AT.key: b"2"}


async def test_a_process_sees_what_it_wrote(store: EtcdStore) -> None:
    async with store.watch(BUCKET) as early:
        for number in range(20):
            await store.put(key(number), b"x")
            async with store.watch(BUCKET) as watch:
                assert key(number).key in watch.snapshot
            await store.delete(key(number))
            async with store.watch(BUCKET) as watch:
                assert key(number).key not in watch.snapshot
        assert not early.snapshot


async def test_nothing_is_missed_between_the_reading_and_the_watch(
    server: EtcdServer, store: EtcdStore
) -> None:
    """Writers write all the while; whoever begins to read, whenever, ends with all of it."""

    async def write(first: int) -> None:
        for number in range(first, first + 25):
            await store.put(key(number), b"%d" % number)

    async def read() -> None:
        async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as reader:
            async with reader.watch(BUCKET) as watch:
                seen = dict(watch.snapshot)
                begun_with.append(len(seen))
                while len(seen) < 100:
                    change = await next_change(watch)
                    assert isinstance(change, StorePut)
                    assert change.key not in seen
                    seen[change.key] = change.value
        assert seen == {key(n).key: b"%d" % n for n in range(100)}

    begun_with: list[int] = []
    async with trio.open_nursery() as nursery:
        for first in range(0, 100, 25):
            nursery.start_soon(write, first)
        for _ in range(8):
            nursery.start_soon(read)
            await trio.sleep(0.01)
    assert len(begun_with) == 8


async def test_all_readers_of_a_bucket_share_one_stream(store: EtcdStore) -> None:
    async with store.watch(BUCKET) as one, store.watch(BUCKET) as two:
        await store.put(AT, b"1")
        assert await next_change(one) == await next_change(two) == StorePut(AT.key, b"1")
    assert len(store._followers) == 1


async def test_other_buckets_are_not_seen(server: EtcdServer, store: EtcdStore) -> None:
    await server.put("v1/instances_of_another_kind/x", "1")
    await server.put("v1/instances", "1")
    async with store.watch(BUCKET) as watch:
        await server.put("v1/instancesx/x", "1")
        await store.put(StoreKey("v1/mdc", AT.key), b"1")
        await store.put(AT, b"1")
        assert not watch.snapshot
        assert await next_change(watch) == StorePut(AT.key, b"1")


async def test_a_key_that_is_no_text_is_passed_over(
    server: EtcdServer, store: EtcdStore, caplog: pytest.LogCaptureFixture
) -> None:
    for raw in (b"v1/instances/\xff", b"v1/instances/\xfe"):
        body = {"key": base64.b64encode(raw).decode(), "value": ""}
        await server.call("/v3/kv/put", body)
        async with store.watch(BUCKET) as watch:
            assert not watch.snapshot
    await store.put(AT, b"1")
    async with store.watch(BUCKET) as watch:
        assert dict(watch.snapshot) == {AT.key: b"1"}
    assert "no text" in caplog.text


async def test_quick_changes_of_strangers_come_in_order(
    server: EtcdServer, store: EtcdStore
) -> None:
    async with store.watch(BUCKET) as watch:
        for value in "123":
            await server.put(f"{BUCKET}/a", value)
        await server.delete(f"{BUCKET}/a")
        seen = [await next_change(watch) for _ in range(4)]
    assert seen == [*(StorePut("a", b"%d" % n) for n in (1, 2, 3)), StoreRemoved("a")]


async def test_a_large_bucket_and_large_values(server: EtcdServer, store: EtcdStore) -> None:
    value = b"x" * 1_000_000
    async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as reader:
        async with reader.watch(BUCKET) as watch:
            for number in range(5):
                await store.put(key(number), value)
            for number in range(5):
                assert await next_change(watch) == StorePut(key(number).key, value)
        async with reader.watch("v1/mdc"), store.watch(BUCKET) as watch:
            assert len(watch.snapshot) == 5


async def test_a_dead_first_endpoint_costs_nothing_but_its_try(server: EtcdServer) -> None:
    endpoints = (f"http://127.0.0.1:{free_port()}", server.url)
    async with open_etcd_store(EtcdSettings(endpoints=endpoints)) as store:
        async with store.watch(BUCKET) as watch:
            await store.put(AT, b"1")
            assert await next_change(watch) == StorePut(AT.key, b"1")


async def test_a_start_without_a_store_is_said_and_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match=url):
        async with open_etcd_store(EtcdSettings(endpoints=(url,), start_time=0.5)):
            pass
    assert url in caplog.text


async def test_a_start_waits_for_a_store_that_comes(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    async with trio.open_nursery() as nursery:
        try:
            nursery.start_soon(server.start)
            async with open_etcd_store(EtcdSettings(endpoints=(server.url,))) as store:
                await store.put(AT, b"1")
                assert await server.keys() == {f"{BUCKET}/{AT.key}": store.instance_id}
        finally:
            await server.kill()


async def test_an_etcd_without_its_gateway_is_told_apart(tmp_path: Path) -> None:
    async with open_etcd(tmp_path / "etcd", ("--enable-grpc-gateway=false",)) as server:
        settings = EtcdSettings(endpoints=(server.url,), start_time=0.2)
        with pytest.raises(StoreGarbled, match="no etcd v3 JSON gateway here"):
            async with open_etcd_store(settings):
                pass
