"""Model cards and their files, made by somebody who means no good."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import blake3
import msgspec
import pytest
import trio

from dynamo_trio.discovery import Instance, MemoryDiscovery, ModelCard
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.catalog import Catalog, open_catalog
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.models.card_loader import CardLimits
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.testing import make_model_folder
from tests.discovery.backends import GENERATE
from tests.hostile.garbage import NASTY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dynamo_trio.wire.dynamo.card import CardJson

DEEP = b'{"a":' * 100_000
GARBAGE = {
    "empty": b"",
    "nul": b"\0" * 100,
    "no-utf8": b"\xff\xfe{}",
    "null": b"null",
    "list": b"[]",
    "number": b"1e999",
    "nan": b'{"max_position_embeddings":NaN,"eos_token_id":Infinity}',
    "deep": DEEP,
    "deep-list": b"[" * 100_000 + b"]" * 100_000,
    "digits": b'{"model_max_length":' + b"9" * 5000 + b"}",
    "types": b'{"eos_token_id":{"a":1},"bos_token":[],"eos_token":7,"chat_template":{"x":[]},'
    b'"model_max_length":"x","max_position_embeddings":[1],"model":3}',
    "surrogate": b'{"bos_token":"\\ud800","eos_token":"\\udfff","chat_template":"\\ud800"}',
    "negative": b'{"model_max_length":-5,"max_position_embeddings":-7,"eos_token_id":-1}',
}
#: The field of a card -> how its file is called.
FILES = {
    "config.json": lambda card: card.model_info.hf_config_json,
    "tokenizer.json": lambda card: card.tokenizer.hf_tokenizer_json,
    "tokenizer_config.json": lambda card: card.prompt_formatter.hf_tokenizer_config_json,
    "chat_template.jinja": lambda card: card.chat_template_file.hf_chat_template.file,
    "generation_config.json": lambda card: card.gen_config.hf_generation_config_json,
}


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("good"))


@attrs.define(eq=False)
class Bench:
    """A frontend's catalogue with a good model, and the way to a hostile one."""

    discovery: MemoryDiscovery
    catalog: Catalog
    good: ModelCard
    folder: Path

    async def offer(self, card: CardJson, number: int = 2) -> None:
        name = card.display_name
        hostile = attrs.evolve(self.good, name=name, instance_id=number, card_json=card)
        await self.discovery.register(hostile)
        await self.discovery.register(Instance(GENERATE, number, {"mem": "x"}))

    def with_file(self, name: str, content: bytes) -> CardJson:
        """The good card, but for one file, whose checksum is right."""
        path = self.folder / f"hostile-{name}"
        path.write_bytes(content)
        digest = f"blake3:{blake3.blake3(content).hexdigest()}"
        return self.with_place(name, str(path), checksum=digest, size=len(content))

    def with_place(self, name: str, place: str, **more: object) -> CardJson:
        """The good card, but for where one file is."""
        assert self.good.card_json is not None
        tree: Any = msgspec.to_builtins(self.good.card_json)
        file = FILES[name](self.good.card_json)
        _replace(tree, file.path, {"path": place, **more})
        return msgspec.convert(tree | {"display_name": "hostile"}, type(self.good.card_json))

    async def settle(self, said: Callable[[], bool]) -> None:
        """Until the hostile card was judged; the good model is there all the time."""
        with trio.fail_after(30):
            while not (said() or self.has("hostile")):  # noqa: ASYNC110 - in a log, by a thread
                await trio.sleep(0.01)
        assert self.has("good")

    def has(self, name: str) -> bool:
        return any(model.name == name for model in self.catalog.models())


def _replace(tree: Any, path: str, new: dict[str, object]) -> None:
    for value in tree.values() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value.get("path") == path:
            value.update(new)
        else:
            _replace(value, path, new)


