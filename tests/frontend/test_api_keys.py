"""API keys: who is let in, and that no key is ever seen again."""

from __future__ import annotations

import hmac
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.errors import FileUnusable, InvalidApiKey
from dynamo_trio.frontend import keys as keys_module
from dynamo_trio.frontend.access import check_upgrade
from dynamo_trio.frontend.keys import MAX_KEYS, ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT = "/v1/chat/completions"
GOOD, OTHER = "sk-good-0123456789", "sk-other-0123456789"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# the first team\n{GOOD}\n\n  {OTHER}  \n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def scope(*authorizations: str, subprotocols: tuple[str, ...] = ()) -> dict[str, Any]:
    headers = [(b"authorization", value.encode("latin-1")) for value in authorizations]
    return {"type": "websocket", "headers": headers, "subprotocols": subprotocols}


def lets_in(keys: ApiKeys, *authorizations: str, **more: Any) -> bool:
    try:
        keys.check(scope(*authorizations, **more))
    except InvalidApiKey:
        return False
    return True


# --- at the door --------------------------------------------------------------------------------


async def test_only_who_has_a_key_may_ask(
    open_site: Opener, autojump_clock: MockClock, file: Path
) -> None:
    async with open_site() as site:
        site.frontend.keys = ApiKeys.read(file)
        for key in (GOOD, OTHER):
            assert (await site.client.ask("POST", CHAT, BODY, bearer(key))).status == 200
        for headers in ({}, bearer("sk-wrong"), bearer(""), {"authorization": f"Basic {GOOD}"}):
            answer = await site.client.ask("POST", CHAT, BODY, headers)
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "retry-after" not in answer.headers


async def test_without_a_key_nothing_is_learnt(
    open_site: Opener, autojump_clock: MockClock, file: Path
) -> None:
    async with open_site() as site:
        site.frontend.keys = ApiKeys.read(file)
        paths = ("/v1/models", "/v1/models/sim", "/v1/nowhere", "/nowhere", "/busy_threshold")
        for path in paths:
            assert (await site.client.ask("GET", path)).status == 401, path
        for path in ("/health", "/live", "/metrics"):
            assert (await site.client.ask("GET", path)).status == 200, path
        for path, status in zip(paths, (200, 200, 404, 404, 200), strict=True):
            assert (await site.client.ask("GET", path, None, bearer(GOOD))).status == status
        text = (await site.client.ask("GET", "/metrics")).body.decode()
        assert GOOD not in text


async def test_a_drain_is_told_to_everybody(
    open_site: Opener, autojump_clock: MockClock, file: Path
) -> None:
    async with open_site(http_drain=120.0) as site:
        site.frontend.keys = ApiKeys.read(file)
        running = site.client.start("POST", CHAT, {**BODY, "max_tokens": 50}, bearer(GOOD))
        await trio.sleep(0.5)
        site.lifecycle.request_stop("SIGTERM")
        for headers in ({}, bearer(GOOD)):
            answer = await site.client.ask("POST", CHAT, BODY, headers)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
        await running.done.wait()
        assert running.status == 200


async def test_a_websocket_needs_one_too(
    open_site: Opener, autojump_clock: MockClock, file: Path
) -> None:
    async with open_site() as site:
        site.frontend.keys = ApiKeys.read(file)
        check_upgrade(site.frontend, scope(f"Bearer {GOOD}"))
        offered = ("realtime", f"openai-insecure-api-key.{OTHER}")  # as browsers must
        check_upgrade(site.frontend, scope(subprotocols=offered))
        for refused in (scope(), scope(subprotocols=("realtime", "openai-insecure-api-key.no"))):
            with pytest.raises(InvalidApiKey):
                check_upgrade(site.frontend, refused)


