"""Encoding a long prompt lets other threads run."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dynamo_trio.testing import make_model_folder
from dynamo_trio.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """Counted, not timed: how often another thread had a turn while the text was encoded."""
    make_model_folder(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    tokenizer.encode("warm up", add_special=False)
    over, turns = threading.Event(), 0

    def run() -> None:
        tokenizer.encode(text, add_special=False)
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not over.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 20
