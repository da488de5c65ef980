"""A model whose chat template takes long: its requests do not hold up the others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.tokenizers import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT = "/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}
DEAR = "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}"


class _Dear:
    """A tokenizer with a template that takes long; the rest is another one's."""

    chat_template = DEAR

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def make_dear(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = site.frontend.catalog.models()
    old = model.preprocessor
    dear: Any = _Dear(old.tokenizer)
    new = Preprocessor(dear, context_length=old.context_length, model=old.model)
    for name, value in vars(new).items():
        monkeypatch.setattr(old, name, value)


@pytest.fixture
def _shared_fairly() -> Iterator[None]:
    """A thread that computes lets others run ten times as often as it would by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 10)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_shared_fairly")
async def test_its_requests_are_refused_and_the_loop_turns(
    open_site: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site() as site:
        make_dear(site, monkeypatch)
        with trio.fail_after(60):
            request = site.client.start("POST", CHAT, BODY)
            turns = 0
            while not request.done.is_set():
                await trio.lowlevel.checkpoint()
                turns += 1
        error = request.json()["error"]
        assert (request.status, error["param"]) == (400, "messages")
        assert "may not do this" in error["message"]
        assert turns > 100  # it would be a few if the loop had waited
