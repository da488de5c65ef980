"""``--ask``: one question through the process's own HTTP port, the answer to the terminal."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.wire.openai.sse import EventParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.context import Cleanup

logger = logging.getLogger("dynamo_trio.ask")

#: Enough for a few paragraphs; a small model sometimes does not find the end by itself.
MAX_TOKENS = 256


STDOUT = 1


class AskFailed(Exception):
    """The question was not answered. The text says why."""


@attrs.frozen
class Asker:
    """Asks ``model`` at ``url``; ``write`` takes text, from a worker thread."""

    url: str
    model: str
    write: Callable[[str], object]
    #: Opens the door, where the server wants an API key.
    key: str | None = attrs.field(default=None, repr=False, kw_only=True)
    #: Given a limit, what the end of the line is written in.
    close_scope: Cleanup = plain_cleanup

    async def ask(self, question: str) -> None:
        """Stream the answer out, and end it with a line break.

        Raises:
            AskFailed: the server refused, the answer is incomplete, or it cannot be written.
        """
        try:
            async with (
                # It is our own port, by an address that its certificate need not name.
                httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
                client.stream(
                    "POST", self.url, json=self._body(question), headers=self._headers()
                ) as response,
            ):
                await self._print(response)
        except httpx.HTTPError as exc:
            raise AskFailed(f"the connection broke: {exc!r}") from exc
        finally:
            with self.close_scope(1.0), suppress(AskFailed):
                await self._say("\n")

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    def _body(self, question: str) -> dict[str, object]:
        message = {"role": "user", "content": question}
        return {
            "model": self.model,
            "messages": [message],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }

    async def _print(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            raise AskFailed((await response.aread()).decode(errors="replace"))
        finish = None
        async for event in _events(response):
            if "error" in event:
                raise AskFailed(event["error"]["message"])
            choice = event["choices"][0]
            await self._say(choice["delta"].get("content") or "")
            finish = choice["finish_reason"] or finish
        if finish is None:
            raise AskFailed("the answer broke off")
        if finish == "length":
            logger.warning("the answer was ended after %d tokens", MAX_TOKENS)

    async def _say(self, text: str) -> None:
        if not text:
            return
        try:
            # Abandoned when cancelled: a terminal under Ctrl-S must not hold the stop.
            await trio.to_thread.run_sync(self.write, text, abandon_on_cancel=True)
        except OSError as exc:
            raise AskFailed(f"it cannot be written: {exc.strerror or exc}") from exc


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    parser = EventParser()
    async for data in response.aiter_raw():
        for event in parser.feed(data):
            if not event.is_done:
                yield json.loads(event.data)


def write_stdout(text: str) -> None:
    """Write all of it. A reader that has left is no error: it has seen enough.

    To the descriptor: a thread that is stuck in here must hold no lock of ``sys.stdout``,
    which the exit wants to flush.
    """
    data = text.encode(errors="replace")
    try:
        while data:
            data = data[os.write(STDOUT, data) :]
    except BrokenPipeError:
        pass
