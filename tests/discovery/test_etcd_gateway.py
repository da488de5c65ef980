"""How etcd is asked: endpoints in turn, tokens, limits, and what is made of odd answers."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from dynamo_trio.discovery.etcd import EtcdSettings, messages
from dynamo_trio.discovery.etcd.gateway import open_gateway
from dynamo_trio.discovery.etcd.messages import keep_alive, look_at, watch
from dynamo_trio.errors import StoreGarbled, StoreRefused, StoreUnavailable
from tests.discovery.fake_etcd import (
    FakeEtcd,
    breaks,
    hangs,
    in_turn,
    open_fake,
    refuses,
    says,
    says_json,
    streams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.discovery.fake_etcd import Answer

ALIVE = says_json({"result": {"ID": "7", "TTL": "10"}})
AB = ("http://a", "http://b")
AUTH = "/v3/auth/authenticate"
KEEP, LOOK = "/v3/lease/keepalive", "/v3/lease/timetolive"
USER = {"username": "u", "password": "p"}


# --- endpoints in turn -------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        breaks,
        says("<html>a web server</html>", 404),
        says("{", 200),
        says_json({"result": {"TTL": "many"}}),
        refuses("etcdserver: no leader", 14, 503),
    ],
    ids=["broken", "not etcd", "truncated", "mistyped", "no leader"],
)
async def test_another_endpoint_is_tried_and_the_good_one_is_kept(bad: Answer) -> None:
    fake = FakeEtcd({"a": bad, "b": ALIVE})
    async with open_fake(fake, *AB) as gateway:
        for _ in range(3):
            kept = await gateway.ask(keep_alive(7))
            assert kept.result is not None
            assert kept.result.ttl == 10
    assert [asked.host for asked in fake.asked] == ["a", "b", "b", "b"]


async def test_when_the_good_one_goes_the_first_is_tried_again() -> None:
    fake = FakeEtcd({"a": in_turn(breaks, ALIVE), "b": in_turn(ALIVE, breaks)})
    async with open_fake(fake, *AB) as gateway:
        await gateway.ask(keep_alive(7))
        await gateway.ask(keep_alive(7))
    assert [asked.host for asked in fake.asked] == ["a", "b", "b", "a"]


async def test_all_endpoints_and_their_reasons_are_named() -> None:
    fake = FakeEtcd({"b": refuses("etcdserver: no leader", 14, 503)})
    async with open_fake(fake, *AB) as gateway:
        with pytest.raises(StoreUnavailable, match=r"http://a: .*refused; http://b: .*no leader"):
            await gateway.ask(keep_alive(7))


async def test_what_keeps_from_connecting_is_said_once() -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        async with open_gateway(EtcdSettings(endpoints=(url,))) as gateway:
            with pytest.raises(StoreUnavailable) as caught:
                await gateway.ask(keep_alive(7))
    assert str(caught.value) == f"{url}: cannot connect: Connection refused"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (httpx.ConnectTimeout("cancelled due to deadline"), "no connection in time"),
        (httpx.ReadTimeout("cancelled due to deadline"), "no answer in time"),
        (httpx.ConnectError("no such name"), "cannot connect: no such name"),
        (httpx.ReadError(""), "ReadError: no reason given"),
    ],
)
async def test_what_the_network_does_is_said(error: httpx.TransportError, text: str) -> None:
    async def fails(_: httpx.Request) -> httpx.Response:
        raise error

    async with open_fake(FakeEtcd({"a": fails})) as gateway:
        with pytest.raises(StoreUnavailable, match=f"^http://a: {text}$"):
            await gateway.ask(keep_alive(7))


async def test_what_is_refused_everywhere_is_asked_once() -> None:
    fake = FakeEtcd({"a": refuses("etcdserver: permission denied", 7, 403), "b": ALIVE})
    async with open_fake(fake, *AB) as gateway:
        with pytest.raises(StoreRefused, match="permission denied") as caught:
            await gateway.ask(keep_alive(7))
    assert caught.value.code == 7
    assert fake.count("b") == 0


async def test_a_stream_goes_to_an_endpoint_that_begins_one() -> None:
    fake = FakeEtcd({"a": says("no", 502), "b": streams('{"result":{"created":true}}\n')})
    async with open_fake(fake, *AB) as gateway:
        async with gateway.stream(watch(b"v1/", 2)) as lines:
            line = await lines.next_line()
            assert line.result is not None
            assert line.result.created
            with pytest.raises(StoreUnavailable, match="ended"):
                await lines.next_line()


# --- limits ------------------------------------------------------------------------------


async def test_an_endpoint_that_hangs_has_its_time(autojump_clock: MockClock) -> None:
    fake = FakeEtcd({"a": hangs, "b": ALIVE})
    async with open_fake(fake, *AB, connect_time=2.0, answer_time=3.0) as gateway:
        await gateway.ask(keep_alive(7))
        assert trio.current_time() == pytest.approx(5.0)
        await gateway.ask(keep_alive(7))
        assert trio.current_time() == pytest.approx(5.0)


async def test_an_answer_that_drips_has_the_same_time(autojump_clock: MockClock) -> None:
    async def drips(_: httpx.Request) -> httpx.Response:
        return await streams('{"res', then_hang=True)(_)

    async with open_fake(FakeEtcd({"a": drips})) as gateway:
        with pytest.raises(StoreUnavailable, match="in time"):
            await gateway.ask(keep_alive(7))
        assert trio.current_time() == pytest.approx(5.0)


async def test_all_of_a_bucket_may_take_longer(autojump_clock: MockClock) -> None:
    async with open_fake(FakeEtcd({"a": hangs}), snapshot_time=30.0) as gateway:
        with pytest.raises(StoreUnavailable, match="in time"):
            await gateway.ask(messages.everything(b"v1/mdc/"))
        assert trio.current_time() == pytest.approx(32.0)


async def test_a_stream_that_does_not_begin_has_its_time(autojump_clock: MockClock) -> None:
    async with open_fake(FakeEtcd({"a": hangs})) as gateway:
        with pytest.raises(StoreUnavailable, match="in time"):
            async with gateway.stream(watch(b"v1/", 2)):
                pass
        assert trio.current_time() == pytest.approx(5.0)


async def test_no_more_is_read_than_the_limit() -> None:
    read = 0

    async def endless(_: httpx.Request) -> httpx.Response:
        class Endless(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                nonlocal read
                while True:
                    await trio.lowlevel.checkpoint()
                    read += 1000
                    yield b" " * 1000

        return httpx.Response(200, stream=Endless())

    async with open_fake(FakeEtcd({"a": endless}), max_answer=10_000, max_line=10_000) as gateway:
        with pytest.raises(StoreGarbled, match="more than 10000 bytes"):
            await gateway.ask(keep_alive(7))
        assert read == 11_000
        async with gateway.stream(watch(b"v1/", 2)) as lines:
            with pytest.raises(StoreGarbled, match="line of more than 10000 bytes"):
                await lines.next_line()
        assert read == 22_000


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says("x", headers={"content-encoding": "gzip"}), "content-encoding"),
        (says("Not Found", 404), "no etcd v3 JSON gateway here: HTTP 404 'Not Found'"),
        (says("", 302), "HTTP 302"),
        (says("[]"), "no answer of etcd"),
        (says(b"\xff\xfe"), "no answer of etcd"),
        (says("[" * 100_000), "no answer of etcd"),
        (says('{"result":{"TTL":"1' + "0" * 5000 + '"}}'), "no answer of etcd"),
    ],
    ids=["gzip", "404", "302", "list", "binary", "deep", "long number"],
)
async def test_what_is_no_answer_is_said_to_be_none(answer: Answer, words: str) -> None:
    async with open_fake(FakeEtcd({"a": answer})) as gateway:
        with pytest.raises(StoreGarbled, match=words):
            await gateway.ask(keep_alive(7))


async def test_lines_come_whole_whatever_the_pieces() -> None:
    text = '{"result":{"created":true}}\n{"result":{"compact_revision":"9"}}\n'
    fake = FakeEtcd({"a": streams(*text)})
    async with open_fake(fake) as gateway, gateway.stream(watch(b"v1/", 2)) as lines:
        first, second = await lines.next_line(), await lines.next_line()
    assert first.result == messages.WatchNews(created=True)
    assert second.result == messages.WatchNews(compact_revision=9)


# --- tokens ------------------------------------------------------------------------------

TOKEN = says_json({"token": "t1"})


async def test_a_token_is_fetched_once_and_shown() -> None:
    fake = FakeEtcd({AUTH: TOKEN, KEEP: ALIVE})
    async with open_fake(fake, **USER) as gateway:
        await gateway.ask(keep_alive(7))
        await gateway.ask(keep_alive(7))
    assert [asked.token for asked in fake.asked] == [None, "t1", "t1"]
    assert fake.asked[0].body == {"name": "u", "password": "p"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("etcdserver: invalid auth token", 16),
        ("etcdserver: user name is empty", 3),
        ("etcdserver: revision of auth store is old", 3),
    ],
)
async def test_a_stale_token_is_renewed_and_the_call_made_again(words: str, code: int) -> None:
    tokens = in_turn(TOKEN, says_json({"token": "t2"}))
    fake = FakeEtcd({AUTH: tokens, KEEP: in_turn(refuses(words, code, 401), ALIVE)})
    async with open_fake(fake, **USER) as gateway:
        await gateway.ask(keep_alive(7))
    assert [asked.token for asked in fake.asked] == [None, "t1", None, "t2"]


async def test_a_token_that_is_never_good_enough_ends_in_an_error() -> None:
    fake = FakeEtcd({AUTH: TOKEN, KEEP: refuses("etcdserver: invalid auth token", 16, 401)})
    async with open_fake(fake, **USER) as gateway:
        with pytest.raises(StoreRefused, match="invalid auth token"):
            await gateway.ask(keep_alive(7))
    assert fake.count(KEEP) == 2


async def test_a_wrong_password_names_the_user_and_not_the_password() -> None:
    wrong = refuses("etcdserver: authentication failed, invalid user ID or password", 3)
    async with open_fake(FakeEtcd({AUTH: wrong}), username="u", password="secret") as gateway:
        with pytest.raises(StoreRefused, match=r"user 'u': .*authentication failed") as caught:
            await gateway.ask(look_at(7))
    assert "secret" not in str(caught.value)


async def test_a_lease_is_kept_alive_though_the_password_was_changed(
    autojump_clock: MockClock,
) -> None:
    wrong = refuses("etcdserver: authentication failed, invalid user ID or password", 3)
    stale = refuses("etcdserver: invalid auth token", 16, 401)
    fake = FakeEtcd({AUTH: in_turn(TOKEN, wrong), KEEP: ALIVE, LOOK: stale})
    async with open_fake(fake, **USER) as gateway:
        await gateway.ask(keep_alive(7))
        for _ in range(20):
            with pytest.raises(StoreRefused, match="authentication failed"):
                await gateway.ask(look_at(7))
            await gateway.ask(keep_alive(7))
            await trio.sleep(1.0)
        assert fake.count(AUTH) == 1 + 20 / 5  # it is much work for etcd
        fake.answers |= {AUTH: TOKEN, LOOK: says_json({"TTL": "9"})}
        await gateway.ask(look_at(7))
    assert fake.asked[-1].token == "t1"


async def test_authentication_that_is_off_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    off = refuses("etcdserver: authentication is not enabled", 9, 412)
    fake = FakeEtcd({AUTH: off, KEEP: ALIVE})
    async with open_fake(fake, **USER) as gateway:
        await gateway.ask(keep_alive(7))
        await gateway.ask(keep_alive(7))
    assert [asked.token for asked in fake.asked] == [None, None, None]
    assert "authentication off" in caplog.text


async def test_a_stale_token_of_a_stream_is_renewed_for_the_next() -> None:
    line = streams('{"result":{"created":true}}\n')
    stale = refuses("etcdserver: invalid auth token", 16, 401)
    fake = FakeEtcd({AUTH: TOKEN, "/v3/watch": in_turn(stale, line)})
    async with open_fake(fake, **USER) as gateway:
        with pytest.raises(StoreRefused):
            async with gateway.stream(watch(b"v1/", 2)):
                pass
        async with gateway.stream(watch(b"v1/", 2)) as lines:
            await lines.next_line()
    assert fake.count(AUTH) == 2


def test_a_lease_lasts_whole_seconds_and_no_less_than_asked() -> None:
    assert b'"TTL":"3"' in messages.grant(0, 2.5).body
