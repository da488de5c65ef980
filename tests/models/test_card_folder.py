"""The model folder that is made for tests: real enough for tokenisers and simulated engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dynamo_trio.config import Config, Group
from dynamo_trio.engines.vocabulary import AnyOf
from dynamo_trio.testing import SimCore, make_model_folder
from dynamo_trio.tokenizers import Preprocessor, load_tokenizer
from dynamo_trio.wire.openai.request import parse_chat
from dynamo_trio.worker.assembly import Model, build_core

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("text", ["the people were moving", "Grüße, 😀!\n", "", "  a\x00b"])
def test_every_text_survives(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(make_model_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text


def test_words_are_single_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model_folder(tmp_path / "new" / "folder", context_length=32768))
    assert len(tokenizer.encode(" people move house", add_special=True)) == 3
    assert tokenizer.context_length == 32768
    assert tokenizer.eos_token_ids == (2,)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one, two, other = (
        make_model_folder(tmp_path / "one"),
        make_model_folder(tmp_path / "two"),
        make_model_folder(tmp_path / "other", name="other"),
    )
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert (one / "config.json").read_bytes() != (other / "config.json").read_bytes()


def test_a_chat_is_rendered(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model_folder(tmp_path))
    preprocessor = Preprocessor(tokenizer, context_length=8192, model="tiny")
    body = b'{"model":"tiny","messages":[{"role":"user","content":"go home"}],"max_tokens":4}'
    request = preprocessor.chat(parse_chat(body))
    assert tokenizer.decode(request.token_ids) == "user\ngo home\nassistant\n"
    assert request.token_ids.count(1) == 2  # two begins of a message, each one token
    assert request.eos_token_ids == [2]


def test_the_simulated_engine_writes_words_of_this_vocabulary(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    config = Config.from_args_and_env(["--engine", "sim"], {}, groups=list(Group))
    model = Model.read(config, folder)
    core, tokenizer = build_core(config, model), model.tokenizer
    assert isinstance(core, SimCore)
    assert isinstance(core.settings.vocabulary, AnyOf)
    words = core.settings.vocabulary.token_ids
    assert len(words) > 400
    assert all(0 <= n < tokenizer.vocab_size for n in words)
    assert tokenizer.decode(words[:100]).replace(" ", "").isalpha()
