"""From a model folder to a card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import msgspec
import pytest

from dynamo_trio.errors import CardUnusable, FileUnusable, LoadError
from dynamo_trio.models import card_files
from dynamo_trio.models.card_builder import make_card, route_of, served_files
from dynamo_trio.models.card_files import files_of
from dynamo_trio.testing import make_model_folder
from dynamo_trio.wire.dynamo.card import CardJson, RuntimeConfig
from dynamo_trio.wire.names import EndpointId

if TYPE_CHECKING:
    from dynamo_trio.discovery import ModelCard

GENERATE = EndpointId("dynamo", "backend", "generate")
VECTOR = Path(__file__).parent.parent / "wire/dynamo/vectors/32_model_card_card.json"


def card_of(folder: Path, **more: Any) -> ModelCard:
    return make_card(folder, **{"name": "tiny", "endpoint": GENERATE, "instance_id": 7, **more})


def json_of(card: ModelCard) -> dict[str, Any]:
    return dict(json.loads(msgspec.json.encode(card.card_json)))


def test_a_card_has_the_parts_of_a_real_one(tmp_path: Path) -> None:
    real = json.loads(VECTOR.read_text())["value"]["card_json"]
    ours = json_of(card_of(make_model_folder(tmp_path)))
    left_out = {"media_decoder", "media_fetcher"}  # null in the real one
    assert list(ours) == [name for name in real if name not in left_out]
    for part in ("model_info", "tokenizer", "prompt_formatter", "chat_template_file", "gen_config"):
        assert ours[part].keys() == real[part].keys()
    same = ("model_type", "model_input", "worker_type", "needs", "kv_cache_block_size")
    assert {k: ours[k] for k in same} == {k: real[k] for k in same}


def test_files_are_told_with_checksum_and_size(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    for file in files_of(strict_json(card_of(folder))):
        content = (folder / file.name).read_bytes()
        assert file.source == str(folder / file.name)
        assert (file.digest, file.size) == (blake3.blake3(content).hexdigest(), len(content))


def strict_json(card: ModelCard) -> CardJson:
    assert card.card_json is not None
    return card.card_json


def test_a_relative_folder_becomes_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    card = card_of(Path("m"))
    assert card.model_path == tmp_path / "m"
    assert {Path(file.source).parent for file in files_of(strict_json(card))} == {tmp_path / "m"}


def test_urls_are_below_the_status_server(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    card = card_of(folder, name="Org/Tiny 1.5", base_url="http://10.0.0.7:9090")
    base = "http://10.0.0.7:9090/v1/metadata/dynamo/backend/generate/org_tiny_1_5/_base"
    assert {f.source for f in files_of(strict_json(card))} == {
        f"{base}/{name}" for name in card_files.LIMITS
    }
    served = served_files(card)
    assert {f"http://10.0.0.7:9090{url}" for url in served} == {
        f"{base}/{n}" for n in card_files.LIMITS
    }
    assert set(served.values()) == set(folder.iterdir())


def test_a_local_card_has_nothing_to_serve(tmp_path: Path) -> None:
    from dynamo_trio.discovery import ModelCard

    assert served_files(ModelCard("x", GENERATE, 1, model_path=tmp_path)) == {}


def test_odd_names_are_escaped_in_urls() -> None:
    endpoint = EndpointId("a/b", "c d", "e%f")
    assert route_of(endpoint, "slug") == "/v1/metadata/a%2Fb/c%20d/e%25f/slug/_base"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("tiny", "tiny"),
        ("Org/My  Model.7B_x-é!", "org_my__model_7b_x-__"),  # as the real mocker makes it
        ("_-/ é-x_ß", "-___-x__"),
    ],
)
def test_slugs_are_dynamos(tmp_path: Path, name: str, slug: str) -> None:
    card = card_of(make_model_folder(tmp_path), name=name)
    assert (strict_json(card).slug, strict_json(card).display_name) == (slug, name)


def test_a_name_without_latin_letters_gets_a_slug_all_the_same(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    one, two = (strict_json(card_of(folder, name=name)).slug for name in ("模型", "модель"))
    assert one.startswith("model-")
    assert one != two


def test_the_context_length_is_the_engines_or_the_models(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, context_length=4096)
    for card, expected in ((card_of(folder), 4096), (card_of(folder, context_length=512), 512)):
        told = strict_json(card)
        assert isinstance(told.runtime_config, RuntimeConfig)
        assert card.context_length == told.context_length == expected
        assert told.runtime_config.context_length == expected
        assert told.architectural_max_context_length == 4096


def test_what_the_engine_tells_is_passed_on(tmp_path: Path) -> None:
    runtime = RuntimeConfig(total_kv_blocks=100, max_num_seqs=8)
    card = card_of(
        make_model_folder(tmp_path),
        runtime_config=runtime,
        kv_cache_block_size=16,
        migration_limit=3,
    )
    ours = json_of(card)
    assert ours["runtime_config"] == {
        "context_length": 8192,
        "total_kv_blocks": 100,
        "max_num_seqs": 8,
    }
    assert (ours["kv_cache_block_size"], ours["migration_limit"]) == (16, 3)
    assert (card.kv_cache_block_size, card.migration_limit) == (16, 3)


# --- folders that lack something ---------------------------------------------------------------


def test_a_template_in_the_tokenizers_configuration_will_do(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ 1 }}"}))
    ours = json_of(card_of(folder))
    assert ours["model_type"] == "Chat | Completions"
    assert "chat_template_file" not in ours


@pytest.mark.parametrize("missing", ["chat_template.jinja", "tokenizer_config.json"])
def test_without_a_template_only_completions_are_offered(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model_folder(tmp_path)
    (folder / missing).unlink()
    card = card_of(folder)
    assert card.model_type == {"completions"}
    assert json_of(card)["model_type"] == "Completions"
    assert "only completions are offered" in caplog.text


def test_generation_config_may_be_missing(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "generation_config.json").unlink()
    assert "gen_config" not in json_of(card_of(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_required_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_model_folder(tmp_path)
    (folder / name).unlink()
    with pytest.raises(FileUnusable, match=f"{name}: No such file"):
        card_of(folder)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="no such folder"):
        card_of(tmp_path / "none")
    (tmp_path / "file.gguf").write_text("")
    with pytest.raises(FileUnusable, match="not a model folder"):
        card_of(tmp_path / "file.gguf")


@pytest.mark.parametrize("content", ["{", "[]", "7", "[" * 100_000, "\x00"])
def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(LoadError, match=r"config\.json: not"):
        card_of(folder)


@pytest.mark.parametrize("value", ["8192", -1, 0, 1.5, None, 2**40])
def test_an_absurd_context_length_is_not_told(tmp_path: Path, value: object) -> None:
    folder = make_model_folder(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": value}))
    card = card_of(folder)
    assert card.context_length == 0
    assert "architectural_max_context_length" not in json_of(card)


@pytest.mark.parametrize("name", sorted(card_files.LIMITS))
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        folder = make_model_folder(tmp_path / str(number))
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(FileUnusable, match=f"{name}: not a regular file"):
            card_of(folder)


def test_a_file_above_its_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path)
    monkeypatch.setitem(card_files.LIMITS, "generation_config.json", 10)
    with pytest.raises(FileUnusable, match=r"generation_config\.json: longer than 10 bytes"):
        card_of(folder)


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's own cache is made of links."""
    real = make_model_folder(tmp_path / "real")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    assert [f.digest for f in files_of(strict_json(card_of(linked)))] == [
        f.digest for f in files_of(strict_json(card_of(real)))
    ]