@asynccontextmanager
async def open_bench(folder: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    good = await trio.to_thread.run_sync(
        lambda: make_card(folder, name="good", endpoint=GENERATE, instance_id=1, context_length=512)
    )
    discovery = MemoryDiscovery()
    limits = CardLimits(connect_time=1.0, read_time=1.0, file_time=2.0)
    loader = card_loader(tmp_path / "cache", limits=limits)
    async with open_catalog(discovery, {"mem": MemoryPlane()}, loader) as catalog:
        await discovery.register(good)
        await discovery.register(Instance(GENERATE, 1, {"mem": "x"}))
        with trio.fail_after(30):
            await catalog.wait_for("good")
        yield Bench(discovery, catalog, good, tmp_path)


def is_told(caplog: pytest.LogCaptureFixture) -> bool:
    """Judge the log: at most a reason of one line for each attempt, and no mistake of ours."""
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("dynamo_trio")]
    assert all(record.exc_info is None for record in caplog.records), caplog.text
    assert max(map(len, texts), default=0) < 2000
    return any("hostile cannot be offered" in text for text in texts)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_file_of_garbage(
    name: str, garbage: str, good_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(good_folder, tmp_path) as bench:
        await bench.offer(bench.with_file(name, GARBAGE[garbage]))
        await bench.settle(lambda: is_told(caplog))
        is_told(caplog)


PLACES = [
    *("", "/", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/tmp", "relative", "/a\0b", NASTY),
    *("file:///etc/passwd", "file://other/x", "file:///%00", "file:", "FILE:///etc/shadow"),
    *("http://", "http://[::1", "http://a..b/x", "http://127.0.0.1:1/x", "http://127.0.0.1:99999/"),
    *(
        "http://é" + "é" * 70 + "/x",
        "http://a\nb/",
        "https://127.0.0.1:1/",
        "ftp://a/b",
        "hf://a/b",
    ),
    "x" * 100_000,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: repr(place[:20]))
async def test_a_place_that_is_none(
    place: str, good_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(good_folder, tmp_path) as bench:
        card = bench.with_place("config.json", place, checksum="blake3:" + "a" * 64)
        await bench.offer(card)
        await bench.settle(lambda: is_told(caplog))
        assert is_told(caplog)
        assert not bench.has("hostile")


@pytest.mark.parametrize(
    "more",
    [
        {"checksum": "blake3:" + "0" * 64},
        {"checksum": "md5:1"},
        {"checksum": NASTY},
        {"size": -1},
        {"size": 2**63},
        {"size": 2**40},
    ],
    ids=repr,
)
async def test_a_checksum_or_size_that_is_none(
    more: dict[str, object], good_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(good_folder, tmp_path) as bench:
        fresh = tmp_path / "other-config.json"
        fresh.write_bytes((good_folder / "config.json").read_bytes() + b"\n")
        await bench.offer(bench.with_place("config.json", str(fresh), **more))
        await bench.settle(lambda: is_told(caplog))
        assert is_told(caplog)


@pytest.mark.parametrize(
    "more",
    [
        {"context_length": -1},
        {"context_length": 2**62, "kv_cache_block_size": -5, "migration_limit": -9},
        {"runtime_config": {"context_length": -7, "runtime_data": {"a": NASTY}}},
        {"architectural_max_context_length": 2**63 - 1},
        {"model_type": "Chat | " * 1000},
        {"model_type": NASTY},
        {"model_input": "x" * 100_000},
        {"source_path": NASTY},
        {"needs": [[[[]]]] * 100, "media_decoder": {"a": [1]}},
    ],
    ids=lambda more: repr(more)[:40],
)
async def test_fields_that_are_odd(
    more: dict[str, Any], good_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(good_folder, tmp_path) as bench:
        tree = msgspec.to_builtins(bench.good.card_json) | more | {"display_name": "hostile"}
        card = msgspec.convert(tree, type(bench.good.card_json))
        await bench.offer(card)  # type: ignore[arg-type]  # a CardJson
        await bench.settle(lambda: is_told(caplog))
        is_told(caplog)
        assert all(model.context_length > 0 for model in bench.catalog.models())


async def test_models_with_odd_names_do_not_hide_the_good_one(
    good_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [NASTY, "", " ", "x" * 100_000, "../..", '"}{', "good\n", "é\u0301", "good\0"]
    async with open_bench(good_folder, tmp_path) as bench:
        assert bench.good.card_json is not None
        for number, name in enumerate(names, start=2):
            card = msgspec.structs.replace(bench.good.card_json, display_name=name)
            await bench.offer(card, number)
        with trio.fail_after(30):
            for name in (*names, "good"):
                assert (await bench.catalog.wait_for(name)).name == name
        json.dumps([model.name for model in bench.catalog.models()])
    assert all(record.exc_info is None for record in caplog.records)
