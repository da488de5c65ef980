"""The decorators of dynamo.runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dynamo_trio import Context, open_runtime
from dynamo_trio.decorators import dynamo_endpoint
from dynamo_trio.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dynamo_trio.endpoint import Handler

pytestmark = pytest.mark.usefixtures("autojump_clock")


class Question(msgspec.Struct):
    text: str


class Validating:
    """A class with pydantic's way in."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_validate(cls, value: dict[str, str]) -> Validating:
        if "text" not in value:
            raise ValueError("text is missing")
        return cls(value["text"])


@dynamo_endpoint(Question, str)
async def plain(request: Question) -> AsyncGenerator[str, None]:
    for letter in request.text:
        yield letter


@dynamo_endpoint(Validating, str)
async def with_context(request: Validating, context: Context) -> AsyncGenerator[str, None]:
    yield request.text + context.id()


class Service:
    @dynamo_endpoint(Question, str)
    async def method(self, request: Question, context: Context) -> AsyncGenerator[str, None]:
        yield request.text + context.id()


@pytest.mark.parametrize(
    ("handler", "answer"),
    [(plain, ["a", "b"]), (with_context, ["ab1"]), (Service().method, ["ab1"])],
    ids=["request", "request and context", "method"],
)
async def test_the_handler_gets_its_model(handler: Handler, answer: list[str]) -> None:
    async with open_runtime() as runtime:
        endpoint = runtime.endpoint("t.b.generate")
        async with endpoint.serving(handler), endpoint.client() as client:
            await client.wait_for_instances()
            async with client.generate({"text": "ab"}, Context("1")) as stream:
                assert [item async for item in stream] == answer
            async with client.generate({"no": 1}) as stream:
                with pytest.raises(InvalidArgument, match="text"):
                    await anext(stream)


async def test_the_handler_is_closed_with_its_wrapper() -> None:
    closed = []

    @dynamo_endpoint(Question, str)
    async def endless(request: Question) -> AsyncGenerator[str, None]:
        try:
            while True:
                yield request.text
        finally:
            closed.append(request.text)

    generator = endless({"text": "x"})
    assert await anext(generator) == "x"
    await generator.aclose()
    assert closed == ["x"]
