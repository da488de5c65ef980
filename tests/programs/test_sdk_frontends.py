"""OpenAI's SDK keeps its connections; a frontend that goes takes nobody down who keeps one."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import openai
import trio

from tests.frontend.switch import open_switch
from tests.programs.conftest import MODEL, wait_instances
from tests.standalone.harness import chat, open_streams, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.programs.conftest import Fleet
    from tests.standalone.harness import Server

PATIENT: dict[str, Any] = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "120"}


@attrs.define(eq=False)
class User:
    """A client with one connection, and what it was answered, refusals included."""

    client: openai.OpenAI
    statuses: list[int]

    def ask(self, *, stream: bool = False) -> str:
        """An answer of 16 tokens."""
        messages: Any = [{"role": "user", "content": "Why is the sky blue?"}]
        ignore_eos = {"ignore_eos": True}
        create: Any = self.client.chat.completions.create
        create = partial(create, model=MODEL, messages=messages, max_tokens=16)
        if stream:
            chunks = create(stream=True, extra_body=ignore_eos)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return str(create(extra_body=ignore_eos).choices[0].message.content)


@contextmanager
def user_of(url: str, *, max_retries: int = openai.DEFAULT_MAX_RETRIES) -> Iterator[User]:
    statuses: list[int] = []
    hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    http = httpx.Client(event_hooks=hooks, trust_env=False)
    settings: Any = {"base_url": url, "http_client": http, "max_retries": max_retries}
    with openai.OpenAI(api_key="any", **settings) as client:
        yield User(client, statuses)


def two_frontends(fleet: Fleet) -> tuple[Server, Server]:
    fleet.worker("--itl-ms", "5", ready=False)
    one, other = (fleet.frontend(ready=False, **PATIENT) for _ in range(2))
    for frontend in (one, other):
        wait_instances(frontend, 1)
    return one, other


async def test_who_is_refused_on_a_kept_connection_goes_elsewhere(fleet: Fleet) -> None:
    one, other = await trio.to_thread.run_sync(two_frontends, fleet)
    async with open_switch(one.port, other.port) as (switch, url):
        with user_of(url) as user, open_streams(one.port, 1, chat(8000, model=MODEL)):
            said = await trio.to_thread.run_sync(user.ask)
            one.kill(signal.SIGTERM)
            await trio.to_thread.run_sync(one.wait_log, "phase draining")
            assert await trio.to_thread.run_sync(user.ask) == said
            assert await trio.to_thread.run_sync(user.ask) == said
            assert user.statuses == [200, 503, 200, 200]
            assert switch.taken == [one.port, other.port]  # one each: it was kept
    assert one.end() == 0
    assert one.report["served_before"] == 1


async def test_who_keeps_a_connection_to_one_that_has_gone_notices_nothing(fleet: Fleet) -> None:
    one, other = await trio.to_thread.run_sync(two_frontends, fleet)
    async with open_switch(one.port, other.port) as (switch, url):
        with user_of(url, max_retries=0) as user:
            said = await trio.to_thread.run_sync(user.ask)
            assert await trio.to_thread.run_sync(one.stop) == 0
            while not switch.ended:  # noqa: ASYNC110 - no event says so
                await trio.sleep(0.01)
            assert await trio.to_thread.run_sync(user.ask) == said
            assert user.statuses == [200, 200]
            assert switch.taken == [one.port, other.port]


# --- a restart at the same port -------------------------------------------------------------------


@attrs.define(eq=False)
class Crowd:
    """Users; each asks again and again, streamed and whole in turn, while the block runs."""

    url: str
    users: list[User] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)
    _over: threading.Event = attrs.field(factory=threading.Event)

    @property
    def statuses(self) -> set[int]:
        return {status for user in self.users for status in user.statuses}

    @contextmanager
    def asking(self, count: int) -> Iterator[None]:
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(self._go_on) for _ in range(count)]
            try:
                yield
            finally:
                self._over.set()
            for user in running:
                user.result()

    def _go_on(self) -> None:
        with user_of(self.url, max_retries=20) as user:  # enough for a start on a busy machine
            self.users.append(user)
            while not self._over.is_set():
                for stream in (True, False):
                    self.texts.append(user.ask(stream=stream))

    def wait_answers(self, count: int) -> None:
        end = len(self.texts) + count
        wait_until(lambda: len(self.texts) >= end, f"{count} answers")


def test_a_restart_at_the_same_port_costs_a_retry(fleet: Fleet) -> None:
    worker = fleet.worker("--itl-ms", "5", ready=False)
    frontend = fleet.frontend(**PATIENT)
    wait_instances(frontend, 1)
    port = frontend.port
    crowd = Crowd(f"http://127.0.0.1:{port}/v1")
    with crowd.asking(4):
        crowd.wait_answers(8)
        with open_streams(port, 1, chat(8000, model=MODEL)):
            frontend.kill(signal.SIGTERM)
            wait_until(lambda: 503 in crowd.statuses, "somebody is refused")
        assert frontend.end() == 0
        again = fleet.frontend("--http-port", str(port), **PATIENT)
        crowd.wait_answers(8)
    assert len(set(crowd.texts)) == 1
    assert crowd.statuses == {200, 503}
    report = frontend.report
    assert report["requests"]["cancelled"] == 1  # the one that held it
    assert report["requests"]["cut"] == report["requests"]["lost"] == 0
    assert again.stop() == 0
    assert worker.stop() == 0
    assert worker.report["served_before"] >= len(crowd.texts)
