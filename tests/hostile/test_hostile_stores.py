"""Discovery stores in the hands of a stranger: files of every kind, and an etcd that is none."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_trio.discovery import FileSettings, Instance, ModelCard, open_file_discovery
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_store
from dynamo_trio.discovery.spelling import read, spell
from dynamo_trio.discovery.stored import open_stored_discovery
from dynamo_trio.errors import RemoteProtocolError, StoreUnavailable
from dynamo_trio.wire.dynamo.keys import file_name
from tests.discovery.backends import card, instance
from tests.discovery.fake_etcd import Chunks, FakeEtcd
from tests.hostile.garbage import NASTY
from tests.hostile.test_hostile_worker_port import run

if TYPE_CHECKING:
    from pathlib import Path

KINDS: dict[str, Any] = {"instances": Instance, "mdc": ModelCard}
GOOD: dict[str, Any] = {"instances": instance(1), "mdc": card(1)}
KEY = "dynamo/backend/generate/1"


def values(bucket: str) -> list[bytes]:
    """Records that are none, or hardly."""
    good = json.loads(spell(GOOD[bucket]))
    odd: list[Any] = [
        *(None, True, 0, -1, 2**63, 2**64, 2**64 - 1, 1.5, "", NASTY, "\x00", "x" * 100_000),
        *([], {}, [[]], {"a": {"b": []}}, {"tcp": NASTY}, {"tcp": "h:1/" + "x" * 100_000}),
        *({"tcp": "[::1]:0/x"}, {"tcp": "a:99999/x"}, {"tcp": "a:1"}, {"http": "a"}),
    ]
    bent = [json.dumps(good | {name: value}).encode() for name in good for value in odd]
    if bucket == "mdc":
        inner = good["card_json"]
        bent += [
            json.dumps(good | {"card_json": inner | {name: value}}).encode()
            for name in inner
            for value in odd
        ]
    return [
        *bent,
        *(b"\0" * 100, b"\xff\xfe", b"null", b"1", b'""', b"[]", b"{}", b"{" * 100_000),
        *(b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000, b'{"type":"Model' + NASTY.encode()),
        *(spell(GOOD[bucket])[:-1], spell(GOOD[bucket]) * 2),
        b'{"type":"Endpoint","instance_id":' + b"9" * 5000 + b"}",
        b" " * 1_000_000,
    ]


@pytest.mark.parametrize("bucket", KINDS)
def test_a_value_is_a_record_or_a_reason(bucket: str) -> None:
    kind = KINDS[bucket]
    reasons: list[str] = []
    for value in values(bucket):
        try:
            record = read(kind, KEY, value)
        except RemoteProtocolError as exc:
            reasons.append(str(exc))
        else:
            assert record is None or record.key == KEY
            assert record == read(kind, KEY, value)
    assert len(reasons) > 100
    assert max(map(len, reasons)) < 1500


@given(st.binary(max_size=80), st.text(max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_value_under_any_key(value: bytes, key: str) -> None:
    for kind in KINDS.values():
        try:
            found = read(kind, key, value)
        except RemoteProtocolError:
            continue
        assert found is None


# --- files ----------------------------------------------------------------------------------


def litter(folder: Path, bucket: str) -> int:
    """Put everything that may lie in a directory there; returns how many values are no records."""
    folder.mkdir(parents=True, exist_ok=True)
    bad = values(bucket)
    for number, value in enumerate(bad, start=100):
        (folder / file_name(f"dynamo/backend/generate/{number:x}")).write_bytes(value)
    odd_keys = [NASTY, "\n", "../../../etc/passwd", "a/b/c/" + "f" * 17, "a/b/c/-1", "//", "é" * 20]
    for key in odd_keys:
        (folder / file_name(key)).write_bytes(spell(GOOD[bucket]))
    for name in ("not escaped", "%", "%zz", "%C3", ".hidden", "a" * 255, ".tmp_x", "%00"):
        (folder / name).write_bytes(b"{}")
    (folder / os.fsdecode(b"\xff\xfe")).write_bytes(b"{}")
    here = file_name("dynamo/backend/generate/f00f")
    (folder / f"{here}0").symlink_to("/dev/zero")
    (folder / f"{here}1").symlink_to(here)
    (folder / f"{here}2").symlink_to(f"{here}2")
    (folder / f"{here}3").mkdir()
    os.mkfifo(folder / f"{here}4")
    with (folder / f"{here}5").open("wb") as file:
        file.truncate(10 * 2**30)
    (folder / f"{here}6").write_bytes(b"")
    (folder / f"{here}7").write_bytes(b"{}")
    (folder / f"{here}7").chmod(0)
    return len(bad)


@pytest.mark.parametrize("bucket", KINDS)
async def test_a_directory_full_of_garbage(
    bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, good = KINDS[bucket], GOOD[bucket]
    folder = tmp_path / "v1" / bucket
    count = litter(folder, bucket)
    async with open_file_discovery(FileSettings(tmp_path)) as discovery:
        with trio.fail_after(30):
            async with discovery.watch(kind) as watch:
                assert good.key not in watch.snapshot
                before = len(watch.snapshot)
                await discovery.register(good)
                change = await watch.next_change()
                assert change.record == good
                litter(tmp_path / "more" / bucket, bucket)
                for path in (tmp_path / "more" / bucket).iterdir():
                    if not path.is_dir():
                        path.replace(folder / path.name)
                await discovery.unregister(good)
                while (await watch.next_change()).record != good:
                    pass
    assert before < count
    assert all(record.levelno <= logging.WARNING for record in caplog.records)
    assert all(record.exc_info is None for record in caplog.records)
    assert max(len(record.getMessage()) for record in caplog.records) < 2000
    keys = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert len(keys) == len(set(keys))  # each is complained of once


# --- etcd -------------------------------------------------------------------------------------

SETTINGS = EtcdSettings(
    endpoints=("http://a",), ttl=3.0, connect_time=0.5, answer_time=1.0, start_time=2.0,
    snapshot_time=2.0, close_time=0.5, max_answer=10_000, max_line=10_000,
)  # fmt: skip
RESULTS: list[Any] = [
    *({}, [], None, 1, "x", {"ID": "-5"}, {"ID": "0"}, {"ID": str(2**64)}, {"ID": NASTY}),
    *({"ID": "7", "TTL": "-1"}, {"ID": "7", "TTL": "x"}, {"result": {}}, {"result": None}),
    {"result": {"ID": "7", "TTL": "0"}},
    *({"error": NASTY, "code": 14}, {"message": NASTY, "code": "x"}, {"error": {"message": 1}}),
    {"header": {"revision": "-3"}, "kvs": [{"key": "!!"}]},
    {"header": {"revision": str(2**80)}, "kvs": [{"key": "/w==", "value": "/w=="}]},
    {"result": {"created": True, "events": [{"kv": {"key": "YQ==", "mod_revision": "-9"}}]}},
    {"result": {"canceled": True, "cancel_reason": NASTY * 100}},
    {"result": {"compact_revision": "5"}},
]
RAW = [json.dumps(result).encode() for result in RESULTS] + [
    *(b"", b"\0", b"\xff" * 50, b"{" * 5000, b"[" * 5000, b'{"error":"\xff"}', b'{"x":' * 2000),
    *(b"x" * 20_000, b"\n" * 20_000, b'{"ID":' + b"9" * 5000 + b"}", b"HTTP/1.1 200 OK\r\n\r\n"),
    b'{"result":{"created":true}}\n' * 3 + b'{"result":{"events":[{"kv":{}}]}}\n' * 50,
]
TOKENS = [b'{"token":"\xc3\xa9"}', b'{"token":"a\\nb: c"}', b'{"token":""}', b'{"token":[]}']
raw = st.one_of(st.sampled_from(RAW), st.binary(max_size=60))


@attrs.define(eq=False)
class Liar:
    """An etcd that is right about a lease as often as it is told to be, and then about nothing."""

    said: list[bytes]
    status: int
    honest_grants: int = 1
    asked: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if request.url.path == "/v3/lease/grant" and self.honest_grants > 0:
            self.honest_grants -= 1
            return httpx.Response(200, stream=Chunks([b'{"ID":"77","TTL":"3"}']))
        if request.url.path == "/v3/kv/range" and self.asked % 2:
            return httpx.Response(200, stream=Chunks([b'{"header":{"revision":"5"}}']))
        said = self.said[self.asked % len(self.said)]
        return httpx.Response(self.status, stream=Chunks([said]))


@given(st.lists(raw, min_size=1, max_size=5), st.sampled_from([200, 200, 400, 503]))
@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
def test_an_etcd_that_lies_is_an_outage(said: list[bytes], status: int) -> None:
    """Nothing ends, nobody spins, and what is registered is tried again."""

    async def test() -> None:
        liar = Liar(said, status)
        async with (
            open_etcd_store(SETTINGS, FakeEtcd({"a": liar})) as store,
            open_stored_discovery(store) as discovery,
            trio.open_nursery() as nursery,
        ):
            assert store.instance_id == 77
            nursery.start_soon(discovery.register, instance(77))
            nursery.start_soon(_watch, discovery)
            await trio.sleep(60)
            assert liar.asked < 60 * 20
            nursery.cancel_scope.cancel()

    run(test)


async def _watch(discovery: Any) -> None:
    async with discovery.watch(Instance) as watch:
        while True:
            await watch.next_change()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("number", [n for n, said in enumerate(RAW) if b'"7"' not in said])
async def test_a_start_against_an_etcd_that_lies(
    number: int, status: int, autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        async with open_etcd_store(SETTINGS, FakeEtcd({"a": Liar([RAW[number]], status, 0)})):
            raise AssertionError("there is no etcd")
    assert len(str(caught.value)) < 2000
    assert trio.current_time() < 10


@pytest.mark.parametrize("token", TOKENS)
async def test_tokens_that_are_none(token: bytes, autojump_clock: trio.testing.MockClock) -> None:
    named = attrs.evolve(SETTINGS, username="u", password="p")
    with pytest.raises(StoreUnavailable):
        async with open_etcd_store(named, FakeEtcd({"a": Liar([token], 200, 0)})):
            raise AssertionError("there is no etcd")