@pytest.mark.parametrize("missing", ["architectures", "model_type"])
def test_a_model_that_dynamos_frontend_will_not_offer_is_told_of(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model_folder(tmp_path)
    card_of(folder)
    assert caplog.text == ""
    config = json.loads((folder / "config.json").read_text())
    del config[missing]
    (folder / "config.json").write_text(json.dumps(config))
    card_of(folder)
    assert f"config.json has no {missing}: Dynamo's own frontend" in caplog.text


# --- reading the files out of a card -----------------------------------------------------------


def vector_card(**changes: Any) -> CardJson:
    value = json.loads(VECTOR.read_text())["value"]["card_json"]
    return msgspec.convert({**value, **changes}, CardJson)


def test_the_files_of_a_real_card() -> None:
    files = {file.name: file for file in files_of(vector_card())}
    assert set(files) == set(card_files.LIMITS)
    assert files["tokenizer.json"].size == 3522871
    assert files["tokenizer.json"].source.endswith("/smol/_base/tokenizer.json")


def test_optional_files_may_be_absent_or_null() -> None:
    card = vector_card(gen_config=None, chat_template_file=None, prompt_formatter=None)
    assert [file.name for file in files_of(card)] == ["config.json", "tokenizer.json"]
    assert [f.name for f in files_of(vector_card(gen_config={}))].count(
        "generation_config.json"
    ) == 0


def file_json(**changes: Any) -> dict[str, Any]:
    return {"path": "/x", "checksum": "blake3:" + "0" * 64, "size": 1, **changes}


@pytest.mark.parametrize(
    ("tokenizer", "rule"),
    [
        ({}, "names no tokenizer.json"),
        ({"gguf": file_json()}, "names no tokenizer.json"),
        ({"hf_tokenizer_json": file_json(checksum="sha256:00")}, "no blake3 checksum"),
        ({"hf_tokenizer_json": file_json(checksum="blake3:../../x")}, "no blake3 checksum"),
        ({"hf_tokenizer_json": file_json(checksum="blake3:" + "A" * 64)}, "no blake3 checksum"),
        ({"hf_tokenizer_json": file_json(size=2**40)}, "at most"),
        ({"hf_tokenizer_json": file_json(size=-1)}, "at most"),
    ],
)
def test_a_card_that_cannot_be_used_says_why(tokenizer: dict[str, Any], rule: str) -> None:
    with pytest.raises(CardUnusable, match=rule):
        files_of(vector_card(tokenizer=tokenizer))


def test_a_size_may_be_absent() -> None:
    without = {"hf_tokenizer_json": {"path": "/x", "checksum": "blake3:" + "0" * 64}}
    files = {file.name: file for file in files_of(vector_card(tokenizer=without))}
    assert files["tokenizer.json"].size is None
    assert files["tokenizer.json"].limit == card_files.LIMITS["tokenizer.json"]