async def test_no_key_is_in_a_log_line_or_a_repr(
    open_site: Opener, autojump_clock: MockClock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_site() as site:
        site.frontend.keys = ApiKeys.read(file)
        secret = "sk-" + "s3cr3t" * 5
        for key in (GOOD, secret):
            for path in (CHAT, "/v1/nowhere"):
                answer = await site.client.ask("POST", path, BODY, bearer(key))
                assert key.encode() not in answer.body
        said = caplog.text + repr(site.frontend) + repr(site.frontend.keys)
        assert "invalid_api_key" in said
        assert GOOD not in said
        assert secret not in said


def test_how_a_key_is_sent(file: Path) -> None:
    keys = ApiKeys.read(file)
    assert lets_in(keys, f"Bearer {GOOD}")
    assert lets_in(keys, f"bearer   {GOOD} ")
    assert not lets_in(keys, GOOD)
    assert not lets_in(keys, f"Bearer {GOOD}, {OTHER}")
    assert not lets_in(keys, f"Bearer {GOOD}", f"Bearer {OTHER}")  # which of them would count?
    assert not lets_in(keys, f"Bearer {GOOD}", subprotocols=(f"openai-insecure-api-key.{OTHER}",))
    assert lets_in(keys, f"Bearer {GOOD}", subprotocols=(f"openai-insecure-api-key.{GOOD}",))
    assert not lets_in(keys, "Bearer #")
    assert not lets_in(keys, "Bearer \xff")
    assert not lets_in(keys, "Bearer " + "x" * 30_000)


def test_a_key_is_compared_with_all_of_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared, real = ApiKeys.read(file), list[tuple[int, int]](), hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (GOOD, OTHER, "", "x" * 10_000):
        compared.clear()
        lets_in(keys, f"Bearer {key}")
        assert len(compared) == 3  # two of the file, and the process's own
        assert set(compared) == {(32, 32)}  # digests: neither a length nor a prefix shows


def test_the_processs_own_key(file: Path) -> None:
    keys = ApiKeys.read(file)
    assert not lets_in(keys, "Bearer ")
    assert lets_in(keys, f"Bearer {keys.own_key()}")
    assert lets_in(keys, f"Bearer {GOOD}")


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "at least one key"),
        (b"# only a comment\n\n", "at least one key"),
        (b"good\nbad one\n", "line 2 must be"),
        (b"good\n\xff\xfe\n", "line 2 must be"),
        (b"k" * 513, "line 1 must be"),
        (b"\n".join(b"k%d" % n for n in range(MAX_KEYS + 1)), "at most 1000 keys"),
        (b"#" * (1024 * 1024 + 1), "at most 1048576 bytes"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(FileUnusable, match=f"DYN_TRIO_API_KEYS_FILE=.*{says}") as caught:
        ApiKeys.read(path)
    assert "bad one" not in str(caught.value)
    assert FileUnusable.exit_code == 64


def test_a_file_of_an_editor_that_marks_its_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert lets_in(ApiKeys.read(path), f"Bearer {GOOD}")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, tmp_path / "fifo"):
        if path.name == "fifo":
            os.mkfifo(path)  # to open it would wait for a writer
        with pytest.raises(FileUnusable, match="DYN_TRIO_API_KEYS_FILE="):
            ApiKeys.read(path)


def write(path: Path, text: str) -> None:
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    """As Kubernetes replaces secrets: by another file."""
    other = path.with_name("next")
    other.write_text(text)
    other.rename(path)


async def test_what_changes_in_the_file_counts_without_a_restart(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_EVERY", 0.001)
    keys = ApiKeys.read(file)

    async def becomes(expected: list[bool]) -> None:
        with trio.fail_after(20):
            while [  # noqa: ASYNC110 - a file has no event
                lets_in(keys, f"Bearer {key}") for key in (GOOD, "sk-new")
            ] != expected:
                await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keys.follow)
        write(file, f"{GOOD}\nsk-new\n")
        await becomes([True, True])
        replace(file, "sk-new\n")
        await becomes([False, True])
        nursery.cancel_scope.cancel()


def test_a_file_that_goes_bad_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys.read(file)
    for spoil in (file.unlink, lambda: file.write_text("# nobody\n")):
        caplog.clear()
        spoil()
        for _ in range(5):
            keys._look()
        assert lets_in(keys, f"Bearer {GOOD}")
        assert caplog.text.count("the API keys stay as they were") == 1  # and not each second
        assert GOOD not in caplog.text
    file.write_text("sk-new\n")
    keys._look()
    assert lets_in(keys, "Bearer sk-new")
    assert not lets_in(keys, f"Bearer {GOOD}")
