"""Fetching what a card points to: nothing is believed but the checksum."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import trio

from dynamo_trio.discovery import ModelCard
from dynamo_trio.errors import CardUnusable, FileUnusable
from dynamo_trio.models import card_files, card_loader, card_store
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.models.card_files import digest_of, files_of
from dynamo_trio.models.card_loader import CardLimits, fetch_card
from dynamo_trio.testing import make_model_folder
from dynamo_trio.tokenizers import load_tokenizer
from dynamo_trio.wire.dynamo.card import CardJson, TokenizerInfo
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GENERATE = EndpointId("dynamo", "backend", "generate")


def card_of(folder: Path, **more: Any) -> CardJson:
    card = make_card(folder, name="tiny", endpoint=GENERATE, instance_id=7, **more)
    assert isinstance(card, ModelCard)
    assert card.card_json is not None
    return card.card_json


def with_tokenizer(card: CardJson, **changes: Any) -> CardJson:
    """The card with its entry for tokenizer.json changed."""
    assert card.tokenizer is not None
    file = card.tokenizer.hf_tokenizer_json
    assert not isinstance(file, msgspec.UnsetType)
    changed = msgspec.structs.replace(file, **changes)
    return msgspec.structs.replace(card, tokenizer=TokenizerInfo(hf_tokenizer_json=changed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def assert_same(fetched: Path, folder: Path) -> None:
    assert {p.name for p in fetched.iterdir()} == {p.name for p in folder.iterdir()}
    for file in folder.iterdir():
        assert (fetched / file.name).read_bytes() == file.read_bytes()


def names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


# --- from paths and file URLs ------------------------------------------------------------------


async def test_from_paths(folder: Path, cache: Path) -> None:
    fetched = await fetch_card(card_of(folder), cache)
    assert_same(fetched, folder)
    assert load_tokenizer(fetched).context_length == 8192


@pytest.mark.parametrize("name", ["a b", "ü%20#?&", "-x", "..x", "new\nline", 'quo"te', "\udcff"])
async def test_from_odd_paths_and_their_urls(tmp_path: Path, cache: Path, name: str) -> None:
    folder = make_model_folder(tmp_path / name)
    file = folder / "tokenizer.json"
    plain = card_of(make_model_folder(tmp_path / "plain"))
    for number, source in enumerate(
        (str(file), file.as_uri(), f"file://localhost{file.as_uri()[7:]}")
    ):
        fetched = await fetch_card(with_tokenizer(plain, path=source), cache / str(number))
        assert (fetched / "tokenizer.json").read_bytes() == file.read_bytes()


async def test_links_are_followed(tmp_path: Path, folder: Path, cache: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder / "tokenizer.json")
    fetched = await fetch_card(with_tokenizer(card_of(folder), path=str(link)), cache)
    assert_same(fetched, folder)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/no/such/file", "No such file"),
        ("tokenizer.json", "no absolute path and no known URL"),
        ("../tokenizer.json", "no absolute path and no known URL"),
        ("org/model", "no absolute path and no known URL"),
        ("ftp://x/y", "no absolute path and no known URL"),
        ("", "no absolute path and no known URL"),
        ("file://elsewhere/etc/passwd", "not a file of this machine"),
        ("file:tokenizer.json", "not a file of this machine"),
        ("file://[/x", "Invalid IPv6"),
        ("file:///x%00y", "null byte"),
        ("/x\x00y", "null byte"),
        ("/lone\ud800", "surrogates not allowed"),
        ("/" + "x" * 300, "File name too long"),
        ("/dev/zero", "not a regular file"),
        ("hf://org/model/tokenizer.json", "nothing is fetched from the hub"),
    ],
)
async def test_a_place_that_gives_nothing_says_why(
    folder: Path, cache: Path, source: str, reason: str
) -> None:
    with pytest.raises(CardUnusable, match=reason):
        await fetch_card(with_tokenizer(card_of(folder), path=source), cache)


async def test_folders_and_pipes_are_refused_at_once(
    tmp_path: Path, folder: Path, cache: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CardUnusable, match="not a regular file"):
            await fetch_card(with_tokenizer(card_of(folder), path=str(path)), cache)


async def test_another_file_is_not_given_away(folder: Path, cache: Path) -> None:
    """A card that points to a secret gets nothing into the cache, and no content into the log."""
    secret = folder / "secret"
    secret.write_text("top secret")
    card = with_tokenizer(card_of(folder), path=str(secret), size=10)
    with pytest.raises(CardUnusable) as caught:
        await fetch_card(card, cache)
    assert "checksum" in str(caught.value)
    assert "top secret" not in str(caught.value)
    assert digest_of(b"top secret") not in names_below(cache)


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_wrong_size_is_refused(folder: Path, cache: Path, change: int) -> None:
    size = (folder / "tokenizer.json").stat().st_size + change
    with pytest.raises(CardUnusable, match=r"bytes"):
        await fetch_card(with_tokenizer(card_of(folder), size=size), cache)


async def test_a_wrong_checksum_is_refused(folder: Path, cache: Path) -> None:
    wrong = with_tokenizer(card_of(folder), checksum="blake3:" + "0" * 64)
    with pytest.raises(CardUnusable, match=f"the card says {'0' * 64}"):
        await fetch_card(wrong, cache)


async def test_a_huge_file_of_unknown_size_is_not_read_to_its_end(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = with_tokenizer(card_of(folder), size=msgspec.UNSET)
    monkeypatch.setitem(card_files.LIMITS, "tokenizer.json", 1000)
    with pytest.raises(CardUnusable, match="longer than 1000 bytes"):
        await fetch_card(card, cache)


# --- a local copy ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["hf://org/model/tokenizer.json", "/no/such/file", "nonsense"])
async def test_a_local_copy_helps_where_the_card_does_not(
    folder: Path, cache: Path, source: str
) -> None:
    card = with_tokenizer(card_of(folder), path=source)
    assert_same(await fetch_card(card, cache, model_dir=folder), folder)


async def test_a_local_copy_is_checked_too(tmp_path: Path, folder: Path, cache: Path) -> None:
    other = make_model_folder(tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    card = with_tokenizer(card_of(folder), path="hf://x/y/tokenizer.json")
    with pytest.raises(CardUnusable, match=r"other/tokenizer\.json has 2 bytes.*hf://x/y"):
        await fetch_card(card, cache, model_dir=other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(CardUnusable, match=r"No such file.*hf://x/y"):
        await fetch_card(card, cache, model_dir=other)


# --- the cache ---------------------------------------------------------------------------------


async def test_what_is_cached_is_not_fetched_again(folder: Path, cache: Path) -> None:
    card = card_of(folder)
    first = await fetch_card(card, cache)
    shutil.rmtree(folder)
    assert await fetch_card(card, cache) == first


async def test_cards_of_the_same_content_share_a_folder(
    tmp_path: Path, folder: Path, cache: Path
) -> None:
    twin = make_model_folder(tmp_path / "twin")
    other = make_model_folder(tmp_path / "other", name="other")
    one, two, three = [await fetch_card(card_of(f), cache) for f in (folder, twin, other)]
    assert one == two != three
    assert len(list((cache / "cards" / "blobs").iterdir())) == 6  # config.json differs


@pytest.mark.parametrize("damage", ["short", "long", "other", "empty", "pipe"])
async def test_a_damaged_blob_is_fetched_again(
    folder: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    card = card_of(folder)
    fetched = await fetch_card(card, cache)
    blob = (fetched / "tokenizer.json").resolve()
    content = blob.read_bytes()
    blob.unlink()
    if damage == "pipe":
        os.mkfifo(blob)
    else:
        changed = {"short": content[:-1], "long": content + b" ", "other": b"x" + content[1:]}
        blob.write_bytes(changed.get(damage, b""))
    with caplog.at_level(logging.WARNING):
        assert_same(await fetch_card(card, cache), folder)
    assert "it is fetched again" in caplog.text


@pytest.mark.parametrize("damage", ["gone", "wrong", "file"])
async def test_a_damaged_folder_is_repaired(folder: Path, cache: Path, damage: str) -> None:
    card = card_of(folder)
    link = await fetch_card(card, cache) / "config.json"
    link.unlink()
    if damage == "wrong":
        link.symlink_to("/etc/passwd")
    elif damage == "file":
        link.write_text("{}")
    assert_same(await fetch_card(card, cache), folder)


async def test_leftovers_of_killed_processes_are_swept(folder: Path, cache: Path) -> None:
    blobs = cache / "cards" / "blobs"
    blobs.mkdir(parents=True)
    old, young = blobs / ".new-old", blobs / ".new-young"
    for leftover in (old, young):
        leftover.write_text("half")
    os.utime(old, (0, 0))
    await fetch_card(card_of(folder), cache)
    assert not old.exists()
    assert young.exists()  # perhaps another process writes it at this moment


async def test_a_cache_that_cannot_be_used_is_named(folder: Path) -> None:
    with pytest.raises(FileUnusable, match=f"{folder}/config.json.*--cache-dir"):
        await fetch_card(card_of(folder), folder / "config.json")


async def test_a_full_disk_leaves_nothing_half_written(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FileUnusable, match="No space left on device"):
        await fetch_card(card_of(folder), cache)
    assert list((cache / "cards" / "blobs").iterdir()) == []


async def test_concurrent_fetches(folder: Path, cache: Path) -> None:
    results: list[Path] = []

    async def fetch() -> None:
        results.append(await fetch_card(card_of(folder), cache))

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(fetch)
    assert len(set(results)) == 1
    assert_same(results[0], folder)
    assert not [name for name in names_below(cache) if name.startswith(".new-")]


_CHILD = """
import sys, trio, msgspec, pathlib
from dynamo_trio.models.card_loader import fetch_card
from dynamo_trio.wire.dynamo.card import CardJson
card, cache = map(pathlib.Path, sys.argv[1:])
print(trio.run(fetch_card, msgspec.json.decode(card.read_bytes(), type=CardJson), cache))
"""


def test_several_processes_at_once(tmp_path: Path, folder: Path, cache: Path) -> None:
    card = tmp_path / "card.json"
    card.write_bytes(msgspec.json.encode(card_of(folder)))
    command = [sys.executable, "-c", _CHILD, str(card), str(cache)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert_same(Path(outputs[0].decode().strip()), folder)


def test_the_store_never_takes_a_name_from_a_card(folder: Path, cache: Path) -> None:
    store = card_store.CardStore(cache)
    for file in files_of(card_of(folder)):
        store.put(file.digest, (folder / file.name).read_bytes())
    where = store.link(files_of(card_of(folder)))
    assert {p.name for p in where.iterdir()} == set(card_files.LIMITS)


# --- over HTTP ---------------------------------------------------------------------------------

URL = "http://worker:1/v1/metadata/x/_base"


def transport_of(
    folder: Path, tokenizer: Callable[[httpx.Request], Awaitable[httpx.Response]] | None = None
) -> httpx.MockTransport:
    """Serves the folder's files, tokenizer.json perhaps in a way of its own."""

    async def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        if tokenizer is not None and name == "tokenizer.json":
            return await tokenizer(request)
        return httpx.Response(200, stream=httpx.ByteStream((folder / name).read_bytes()))

    return httpx.MockTransport(answer)


