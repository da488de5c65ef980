"""Workers that speak the Realtime API themselves, and a frontend before them, in one process."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.discovery import EndpointId, MemoryDiscovery
from dynamo_trio.errors import EngineShutdown
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.cards import card_loader
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.models import make_realtime_card
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.runtime import open_runtime
from tests.runtime.real_planes import plane_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from pathlib import Path

    from dynamo_trio.context import Context
    from dynamo_trio.request_stream import RequestStream
    from tests.frontend.realtime_peer import Peer

    Event = dict[str, Any]

PATIENCE = 20.0
ENDPOINT = EndpointId("test", "voice", "talk")
NOTICE = "dynamo_trio.session.draining"
TRANSCRIPTION = "conversation.item.input_audio_transcription"


@attrs.define(eq=False)
class Voice:
    """A worker: echoes audio as if it were a transcript, and does what some audio says."""

    name: str = "voice"
    #: What each session has sent, and how it ended: stopped, killed.
    heard: list[list[Event]] = attrs.field(factory=list)
    ends: list[tuple[bool, bool]] = attrs.field(factory=list)
    #: Set while it does not read.
    deaf: bool = False
    #: What it still says when there is no more to hear.
    last_words: int = 0
    lifecycle: Lifecycle = attrs.field(init=False)
    runtime: Any = attrs.field(init=False)
    #: Around all of the worker.
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def instance_id(self) -> int:
        return int(self.runtime.instance_id)

    def types(self, session: int = -1) -> list[str]:
        return [event.get("type", "") for event in self.heard[session]]

    async def talk(self, requests: RequestStream, context: Context) -> AsyncGenerator[Any, None]:
        heard: list[Event] = []
        self.heard.append(heard)
        try:
            async for event in requests:
                heard.append(event)
                if event.get("type") == "end":
                    return
                for answer in self.answers(event, heard):
                    yield answer
                while self.deaf:  # noqa: ASYNC110 - the test says when
                    await trio.sleep(0.01)
            while self.last_words:
                await trio.sleep(0.01)
                yield {"type": "farewell"}
                self.last_words -= 1
        finally:
            self.ends.append((context.is_stopped(), context.is_killed()))

    def answers(self, event: Event, heard: list[Event]) -> list[Any]:
        match event.get("type"), event.get("audio"):
            case "session.update", _:
                session = event["session"]
                return [{"type": "session.updated", "session": session, "by": self.name}]
            case "input_audio_buffer.append", str(audio):
                return self.commanded(audio)
            case "input_audio_buffer.commit", _:
                text = "".join(e.get("audio", "") for e in heard)
                return [
                    {"type": "input_audio_buffer.committed", "item_id": f"item_{len(heard)}"},
                    {"type": f"{TRANSCRIPTION}.delta", "delta": text},
                    {"type": f"{TRANSCRIPTION}.completed", "transcript": text},
                ]
            case "say", _:
                return [{**event.get("fields", {}), "type": event["say"]}]
            case "input_audio_buffer.clear", _:
                return [{"type": "input_audio_buffer.cleared"}]
        return [{"type": "echo", "of": event.get("type"), "event": event, "by": self.name}]

    def commanded(self, audio: str) -> list[Any]:
        """Audio is silently taken, but for these."""
        match audio:
            case "POISON":
                raise EngineShutdown("the engine died of it")
            case "RAISE":
                raise RuntimeError("boom /etc/secret")
            case "BAD":
                return ["this is no event"]
            case "FLOOD":
                return [{"type": "flood", "number": n, "text": "x" * 1000} for n in range(2000)]
        return []


@attrs.define(eq=False)
class Choir:
    """Everything that a test may want to touch."""

    frontend: Frontend
    lifecycle: Lifecycle
    app: App
    voices: list[Voice]
    _start: Callable[[Voice], Any]

    @property
    def instances(self) -> list[int]:
        models = self.frontend.catalog.models()  # those that have a worker
        return [instance for model in models for instance in model.client.instance_ids()]

    async def start(self, name: str) -> Voice:
        """One worker more."""
        voice = Voice(name)
        await self._start(voice)
        await until(lambda: voice.instance_id in self.instances)
        return voice

    def at(self) -> Voice:
        """The worker that has the session of a test that has one."""
        [voice] = [v for v in self.voices if len(v.heard) > len(v.ends)]
        return voice

    def outcomes(self) -> dict[str, float]:
        """How the requests to the model have ended, by the metrics."""
        samples = [s for m in self.frontend.metrics.registry.collect() for s in m.samples]
        return {
            s.labels["error_type"] or s.labels["status"]: s.value
            for s in samples
            if s.name == "dynamo_frontend_requests_total" and s.labels["endpoint"] == "realtime"
        }


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
            await trio.sleep(0.001)


async def select(peer: Peer, session_type: str = "realtime") -> None:
    """Select the model as Dynamo has it, and wait until the worker has agreed."""
    assert (await peer.read())["type"] == "session.created"
    model: dict[str, Any] = {"model": "voice"}
    if session_type == "transcription":
        model = {"audio": {"input": {"transcription": {"model": "voice"}}}}
    peer.say("session.update", session={"type": session_type, **model})
    assert (await peer.read())["type"] == "session.updated"


def append(peer: Peer, audio: str) -> None:
    peer.say("input_audio_buffer.append", audio=audio)


async def closed(peer: Peer) -> tuple[int, str]:
    with trio.fail_after(PATIENCE):
        await peer.over.wait()
    assert peer.close is not None
    return peer.close


@asynccontextmanager
async def open_choir(
    folder: Path, kind: str = "mem", *, workers: int = 1, drain: float = 30.0, **limits: Any
) -> AsyncIterator[Choir]:
    """A frontend, and workers that stop each by themselves.

    Args:
        kind: of the plane: mem, tcp or mux.
        drain: seconds for which a worker that stops waits for its sessions.
        limits: of the frontend's stop.
    """
    discovery, shared = MemoryDiscovery(), MemoryPlane()
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, "http_drain": 5.0, **limits}))
    frontend = Frontend(lifecycle)
    voices: list[Voice] = []

    async def work(voice: Voice, *, task_status: trio.TaskStatus[None]) -> None:
        voice.lifecycle = Lifecycle(Timetable(grace=0.0, drain=drain))
        with voice.scope:
            await _serve(voice, task_status)

    async def _serve(voice: Voice, task_status: trio.TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            plane = shared if kind == "mem" else await stack.enter_async_context(plane_of(kind))
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(voice.lifecycle.run)
            opening = open_runtime(voice.lifecycle, discovery=discovery, planes=[plane])
            voice.runtime = await stack.enter_async_context(opening)
            endpoint = voice.runtime.endpoint(str(ENDPOINT))
            card = make_realtime_card(
                name="voice", endpoint=ENDPOINT, instance_id=endpoint.connection_id()
            )
            serving = endpoint.serving_bidirectional(voice.talk, card=card)
            await stack.enter_async_context(serving)
            voices.append(voice)
            task_status.started()
            await voice.lifecycle.wait_stopped()

    async with trio.open_nursery() as services, AsyncExitStack() as stack:
        services.start_soon(lifecycle.run)
        plane = shared if kind == "mem" else await stack.enter_async_context(plane_of(kind))
        load = card_loader(folder)
        opening = open_catalog(discovery, {plane.name: plane}, load)
        frontend.catalog = await stack.enter_async_context(opening)
        choir = Choir(frontend, lifecycle, App(frontend), voices, partial(services.start, work))
        frontend.ready = True
        for number in range(workers):
            await services.start(work, Voice(f"voice {number}"))
        with trio.fail_after(PATIENCE):
            await frontend.catalog.wait_for("voice")
        await until(lambda: len(choir.instances) == workers)
        yield choir
        alive = [v.lifecycle for v in voices if not v.scope.cancel_called]
        for part in (lifecycle, *alive):
            part.request_stop("the test is over")
            await part.wait_stopped()
