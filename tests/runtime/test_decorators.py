"""The decorators of dynamo.runtime."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from dynamo_trio import Context, Phase, open_runtime
from dynamo_trio.decorators import dynamo_endpoint, dynamo_worker
from dynamo_trio.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from trio.testing import MockClock

    from dynamo_trio import DistributedRuntime
    from dynamo_trio.endpoint import Handler


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
async def test_the_handler_gets_its_model(
    handler: Handler, answer: list[str], autojump_clock: MockClock
) -> None:
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


# --- dynamo_worker -----------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.01",
    }.items():
        monkeypatch.setenv(name, value)


async def letters(request: str) -> AsyncGenerator[str, None]:
    for letter in request:
        yield letter


@pytest.mark.usefixtures("environment")
def test_a_worker_gets_a_runtime_as_the_environment_says(tmp_path: Path) -> None:
    answers = []

    @dynamo_worker()
    async def main(runtime: DistributedRuntime, question: str) -> None:
        endpoint = runtime.endpoint("t.b.generate")
        async with endpoint.serving(letters), endpoint.client() as client:
            await client.wait_for_instances()
            assert list((tmp_path / "v1" / "instances").iterdir())
            async with client.generate(question) as stream:
                answers.extend([item async for item in stream])

    trio.run(main, "ab")
    assert answers == ["a", "b"]
    assert not list((tmp_path / "v1" / "instances").iterdir())


@pytest.mark.usefixtures("environment")
def test_what_a_worker_is_called_with_is_handed_on() -> None:
    seen = []

    @dynamo_worker()
    async def main(runtime: DistributedRuntime, first: int, *, named: int) -> None:
        seen.append((first, named))

    trio.run(partial(main, 1, named=2))
    assert seen == [(1, 2)]


@pytest.mark.usefixtures("environment")
def test_a_worker_that_serves_for_ever_is_ended_by_a_stop() -> None:
    ended = []

    @dynamo_worker()
    async def main(runtime: DistributedRuntime) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.endpoint("t.b.generate").serve_endpoint, letters)
            runtime.shutdown()
            try:
                await trio.sleep_forever()
            finally:
                ended.append(runtime.lifecycle.phase)

    trio.run(main)
    assert ended == [Phase.STOPPED]


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dynamo_worker()
    async def main(runtime: DistributedRuntime) -> None:
        raise AssertionError("it must not run")

    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "paper")
    with pytest.raises(ConfigError, match="DYN_DISCOVERY_BACKEND"):
        trio.run(main)


def test_there_is_no_nats() -> None:
    with pytest.raises(ValueError, match="NATS"):
        dynamo_worker(enable_nats=True)
