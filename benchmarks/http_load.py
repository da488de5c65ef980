"""A client of ``/v1/completions`` that costs little: raw HTTP/1.1, and only the end is parsed."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_END = b"data: [DONE]\n\n"
_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    "content-type: application/json\r\ncontent-length: {}\r\n\r\n"
)


class BadAnswer(Exception):
    """An answer that is not what was asked for; with its beginning and end."""


@attrs.frozen
class Load:
    """Streamed requests of one kind. ``tokens``: of each answer."""

    port: int
    model: str
    tokens: int

    def request(self) -> bytes:
        """One request, whole."""
        body = json.dumps(
            {
                **{"model": self.model, "prompt": "Why is the sky blue?", "stream": True},
                **{"max_tokens": self.tokens, "ignore_eos": True},
                "stream_options": {"include_usage": True},
            }
        )
        return (_HEAD.format(len(body)) + body).encode()

    async def run(self, streams: int) -> None:
        """So many at once, to their ends.

        Raises:
            BadAnswer: as a member of an exception group.
        """
        async with trio.open_nursery() as nursery:
            for _ in range(streams):
                nursery.start_soon(self._one)

    async def _one(self) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(self.request())
            answer = b"".join([data async for data in stream])
        counted = b'"completion_tokens":%d' % self.tokens
        if _END not in answer[-64:] or counted not in answer:
            raise BadAnswer(f"{answer[:200]!r} ... {answer[-200:]!r}")

    @asynccontextmanager
    async def held(self, streams: int) -> AsyncIterator[None]:
        """So many are open, each past its first token, while the block runs."""
        async with trio.open_nursery() as nursery:
            begun = [trio.Event() for _ in range(streams)]
            for event in begun:
                nursery.start_soon(self._hold, event)
            for event in begun:
                await event.wait()
            yield
            nursery.cancel_scope.cancel()

    async def _hold(self, begun: trio.Event) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        try:
            await stream.send_all(self.request())
            data = b""
            while b'"text":"' not in data:
                data += await stream.receive_some(65536) or _ended(data)
            begun.set()
            async for _ in stream:
                pass  # so that nothing piles up anywhere
        finally:
            await trio.aclose_forcefully(stream)


def _ended(data: bytes) -> bytes:
    raise BadAnswer(f"{data[:400]!r}")
