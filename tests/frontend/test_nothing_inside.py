"""Whatever fails inside, a client is told nothing of the inside: no path, no address, no trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.errors import CannotConnect, CardUnusable, Disconnected, LoadError, Unknown
from dynamo_trio.frontend.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

CHAT = "/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "?"}], "max_tokens": 20}
SECRET = "/srv/secret/model.gguf"
ADDRESS = "10.9.8.7:4711"

#: What code deep inside may raise.
FAILURES = [
    FileNotFoundError(2, "No such file or directory", SECRET),
    KeyError(SECRET),
    LoadError(f"the files of {SECRET} cannot be used"),
    CardUnusable(f"{SECRET} is damaged"),
    Unknown(f'Traceback (most recent call last):\n  File "{SECRET}", line 1'),
    Unknown(f"the password is {ADDRESS}"),
    CannotConnect(f"the worker {ADDRESS} {SECRET}"),
    Disconnected(f"tcp://{ADDRESS} was lost"),
    ExceptionGroup("several", [OSError(SECRET), ValueError(ADDRESS)]),
]
each = pytest.mark.parametrize("failure", FAILURES, ids=lambda exc: type(exc).__name__)


def shows_inside(answer: Any) -> bool:
    told = answer.body.decode() + str(answer.headers)
    return any(word in told for word in ("secret", "10.9", "Traceback", "line 1", "password"))


@each
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_the_answer(
    open_site: Opener,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    failure: Exception,
) -> None:
    async with open_site() as site:
        (model,) = site.frontend.catalog.models()

        def fail(*_: object, **_options: object) -> None:
            raise failure

        model.preprocessor.chat = fail
        with caplog.at_level(logging.INFO):
            answer = await site.client.ask("POST", CHAT, {**BODY, "stream": stream})
        assert answer.status in (500, 503)
        assert answer.json()["error"]["message"]
        assert not shows_inside(answer)
        told = [word for word in (SECRET, ADDRESS) if word in str(failure)]
        assert all(word in caplog.text for word in told)  # the operator is told all of it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
async def test_what_fails_in_the_engine(
    open_site: Opener, autojump_clock: MockClock, stream: bool, after: float
) -> None:
    async with open_site() as site:

        def die(*_: object) -> None:
            raise FileNotFoundError(2, "No such file or directory", SECRET)

        answer = site.client.start("POST", CHAT, {**BODY, "stream": stream, "ignore_eos": True})
        await trio.sleep(after)
        site.core.step = die
        await answer.done.wait()
        assert b'"error"' in answer.body
        assert not shows_inside(answer)


@each
async def test_what_fails_in_a_route(
    open_site: Opener,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    async with open_site() as site:

        def fail(*_: object, **_options: object) -> None:
            raise failure

        monkeypatch.setattr(Catalog, "models", fail)
        answer = await site.client.ask("GET", "/v1/models")
        assert answer.status in (500, 503)
        assert not shows_inside(answer)
        monkeypatch.undo()
