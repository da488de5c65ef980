"""What canaries are, and when they are sent, as the settings say it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from dynamo_trio.config.programs import STANDALONE, WORKER
from dynamo_trio.errors import ConfigError, FileUnusable
from dynamo_trio.health import CanarySettings, is_probe, marked, read_payload
from dynamo_trio.program.canary import canary_settings
from dynamo_trio.tokenizers import ByteTokenizer
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import PreprocessedRequest, read_request
from dynamo_trio.worker.canary import canary_payload

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.config import Config

ONE_TOKEN = {
    "token_ids": [1],
    "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
    "sampling_options": {"temperature": 0.0},
    "_HEALTH_CHECK": True,
}


def load(monkeypatch: pytest.MonkeyPatch, *flags: str, **environ: str) -> Config:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return WORKER.read_config(flags)


async def test_dynamos_variables_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await canary_settings(load(monkeypatch)) == CanarySettings(
        enabled=False, wait=10.0, limit=3.0, payload=None
    )
    config = load(
        monkeypatch,
        DYN_HEALTH_CHECK_ENABLED="true",
        DYN_CANARY_WAIT_TIME="2",
        DYN_HEALTH_CHECK_REQUEST_TIMEOUT="0.5",
        DYN_HEALTH_CHECK_PAYLOAD='{"token_ids": [7]}',
    )
    assert await canary_settings(config) == CanarySettings(
        enabled=True, wait=2.0, limit=0.5, payload={"token_ids": [7], "_HEALTH_CHECK": True}
    )


async def test_the_payload_may_lie_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "payload.json"
    path.write_text(json.dumps({"token_ids": [7]}))
    flags = ("--health-check-payload", f"@{path}", "--health-check-enabled", "1")
    settings = await canary_settings(load(monkeypatch, *flags))
    assert settings.payload == {"token_ids": [7], "_HEALTH_CHECK": True}


@pytest.mark.parametrize("content", [None, "[1]", "{", '"@x"', "[" * 100_000])
async def test_a_file_without_a_payload_is_named_with_its_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "payload.json"
    if content is not None:
        path.write_text(content)
    config = load(monkeypatch, DYN_HEALTH_CHECK_ENABLED="1", DYN_HEALTH_CHECK_PAYLOAD=f"@{path}")
    with pytest.raises(ConfigError, match=r"^DYN_HEALTH_CHECK_PAYLOAD: "):
        await canary_settings(config)


def test_a_payload_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_text(json.dumps({"a": "x" * 2**20}))
    with pytest.raises(FileUnusable, match="longer than 1048576 bytes"):
        read_payload(f"@{path}")


@pytest.mark.parametrize("text", ["[1]", "{", "1", "null", "@", "x", "[" * 100_000])
def test_what_is_no_object_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object, or @ and the path of a file"):
        load(monkeypatch, DYN_HEALTH_CHECK_PAYLOAD=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_CANARY_WAIT_TIME", "0"),
        ("DYN_CANARY_WAIT_TIME", "inf"),
        ("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "0"),
        ("DYN_HEALTH_CHECK_ENABLED", "maybe"),
    ],
)
def test_what_would_never_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        load(monkeypatch, **{name: value})


def test_one_process_has_no_health_checks() -> None:
    with pytest.raises(ConfigError, match="health-check-enabled"):
        STANDALONE.read_config(["--health-check-enabled", "1"])


def test_a_workers_payload_is_one_token_as_in_dynamo() -> None:
    assert canary_payload(CanarySettings(), ByteTokenizer()) == ONE_TOKEN
    assert isinstance(read_request(MSGPACK, MSGPACK.encode(ONE_TOKEN)), PreprocessedRequest)


def test_the_operators_payload_wins() -> None:
    settings = CanarySettings(payload={"token_ids": [5]})
    assert canary_payload(settings, ByteTokenizer()) == marked({"token_ids": [5]})
    settings = CanarySettings(payload={})
    assert settings.payload_or({"a": 1}) == {"_HEALTH_CHECK": True}


def test_a_payload_that_no_engine_could_take_is_refused() -> None:
    settings = CanarySettings(payload={"prompt": "hi"})
    with pytest.raises(ConfigError, match="must be a request as a frontend sends it, with token"):
        canary_payload(settings, ByteTokenizer())


def test_a_probe_is_known_by_its_marker() -> None:
    assert is_probe(marked({"a": 1}))
    assert not is_probe({"_HEALTH_CHECK": 1})
    assert not is_probe({"a": 1})
    assert not is_probe(msgspec.convert(ONE_TOKEN, PreprocessedRequest))
