"""What OpenAI's own SDK makes of a frontend that drains: it goes on at the next one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.keys import ApiKeys
from tests.frontend.switch import open_switch
from tests.http.harness import running

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Opener = Callable[..., AbstractAsyncContextManager[Any]]

KEY = "sk-the-sdks-key"


def ask(url: str, *, stream: bool, key: str = KEY) -> str:
    """One question by an SDK that is set to nothing special; in a thread."""
    with openai.OpenAI(base_url=url, api_key=key) as client:
        messages: Any = [{"role": "user", "content": "Why is the sky blue?"}]
        create: Any = partial(client.chat.completions.create, model="sim", messages=messages)
        if stream:
            chunks = create(max_tokens=8, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return str(create(max_tokens=8).choices[0].message.content)


async def test_the_sdk_goes_on_at_the_next_frontend(open_site: Opener) -> None:
    async with (
        open_site(itl_ms=50, http_drain=120.0) as first,
        open_site(itl_ms=1) as second,
        running(App(first.frontend)) as one,
        running(App(second.frontend)) as other,
    ):
        long = {"model": "sim", "prompt": "?", "max_tokens": 400, "ignore_eos": True}
        held = first.client.start("POST", "/v1/completions", {**long, "stream": True})
        while not held.text():  # noqa: ASYNC110 - the answer is a plain buffer
            await trio.sleep(0.01)
        first.lifecycle.request_stop("SIGTERM")
        texts: list[str] = []

        async def user(stream: bool) -> None:
            async with open_switch(one.port, other.port) as (switch, url):
                texts.append(await trio.to_thread.run_sync(partial(ask, url, stream=stream)))
                assert switch.taken == [one.port, other.port]  # refused there, answered here

        async with trio.open_nursery() as users:
            for number in range(6):
                users.start_soon(user, number % 2 == 0)
        assert len(texts) == 6
        assert all(texts)
        assert first.lifecycle.http.count == 1  # all the time it was draining
        held.leave()


async def test_the_sdk_gives_up_at_once_what_is_no_use(open_site: Opener, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path)
    async with (
        open_site(itl_ms=1) as site,
        running(App(site.frontend)) as server,
        open_switch(server.port) as (switch, url),
    ):
        site.frontend.keys = ApiKeys.read(path)

        def embed() -> None:
            with openai.OpenAI(base_url=url, api_key=KEY) as client:
                client.embeddings.create(model="sim", input="?")

        with pytest.raises(openai.InternalServerError, match="not supported here yet"):
            await trio.to_thread.run_sync(embed)
        with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
            await trio.to_thread.run_sync(partial(ask, url, stream=False, key="sk-no"))
        assert await trio.to_thread.run_sync(partial(ask, url, stream=False))
        requests = site.frontend.metrics.registry.get_sample_value
        labels = {"model": "unknown_model", "endpoint": "chat_completions", "request_type": "unary"}
        name = "dynamo_frontend_requests_started_total"
        assert requests(name, labels) == 1  # the one with a wrong key, once
        assert len(switch.taken) == 3


def write(path: Path) -> None:
    path.write_text(KEY)
