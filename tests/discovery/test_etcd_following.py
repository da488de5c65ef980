"""Contact, lease and follower against an etcd that answers as each test wishes, on a mock clock."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio

from dynamo_trio.discovery.etcd import EtcdSettings, EtcdStore, open_etcd_store
from dynamo_trio.discovery.etcd.contact import Backoff, Contact
from dynamo_trio.discovery.etcd.lease import Owned
from dynamo_trio.discovery.store import StoreKey, StorePut, StoreRemoved
from dynamo_trio.errors import StoreRefused, StoreUnavailable
from tests.discovery.etcd_server import b64
from tests.discovery.fake_etcd import FakeEtcd, breaks, in_turn, refuses, says, says_json, streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.discovery.store import StoreWatch
    from tests.discovery.fake_etcd import Answer

GRANT, KEEP, LOOK = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/timetolive"
RANGE, WATCH, REVOKE = "/v3/kv/range", "/v3/watch", "/v3/lease/revoke"
PUT, TXN = "/v3/kv/put", "/v3/kv/txn"
BUCKET = "v1/instances"
AT = StoreKey(BUCKET, "a")
SETTINGS = EtcdSettings(endpoints=("http://a",))  # a TTL of 10 s, a hold of 18 s

ALIVE = says_json({"result": {"ID": "7", "TTL": "10"}})
GONE = says_json({"result": {"ID": "7"}})
A_IS_THERE = {"header": {"revision": "5"}, "kvs": [{"key": b64(f"{BUCKET}/a"), "value": b64("1")}]}
CREATED = '{"result":{"created":true}}\n'
DELETED = {"type": "DELETE", "kv": {"key": b64(f"{BUCKET}/a"), "mod_revision": "6"}}


def quiet_etcd(**more: Any) -> FakeEtcd:
    """One in which nothing happens."""
    answers = {
        GRANT: says_json({"ID": "7", "TTL": "10"}),
        KEEP: ALIVE,
        LOOK: says_json({"TTL": "9"}),
        REVOKE: says("{}"),
        RANGE: says_json(A_IS_THERE),
        WATCH: streams(CREATED, then_hang=True),
        TXN: transacts(mod_revision=6),
        PUT: says_json({"header": {"revision": "7"}}),
    }
    return FakeEtcd(answers)


def transacts(*, mod_revision: int, lease: int = 7) -> Answer:
    """Creates what is to be created, with revision 6; shows the key "a" to who looks at it."""
    created = says_json({"header": {"revision": "6"}, "succeeded": True})
    kv = {"key": b64(f"{BUCKET}/a"), "mod_revision": str(mod_revision), "lease": str(lease)}
    looked = says_json({"responses": [{"response_range": {"kvs": [kv] if mod_revision else []}}]})

    async def answer(request: httpx.Request) -> httpx.Response:
        is_look = "compare" not in json.loads(await request.aread())
        return await (looked if is_look else created)(request)

    return answer


@attrs.define(eq=False)
class Pipe(httpx.AsyncByteStream):
    """A watch stream into which the test writes."""

    _send: trio.MemorySendChannel[str]
    _receive: trio.MemoryReceiveChannel[str]

    @classmethod
    def make(cls) -> Pipe:
        return cls(*trio.open_memory_channel[str](10))

    def write(self, **result: Any) -> None:
        self._send.send_nowait(json.dumps({"result": result}) + "\n")

    async def answer(self, _: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield CREATED.encode()
        async for line in self._receive:
            yield line.encode()


@asynccontextmanager
async def open_watch(fake: FakeEtcd) -> AsyncIterator[tuple[EtcdStore, StoreWatch]]:
    async with open_etcd_store(SETTINGS, fake) as store, store.watch(BUCKET) as watch:
        yield store, watch


def state(contact: Contact) -> str:
    if contact.is_away:
        assert contact.in_doubt
        return "away"
    return "there, in doubt" if contact.in_doubt else "there"


# --- contact -----------------------------------------------------------------------------


async def test_doubt_begins_with_silence_and_ends_a_hold_after_it(mock_clock: MockClock) -> None:
    contact = Contact(SETTINGS)
    mock_clock.jump(4.0)
    assert state(contact) == "there"
    mock_clock.jump(0.1)
    assert state(contact) == "away"
    for _ in range(9):
        contact.heard()
        assert state(contact) == "there, in doubt"
        mock_clock.jump(2.0)
    assert state(contact) == "there"


async def test_an_outage_is_told_at_once_and_then_now_and_again(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    contact = Contact(SETTINGS)
    for _ in range(200):
        contact.failed("lease", "refused")
        mock_clock.jump(0.1)
    contact.heard("lease")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "etcd fails (refused); trying on"  # nothing was ever known of it
    assert [text.split(" s ")[0] for text in messages[1:4]] == [
        f"etcd has been failing for {n}" for n in (5, 10, 15)
    ]
    assert messages[4:] == ["etcd answers again after 20.0 s"]


async def test_a_store_that_flaps_does_not_fill_the_log(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    contact = Contact(SETTINGS)
    for _ in range(100):
        contact.failed("lease", "reset")
        contact.heard("lease")
        mock_clock.jump(0.1)
    assert len(caplog.records) <= 2 * 2


async def test_a_part_that_fails_beside_others_that_do_not_makes_one_story(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    contact = Contact(SETTINGS)
    for _ in range(12):
        contact.heard("lease")
        contact.failed("v1/mdc", "permission denied")
        contact.failed("v1/instances", "permission denied")
        mock_clock.jump(1.0)
    for part in ("v1/mdc", "lease", "v1/instances"):
        contact.heard(part)
    why = "(permission denied); what was last known of it stays in use"
    assert [record.getMessage() for record in caplog.records] == [
        f"etcd fails {why}",
        f"etcd has been failing for 5 s {why}",
        f"etcd has been failing for 10 s {why}",
        "etcd answers again after 12.0 s",
    ]


async def test_only_the_time_when_it_is_there_counts(mock_clock: MockClock) -> None:
    contact = Contact(SETTINGS)
    for pause in (2.0, 3.0, 4.1, 60.0, 1.0):
        mock_clock.jump(pause)
        contact.heard()
    assert contact.seconds_there == pytest.approx(6.0)


def test_pauses_grow_to_their_cap_and_differ() -> None:
    backoff = Backoff(cap=1.0)
    pauses = [backoff.pause() for _ in range(50)]
    assert all(0 < pause <= 1.0 for pause in pauses)
    assert pauses[0] <= 0.05
    assert len({*pauses[10:]}) > 10
    backoff.reset()
    assert backoff.pause() <= 0.05


# --- what is owned -----------------------------------------------------------------------


async def test_a_loss_is_told_once() -> None:
    owned = Owned()
    owned.add(AT)
    owned.lose(owned.now())
    owned.lose(owned.now())
    assert await owned.wait_lost() == {AT}
    assert AT not in owned
    with trio.move_on_after(0.01) as silent:
        await owned.wait_lost()
    assert silent.cancelled_caught


async def test_what_was_written_or_dropped_since_is_not_lost() -> None:
    owned, b, c = Owned(), StoreKey(BUCKET, "b"), StoreKey(BUCKET, "c")
    for at in (AT, b, c):
        owned.add(at)
    then = owned.now()
    owned.add(AT)
    owned.drop(b)
    owned.lose(then)
    assert await owned.wait_lost() == {c}
    assert AT in owned


async def test_a_loss_that_is_mended_or_unwanted_is_not_told() -> None:
    owned, b = Owned(), StoreKey(BUCKET, "b")
    owned.add(AT)
    owned.add(b)
    owned.lose(owned.now())
    owned.add(AT)
    owned.drop(b)
    with trio.move_on_after(0.01) as silent:
        await owned.wait_lost()
    assert silent.cancelled_caught


# --- the lease ---------------------------------------------------------------------------


async def test_a_lost_lease_is_granted_again_under_its_id(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        await trio.sleep(0.1)  # not in the middle of the first pulse
        await store.put(AT, b"1")
        fake.answers[KEEP] = in_turn(GONE, ALIVE)
        assert await store.wait_lost() == {AT}
        assert trio.current_time() <= SETTINGS.pulse
        assert store.instance_id == 7
        await store.put(AT, b"1")
    assert [asked.body["ID"] for asked in fake.asked if asked.path == GRANT] == ["0", "7"]
    assert fake.asked[-1].path == REVOKE


async def test_a_lease_that_is_just_going_is_waited_for(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        await trio.sleep(0.1)  # not in the middle of the first pulse
        await store.put(AT, b"1")
        exists = refuses("etcdserver: lease already exists", 9, 412)
        fake.answers[GRANT] = in_turn(exists, exists, says_json({"ID": "7", "TTL": "10"}))
        fake.answers[KEEP] = in_turn(GONE, GONE, GONE, ALIVE)
        assert await store.wait_lost() == {AT}
    assert fake.count(GRANT) == 1 + 3


async def test_a_put_that_meets_a_lost_lease_hurries_the_keeper(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        await trio.sleep(0.1)
        fake.answers[TXN] = refuses("etcdserver: requested lease not found", 5, 404)
        fake.answers[KEEP] = in_turn(GONE, ALIVE)
        with pytest.raises(StoreRefused, match="lease not found"):
            await store.put(AT, b"1")
        await trio.sleep(0.1)
        assert fake.count(GRANT) == 2


@pytest.mark.parametrize(
    "found",
    [{"mod_revision": 0}, {"mod_revision": 6, "lease": 8}, {"mod_revision": 9}],
    ids=["deleted", "on another lease", "overwritten on our own"],
)
async def test_what_a_stranger_did_to_a_key_is_told_within_a_pulse(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, found: dict[str, int]
) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        await store.put(AT, b"1")
        await trio.sleep(20.0)
        fake.answers[TXN] = transacts(**found)
        assert await store.wait_lost() == {AT}
        assert trio.current_time() <= 20.0 + SETTINGS.pulse + 0.1
    assert "no longer in etcd as we wrote them" in caplog.text


async def test_a_write_whose_answer_is_on_its_way_is_no_strangers(
    autojump_clock: MockClock,
) -> None:
    """Nor is one whose answer was lost."""
    fake, lost = quiet_etcd(), list[frozenset[StoreKey]]()

    async def note_losses() -> None:
        lost.append(await store.wait_lost())

    async def slow(request: httpx.Request) -> httpx.Response:
        fake.answers[TXN] = transacts(mod_revision=7)
        await trio.sleep(4.0)
        return await says_json({"header": {"revision": "7"}})(request)

    async with open_etcd_store(SETTINGS, fake) as store, trio.open_nursery() as nursery:
        nursery.start_soon(note_losses)
        await store.put(AT, b"1")
        fake.answers[PUT] = in_turn(slow, breaks)
        await store.put(AT, b"2")
        await trio.sleep(10.0)
        fake.answers[TXN] = transacts(mod_revision=8)
        with pytest.raises(StoreUnavailable):
            await store.put(AT, b"3")
        await trio.sleep(10.0)
        assert not lost
        nursery.cancel_scope.cancel()


async def test_many_keys_are_looked_at_in_several_transactions(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        for number in range(250):
            store._keeper.owned.add(StoreKey(BUCKET, str(number)))
        assert len(await store.wait_lost()) == 100
        await trio.sleep(0.1)
    sizes = [len(asked.body["success"]) for asked in fake.asked if asked.path == TXN]
    assert sizes == [100, 100, 50]


@pytest.mark.parametrize("user", [{}, {"username": "low", "password": "x"}], ids=["none", "low"])
async def test_who_may_not_read_does_not_start(
    autojump_clock: MockClock, user: dict[str, Any]
) -> None:
    fake = quiet_etcd()
    fake.answers["/v3/auth/authenticate"] = says_json({"token": "t"})
    fake.answers[RANGE] = refuses("etcdserver: permission denied", 7, 403)
    settings = attrs.evolve(SETTINGS, **user)
    with pytest.raises(StoreRefused, match=r"permission denied.*ETCD_AUTH_USERNAME"):
        async with open_etcd_store(settings, fake, buckets=["v1/mdc", BUCKET]):
            pass
    assert trio.current_time() == 0.0
    assert fake.count(GRANT) == 0  # so nothing is left behind


async def test_a_silent_store_is_asked_again_but_not_without_pause(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake):
        fake.answers = {}
        before = len(fake.asked)
        await trio.sleep(60.0)
        assert 60 <= len(fake.asked) - before <= 150
    told = [r for r in caplog.records if "etcd " in r.getMessage()]
    assert 11 <= len(told) <= 14


# --- the follower ------------------------------------------------------------------------


async def test_a_removal_in_quiet_times_is_told_at_once(autojump_clock: MockClock) -> None:
    fake, pipe = quiet_etcd(), Pipe.make()
    fake.answers[WATCH] = pipe.answer
    async with open_watch(fake) as (_, watch):
        await trio.sleep(60.0)
        pipe.write(events=[DELETED])
        assert await watch.next_change() == StoreRemoved("a")
        assert trio.current_time() == 60.0


async def test_a_removal_after_an_outage_is_told_when_it_stayed_away(
    autojump_clock: MockClock,
) -> None:
    """The old stream brings nothing any more: it is renewed when the store is back."""
    fake, before, after = quiet_etcd(), Pipe.make(), Pipe.make()
    fake.answers[WATCH] = in_turn(before.answer, after.answer)
    async with open_watch(fake) as (_, watch):
        await trio.sleep(1.0)
        fake.answers[KEEP] = breaks
        await trio.sleep(10.0)
        fake.answers[KEEP] = ALIVE
        await trio.sleep(5.0)
        assert fake.count(WATCH) == 2
        after.write(events=[DELETED])
        with trio.fail_after(60):
            assert await watch.next_change() == StoreRemoved("a")
        assert trio.current_time() == pytest.approx(16.0 + SETTINGS.hold, abs=SETTINGS.pulse + 1)


async def test_outages_do_not_make_the_dead_live_longer(autojump_clock: MockClock) -> None:
    """The store is away for 5.5 s of every 17.5; the key goes after the first outage."""
    fake, pipes = quiet_etcd(), [Pipe.make() for _ in range(20)]
    nothing = {"header": {"revision": "6"}}
    fake.answers[RANGE] = in_turn(*[says_json(A_IS_THERE)] * 2, says_json(nothing))
    fake.answers[WATCH] = in_turn(*(pipe.answer for pipe in pipes))

    async def flap() -> None:
        while True:
            fake.answers[KEEP] = breaks
            await trio.sleep(5.5)
            fake.answers[KEEP] = ALIVE
            await trio.sleep(12.0)

    async with open_watch(fake) as (_, watch), trio.open_nursery() as nursery:
        await trio.sleep(0.1)
        nursery.start_soon(flap)
        await trio.sleep(7.0)
        pipes[1].write(events=[DELETED])
        with trio.fail_after(60.0):
            assert await watch.next_change() == StoreRemoved("a")
        # 18 s of its presence, in which it is away for 5.5 s, and is not believed for up to 3 s.
        assert 7.0 + SETTINGS.hold <= trio.current_time() <= 7.0 + SETTINGS.hold + 12.0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("revision", "our_lease", "at_once"),
    [("9", "9", True), ("9", "-1", False), ("2", "9", False)],
    ids=["the same store", "it lost our lease", "it lost history"],
)
async def test_a_watch_that_broke_off_alone_casts_no_doubt(
    autojump_clock: MockClock, revision: str, our_lease: str, at_once: bool
) -> None:
    fake, after = quiet_etcd(), {"header": {"revision": revision}}
    fake.answers[LOOK] = says_json({"TTL": our_lease})
    fake.answers[RANGE] = in_turn(says_json(A_IS_THERE), says_json(after))
    fake.answers[WATCH] = in_turn(streams(CREATED), streams(CREATED, then_hang=True))
    async with open_watch(fake) as (_, watch):
        assert await watch.next_change() == StoreRemoved("a")
        took = trio.current_time()
    assert took < 1.0 if at_once else SETTINGS.hold <= took <= SETTINGS.hold + 2 * SETTINGS.pulse


async def test_a_store_that_lost_our_lease_is_in_doubt(autojump_clock: MockClock) -> None:
    """Before it is granted again, when it would seem to have been there all the time."""
    fake = quiet_etcd()
    async with open_etcd_store(SETTINGS, fake) as store:
        await trio.sleep(0.1)
        fake.answers[KEEP] = in_turn(GONE, ALIVE)
        fake.answers[GRANT] = in_turn(breaks)
        await trio.sleep(SETTINGS.pulse)
        assert store._contact.in_doubt
        assert not store._contact.is_away


async def test_a_removal_in_the_dark_waits_and_what_comes_back_was_never_gone(
    autojump_clock: MockClock,
) -> None:
    """A frozen server that wakes up may tell of removals before it answers anything."""
    fake, pipe = quiet_etcd(), Pipe.make()
    fake.answers[WATCH] = pipe.answer
    async with open_watch(fake) as (_, watch):
        fake.answers[KEEP] = breaks
        await trio.sleep(8.0)
        pipe.write(events=[DELETED])
        await trio.sleep(1.0)
        fake.answers[KEEP] = ALIVE  # and the reading after it shows the key again
        with trio.move_on_after(100.0) as silent:
            await watch.next_change()
        assert silent.cancelled_caught


@pytest.mark.parametrize(
    "line",
    [
        '{"result":{"canceled":true,"cancel_reason":"etcdserver: no leader"}}\n',
        '{"error":{"grpc_code":14,"message":"etcdserver: server stopped"}}\n',
        '{"error":{"code":14,"message":"etcdserver: server stopped"}}\n',
        "{}\n",
        "<html>\n",
        '{"result":{"events":[{"type":"PUT"}]}}\n',
        '{"result":{"compact_revision":"9","canceled":true}}\n',
        "",
    ],
    ids=["canceled", "error", "error 3.6", "empty", "garbage", "no kv", "compacted", "eof"],
)
async def test_whatever_ends_a_watch_all_is_read_again(
    autojump_clock: MockClock, line: str
) -> None:
    fake = quiet_etcd()
    changed = {**A_IS_THERE, "kvs": [{"key": b64(f"{BUCKET}/a"), "value": b64("2")}]}
    fake.answers[RANGE] = in_turn(says_json(A_IS_THERE), says_json(changed))
    fake.answers[WATCH] = in_turn(streams(CREATED, line), streams(CREATED, then_hang=True))
    async with open_watch(fake) as (_, watch):
        assert await watch.next_change() == StorePut("a", b"2")
        await trio.sleep(1.0)
    assert fake.count(RANGE) == fake.count(WATCH) == 2
    assert fake.asked[-1].path == REVOKE


async def test_a_watch_that_always_breaks_is_not_begun_without_pause(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    fake = quiet_etcd()
    fake.answers[WATCH] = streams(CREATED)
    async with open_watch(fake):
        await trio.sleep(60.0)
    assert 60 <= fake.count(RANGE) <= 150
    assert len(caplog.records) <= 15


async def test_a_watch_that_is_never_created_has_its_time(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    fake.answers[WATCH] = in_turn(streams(then_hang=True), streams(CREATED, then_hang=True))
    async with open_watch(fake):
        await trio.sleep(5.0)
    assert fake.count(WATCH) == 2


async def test_who_has_never_seen_anything_is_told_why(autojump_clock: MockClock) -> None:
    fake = quiet_etcd()
    fake.answers[RANGE] = in_turn(breaks, breaks, says_json(A_IS_THERE))
    async with open_etcd_store(SETTINGS, fake) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="reset by peer"):
                async with store.watch(BUCKET):
                    pass
        async with store.watch(BUCKET) as watch:
            assert dict(watch.snapshot) == {"a": b"1"}


async def test_a_reader_does_not_wait_for_a_store_that_does_not_move(
    autojump_clock: MockClock,
) -> None:
    """What it wrote itself should be in the view, but the watch brings nothing."""
    async with open_watch(quiet_etcd()) as (store, _):
        await trio.sleep(1.0)
        await store.put(AT, b"2")
        began = trio.current_time()
        async with store.watch(BUCKET) as watch:
            assert dict(watch.snapshot) == {"a": b"1"}
        assert trio.current_time() - began == pytest.approx(SETTINGS.answer_time)
