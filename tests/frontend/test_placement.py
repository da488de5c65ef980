"""A request that its worker fails untouched is sent to others; a begun one is not."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.client import Client
from dynamo_trio.discovery import EndpointId, Instance, MemoryDiscovery, ModelCard
from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    Draining,
    DynamoException,
    EngineDead,
    EngineShutdown,
    InvalidArgument,
    NotConnected,
    Overloaded,
    ProtocolError,
    RequestRejected,
    StreamIncomplete,
    Unknown,
    UnreadableItem,
)
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.placement import OTHERS
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.lifecycle import CutReason, Lifecycle, Outcome, Timetable
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.dynamo.codec import MSGPACK
from dynamo_trio.wire.llm import LLMEngineOutput
from tests.frontend.conftest import Client as Caller
from tests.runtime.fake_planes import FakePlane, FakeStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

    from dynamo_trio.plane import ClientStream, ItemSink, RequestHead

CHAT = "/v1/chat/completions"
GENERATE = EndpointId.parse("dynamo.backend.generate")
TEXT = b"all of it"

#: What the worker's side breaks, and what a client is told if there is nobody else.
WORKERS_FAULT: list[tuple[DynamoException, int, str]] = [
    (CannotConnect("why"), 503, "cannot_connect"),
    (NotConnected("why"), 503, "cannot_connect"),
    (Disconnected("why"), 503, "unanswered"),
    (ConnectionTimeout("why"), 503, "unanswered"),
    (StreamIncomplete("why"), 503, "unanswered"),
    (EngineShutdown("why"), 503, "engine_shutdown"),
    (EngineDead("why"), 503, "engine_dead"),
    (Draining("why"), 503, "draining"),
    (Overloaded("why"), 529, "overloaded"),
]
#: What would be no better elsewhere.
OWN_FAULT: list[tuple[DynamoException, int, str]] = [
    (InvalidArgument("why"), 400, "invalid_request"),
    (RequestRejected("why"), 400, "invalid_request"),
    (UnreadableItem("why"), 500, "unreadable_item"),
    (ProtocolError("why"), 500, "protocol_error"),
    (Unknown("why"), 500, "internal"),
]
by_class = pytest.mark.parametrize(
    ("error", "status", "code"), WORKERS_FAULT, ids=lambda v: type(v).__name__
)
both_kinds = pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])


@attrs.frozen
class Deed:
    """What one worker does with a request: after some seconds, in this order."""

    refusal: DynamoException | None = None
    after: float = 0.0
    tokens: bytes = b""
    error: DynamoException | None = None
    #: Called before the end is told.
    first: Callable[[], object] = bool


WELL = Deed(tokens=TEXT)
NEVER = Deed(after=1e6)


@attrs.define(eq=False)
class Workers(FakePlane):
    """Workers that do what they are told to."""

    name: str = "fake"  # type: ignore[misc]  # as in the base class
    deeds: dict[str, Deed] = attrs.field(factory=dict)
    #: Those whose stream was left before its end.
    left: list[str] = attrs.field(factory=list)
    bodies: list[bytes] = attrs.field(factory=list)

    @asynccontextmanager
    async def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AsyncIterator[ClientStream]:
        self.asked.append(address)
        self.bodies.append(payload)
        deed = self.deeds[address]
        await trio.lowlevel.checkpoint()
        if deed.refusal is not None:
            deed.first()
            raise deed.refusal
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer, address, deed, sink)
            yield FakeStream()
            nursery.cancel_scope.cancel()

    async def _answer(self, address: str, deed: Deed, sink: ItemSink) -> None:
        try:
            await trio.sleep(deed.after)
        except trio.Cancelled:
            self.left.append(address)
            raise
        if deed.tokens:
            sink.feed_tokens(list(deed.tokens))
        deed.first()
        if deed.error is None:
            end = LLMEngineOutput(token_ids=[], finish_reason="stop")
            sink.feed([MSGPACK.encode(end)])
        sink.finish(deed.error)


@attrs.define(eq=False)
class Scene:
    caller: Caller
    frontend: Frontend
    lifecycle: Lifecycle
    workers: Workers
    discovery: MemoryDiscovery

    @property
    def asked(self) -> list[str]:
        return self.workers.asked

    async def worker(self, number: int, deed: Deed) -> None:
        self.workers.deeds[f"w{number}"] = deed
        await self.discovery.register(Instance(GENERATE, number, {"fake": f"w{number}"}))
        await trio.testing.wait_all_tasks_blocked()

    def total(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for metric in self.frontend.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def chat(*, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "m", "messages": messages, "max_tokens": 50, "stream": stream}


@asynccontextmanager
async def open_scene(*deeds: Deed, http_drain: float = 5.0) -> AsyncIterator[Scene]:
    """A frontend and so many workers, w1, w2, ..."""
    lifecycle = Lifecycle(Timetable(grace=0.0, http_drain=http_drain))
    frontend, discovery, workers = Frontend(lifecycle), MemoryDiscovery(), Workers()

    async def load(card: ModelCard) -> Preprocessor:
        return Preprocessor(ByteTokenizer(), context_length=512, model=card.name)

    async with trio.open_nursery() as clients, trio.open_nursery() as services:
        services.start_soon(lifecycle.run)
        async with open_catalog(discovery, {"fake": workers}, load) as frontend.catalog:
            caller = Caller(App(frontend), clients)
            scene = Scene(caller, frontend, lifecycle, workers, discovery)
            await discovery.register(ModelCard("m", GENERATE, 1))
            for number, deed in enumerate(deeds, 1):
                await scene.worker(number, deed)
            await frontend.catalog.wait_for("m")
            frontend.ready = True
            yield scene
            lifecycle.request_stop("the test is over")
            await lifecycle.wait_stopped()
        clients.cancel_scope.cancel()


def said(answer: Any, *, stream: bool) -> bytes:
    assert answer.status == 200
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"]).encode()
    assert answer.events()[-1] == "[DONE]"
    return str(answer.text()).encode()


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """The lines of requests."""
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno == level and r.getMessage().startswith("chat_completions")
    ]


# --- sent to another one ------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "refused"])
@by_class
async def test_what_the_workers_side_breaks_is_mended_by_another_worker(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    error: DynamoException,
    status: int,
    code: str,
    accepted: bool,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO)
    deed = Deed(error=error, after=1) if accepted else Deed(error)
    async with open_scene(deed, WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(answer, stream=stream) == TEXT
        assert scene.asked == ["w1", "w2"]
        assert scene.workers.bodies[0] == scene.workers.bodies[1]
        assert scene.lifecycle.http.tally == {Outcome.FINISHED: 1}
        assert scene.total("dynamo_frontend_requests_started_total") == 1
        assert scene.total("dynamo_frontend_requests_total") == 1
        assert scene.total("dynamo_frontend_requests_total", status="success") == 1
        assert scene.total("dynamo_frontend_active_requests") == 0
        assert scene.total("dynamo_frontend_time_to_first_token_seconds_count") == 1
    assert told(caplog, logging.WARNING) == []
    (line,) = told(caplog, logging.INFO)
    assert line.startswith("chat_completions of m by 2, after 1 other: complete, 9 tokens in ")


@both_kinds
@pytest.mark.parametrize(
    ("error", "status", "code"), OWN_FAULT, ids=lambda value: type(value).__name__
)
async def test_what_would_be_no_better_elsewhere_goes_nowhere_else(
    autojump_clock: MockClock, error: DynamoException, status: int, code: str, stream: bool
) -> None:
    async with open_scene(Deed(error=error), WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert (answer.status, answer.json()["error"]["code"]) == (status, code)
        assert scene.asked == ["w1"]
        assert scene.lifecycle.http.tally == {Outcome.FAILED: 1}


async def test_a_whole_answer_is_untouched_until_all_of_it_is_there(
    autojump_clock: MockClock,
) -> None:
    broken = Deed(tokens=b"half of", error=Disconnected("why"))
    async with open_scene(broken, WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=False))
        assert said(answer, stream=False) == TEXT
        assert answer.json()["usage"]["completion_tokens"] == len(TEXT)
        assert scene.asked == ["w1", "w2"]
        assert scene.total("dynamo_frontend_output_tokens_total") == len(TEXT)
        assert scene.total("dynamo_frontend_time_to_first_token_seconds_count") == 1


async def test_a_stream_of_which_the_client_has_seen_something_stays_where_it_is(
    autojump_clock: MockClock,
) -> None:
    broken = Deed(tokens=b"half of", error=Disconnected("why"))
    async with open_scene(broken, WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.text()) == (200, "half of")
        assert answer.events()[-1]["error"]["code"] == "disconnected"
        assert scene.asked == ["w1"]
        assert scene.lifecycle.http.tally == {Outcome.CUT: 1}


async def test_half_a_character_is_nothing_that_a_client_has_seen(
    autojump_clock: MockClock,
) -> None:
    broken = Deed(tokens="ä".encode()[:1], error=Disconnected("why"))
    async with open_scene(broken, WELL) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert said(answer, stream=True) == TEXT
        assert scene.asked == ["w1", "w2"]


async def test_a_worker_that_has_come_meanwhile_is_asked(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(error=Disconnected("why"), after=2)) as scene:
        answer = scene.caller.start("POST", CHAT, chat(stream=True))
        await trio.sleep(1)
        await scene.worker(2, WELL)
        await answer.done.wait()
        assert said(answer, stream=True) == TEXT


# --- nobody is left --------------------------------------------------------------------------


@both_kinds
@by_class
async def test_when_nobody_is_left_the_client_may_send_it_again(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    error: DynamoException,
    status: int,
    code: str,
    stream: bool,
) -> None:
    async with open_scene(Deed(error=error), Deed(error)) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert (answer.status, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["message"] == "why"
        assert answer.headers["retry-after"] == "1"
        assert scene.asked == ["w1", "w2"]
        taken = isinstance(error, EngineShutdown) or code == "unanswered"
        assert scene.lifecycle.http.tally == {Outcome.CUT if taken else Outcome.FAILED: 1}
        assert scene.total("dynamo_frontend_requests_total") == 1
        kind = "overload" if status == 529 else "unavailable"
        assert scene.total("dynamo_frontend_requests_total", error_type=kind) == 1
    lines = told(caplog, logging.WARNING)
    assert len(lines) == (status != 529)
    for line in lines:
        assert line.startswith(f"chat_completions of m by 2, after 1 other: {code} (why)")


@both_kinds
@pytest.mark.parametrize("route", [Client.pick, Client.pick_random])
async def test_no_more_than_so_many_are_asked_and_none_twice(
    autojump_clock: MockClock, stream: bool, route: Any
) -> None:
    async with open_scene(*[Deed(CannotConnect("why"))] * 8) as scene:
        scene.frontend.route = route
        for _ in range(10):
            scene.asked.clear()
            assert (await scene.caller.ask("POST", CHAT, chat(stream=stream))).status == 503
            assert len(set(scene.asked)) == len(scene.asked) == 1 + OTHERS
            assert OTHERS == 3


async def test_the_last_error_is_the_one_that_is_told(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(Overloaded("full")), Deed(error=Disconnected("lost"))) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=False))
        assert answer.json()["error"]["message"] == "lost"
        assert answer.status == 503


async def test_an_error_of_the_request_ends_the_search(autojump_clock: MockClock) -> None:
    deeds = Deed(Overloaded("full")), Deed(error=InvalidArgument("bad")), WELL
    async with open_scene(*deeds) as scene:
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, scene.asked) == (400, ["w1", "w2"])


async def test_many_are_spread_over_those_that_are_left(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(error=Disconnected("why"), after=1), WELL, WELL) as scene:
        answers = [scene.caller.start("POST", CHAT, chat(stream=True)) for _ in range(30)]
        for answer in answers:
            await answer.done.wait()
            assert said(answer, stream=True) == TEXT
        assert {who: scene.asked.count(who) for who in scene.asked} == {
            "w1": 10,
            "w2": 15,
            "w3": 15,
        }
        assert scene.lifecycle.http.tally == {Outcome.FINISHED: 30}


# --- ended from outside ------------------------------------------------------------------------


@both_kinds
async def test_a_cut_ends_it_at_the_second_worker(autojump_clock: MockClock, stream: bool) -> None:
    failing = Deed(error=Disconnected("why"), after=1)
    async with open_scene(failing, NEVER, WELL, http_drain=1.0) as scene:
        answer = scene.caller.start("POST", CHAT, chat(stream=stream))
        await trio.sleep(2)
        assert scene.asked == ["w1", "w2"]
        scene.lifecycle.request_stop("SIGTERM")
        await answer.done.wait()
        assert trio.current_time() < 3.5
        assert (answer.status, answer.json()["error"]["code"]) == (503, "cut")
        assert (scene.asked, scene.workers.left) == (["w1", "w2"], ["w2"])
        assert scene.lifecycle.http.tally == {Outcome.CUT: 1}


@both_kinds
async def test_a_client_that_leaves_ends_it_at_the_second_worker(
    autojump_clock: MockClock, stream: bool
) -> None:
    async with open_scene(Deed(error=Disconnected("why"), after=1), NEVER, WELL) as scene:
        answer = scene.caller.start("POST", CHAT, chat(stream=stream))
        await trio.sleep(2)
        answer.leave()
        await answer.done.wait()
        assert trio.current_time() == 2
        assert not answer.status
        assert (scene.asked, scene.workers.left) == (["w1", "w2"], ["w2"])
        assert scene.lifecycle.http.tally == {Outcome.CANCELLED: 1}
        assert scene.total("dynamo_frontend_model_cancellation_total") == 1


@both_kinds
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "refused"])
async def test_what_is_cut_as_its_worker_fails_is_sent_nowhere(
    autojump_clock: MockClock, stream: bool, accepted: bool
) -> None:
    async with open_scene(WELL, WELL) as scene:

        def cut() -> None:
            scene.lifecycle.http.cut_all(CutReason.DRAIN_LIMIT)

        error = Disconnected("why")
        deed = Deed(error=error, first=cut) if accepted else Deed(error, first=cut)
        scene.workers.deeds["w1"] = deed
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "cut")
        assert scene.asked == ["w1"]
        assert scene.lifecycle.http.tally == {Outcome.CUT: 1}
