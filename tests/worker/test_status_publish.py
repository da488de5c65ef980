"""The card that a worker publishes, by what its model is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dynamo_trio.config import Config
from dynamo_trio.errors import ConfigError
from dynamo_trio.models.card_builder import served_files
from dynamo_trio.testing import SimCore
from dynamo_trio.tokenizers import load_tokenizer
from dynamo_trio.worker.assembly import Model
from dynamo_trio.worker.publish import read_card
from tests.models.test_card_gguf import Small, make_small

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.engines import CoreInfo


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return make_small(tmp_path)


def settings(path: Path, cache: Path, *more: str) -> Config:
    flags = ["--engine", "sim", "--model-path", str(path), "--cache-dir", str(cache), *more]
    return Config.from_args_and_env(flags, {})


def info() -> CoreInfo:
    return SimCore().info


def model_of(small: Small, path: Path) -> Model:
    return Model("m", path, load_tokenizer(small.folder), 512)


async def test_a_folder_is_published_as_it_is(small: Small, tmp_path: Path) -> None:
    config = settings(small.folder, tmp_path / "cache")
    card = await read_card(config, info(), model_of(small, small.folder), 7, None)
    assert card.model_path == small.folder
    assert not (tmp_path / "cache").exists()


async def test_a_gguf_file_is_published_as_a_folder(small: Small, tmp_path: Path) -> None:
    path = small.write()
    config = settings(path, tmp_path / "cache")
    card = await read_card(config, info(), model_of(small, path), 7, "http://w:1")
    assert card.model_path is not None
    assert card.model_path.is_relative_to(tmp_path / "cache")
    assert card.context_length == info().context_tokens
    files = served_files(card)
    assert len(files) == 5
    for file in files.values():
        assert file.stat().st_size > 0
    told = json.loads((card.model_path / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"]


async def test_endpoint_types_narrow_what_is_offered(small: Small, tmp_path: Path) -> None:
    config = settings(small.folder, tmp_path, "--endpoint-types", "completions")
    card = await read_card(config, info(), model_of(small, small.folder), 7, None)
    assert card.model_type == {"completions"}
    (small.folder / "chat_template.jinja").unlink()
    config = settings(small.folder, tmp_path, "--endpoint-types", "chat")
    with pytest.raises(ConfigError, match="offers completions only"):
        await read_card(config, info(), model_of(small, small.folder), 7, None)