def web_card(folder: Path) -> CardJson:
    return card_of(folder, base_url="http://worker:1")


async def test_from_a_status_server(folder: Path, cache: Path) -> None:
    fetched = await fetch_card(web_card(folder), cache, transport=transport_of(folder))
    assert_same(fetched, folder)


@pytest.mark.parametrize("status", [204, 302, 404, 500])
async def test_another_status_is_no_file(folder: Path, cache: Path, status: int) -> None:
    async def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"location": "http://worker:1/config.json"})

    with pytest.raises(CardUnusable, match=f"answers with status {status}"):
        await fetch_card(web_card(folder), cache, transport=transport_of(folder, answer))


async def test_compressed_bytes_are_not_the_file(folder: Path, cache: Path) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        headers = {"content-encoding": "gzip"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"\x1f\x8b"))

    with pytest.raises(CardUnusable, match="has 2 bytes"):
        await fetch_card(web_card(folder), cache, transport=transport_of(folder, answer))


class Drip(httpx.AsyncByteStream):
    """A body of one byte every ``pause`` seconds, without end."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.sent = 0

    async def __aiter__(self) -> Any:
        while True:
            self.sent += 1
            yield b"x"
            await trio.sleep(self.pause)


async def test_a_server_that_drips_is_given_up(
    folder: Path, cache: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Drip(5.0))

    card = only_tokenizer(folder)
    with pytest.raises(CardUnusable, match="took longer than 60 seconds"):
        await direct(card, cache, transport_of(folder, answer))
    assert trio.current_time() == 60.0


async def test_a_server_that_never_ends_is_cut_at_the_size(folder: Path, cache: Path) -> None:
    drip = Drip(0.0)

    async def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=drip)

    size = (folder / "tokenizer.json").stat().st_size
    with pytest.raises(CardUnusable, match=f"longer than {size} bytes"):
        await fetch_card(web_card(folder), cache, transport=transport_of(folder, answer))
    assert drip.sent == size + 1


def only_tokenizer(folder: Path) -> card_files.CardFile:
    return next(f for f in files_of(web_card(folder)) if f.name == "tokenizer.json")


async def direct(
    file: card_files.CardFile, cache: Path, transport: httpx.AsyncBaseTransport
) -> None:
    """One file without the look into the cache: threads and a clock that jumps do not mix."""
    fetch = card_loader._Fetch(card_store.CardStore(cache), None, CardLimits(), transport)
    with trio.fail_after(61):
        await fetch._bounded(file, fetch._get)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ConnectTimeout("slow"), "does not answer in time"),
        (httpx.ReadTimeout("slow"), "does not answer in time"),
        (httpx.ConnectError("refused"), "refused"),
        (httpx.RemoteProtocolError("garbage"), "garbage"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
async def test_a_broken_connection_says_how(
    folder: Path, cache: Path, error: Exception, reason: str
) -> None:
    async def answer(_request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(CardUnusable, match=reason):
        await fetch_card(web_card(folder), cache, transport=transport_of(folder, answer))


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://x:99999/y", "http://a b/", "http://\x00/", "https://"]
)
async def test_a_url_that_is_none(folder: Path, cache: Path, url: str) -> None:
    with pytest.raises(CardUnusable, match="http"):
        await fetch_card(with_tokenizer(card_of(folder), path=url), cache)


# Over real sockets: what httpx makes of servers that lie.


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nlonger", "has 2 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "has 0 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\nno length", "has 9 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk"),
        (b"not http at all\r\n\r\n", "http://"),
        (b"", "disconnected"),
    ],
)
async def test_servers_that_lie(folder: Path, cache: Path, answer: bytes, reason: str) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(answer)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        card = with_tokenizer(card_of(folder), path=f"http://127.0.0.1:{port}/tokenizer.json")
        with pytest.raises(CardUnusable, match=reason):
            await fetch_card(card, cache)
        nursery.cancel_scope.cancel()


async def test_a_server_that_says_nothing(folder: Path, cache: Path) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    limits = CardLimits(read_time=0.1)
    async with listeners[0]:
        card = with_tokenizer(card_of(folder), path=f"http://127.0.0.1:{port}/tokenizer.json")
        with pytest.raises(CardUnusable, match="does not answer in time"):
            await fetch_card(card, cache, limits=limits)
