"""A transport that answers as a test wishes, in place of a network and an etcd."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import trio

from dynamo_trio.discovery.etcd.gateway import Gateway, open_gateway
from dynamo_trio.discovery.etcd.settings import EtcdSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


@attrs.define
class Asked:
    host: str
    path: str
    body: Any
    token: str | None


@attrs.define(eq=False)
class FakeEtcd(httpx.AsyncBaseTransport):
    """Says what ``answers`` says for host or path, and remembers what it was asked."""

    #: host or path -> what it does
    answers: dict[str, Answer] = attrs.field(factory=dict)
    asked: list[Asked] = attrs.field(factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        body = json.loads(await request.aread())
        token = request.headers.get("authorization")
        self.asked.append(Asked(request.url.host, request.url.path, body, token))
        for name in (request.url.host, request.url.path):
            if name in self.answers:
                return await self.answers[name](request)
        raise httpx.ConnectError("refused")

    def count(self, name: str) -> int:
        return sum(name in (asked.host, asked.path) for asked in self.asked)


def says(raw: bytes | str, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, stream=Chunks([raw]))

    return answer


def says_json(body: object, status: int = 200) -> Answer:
    return says(json.dumps(body), status)


def refuses(message: str, code: int, status: int = 400) -> Answer:
    return says_json({"error": message, "message": message, "code": code}, status)


def in_turn(*answers: Answer) -> Answer:
    """One after the other; the last of them stays."""
    left = list(answers)

    async def answer(request: httpx.Request) -> httpx.Response:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


async def hangs(_: httpx.Request) -> httpx.Response:
    await trio.sleep_forever()
    raise AssertionError


async def breaks(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset by peer")


def streams(*chunks: bytes | str, then_hang: bool = False) -> Answer:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Chunks(list(chunks), then_hang))

    return answer


@attrs.define
class Chunks(httpx.AsyncByteStream):
    chunks: list[bytes | str]
    then_hang: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            await trio.lowlevel.checkpoint()
            yield chunk.encode() if isinstance(chunk, str) else chunk
        if self.then_hang:
            await trio.sleep_forever()


@asynccontextmanager
async def open_fake(
    transport: FakeEtcd, *endpoints: str, **settings: Any
) -> AsyncIterator[Gateway]:
    names = endpoints or ("http://a",)
    async with open_gateway(EtcdSettings(endpoints=names, **settings), transport) as gateway:
        yield gateway
