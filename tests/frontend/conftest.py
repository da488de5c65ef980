"""The frontend in virtual time: a simulated engine behind it, an ASGI client before it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from dynamo_trio.discovery import EndpointId, ModelCard
from dynamo_trio.engines import Engine, Limits
from dynamo_trio.frontend.app import App
from dynamo_trio.frontend.catalog import open_catalog
from dynamo_trio.frontend.state import Frontend
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.testing import InlineHost, SimCore, SimSettings
from dynamo_trio.tokenizers import ByteTokenizer, Preprocessor
from dynamo_trio.wire.llm import PreprocessedRequest
from dynamo_trio.wire.openai.sse import EventParser
from dynamo_trio.worker.hold import hold_engine
from dynamo_trio.worker.serve import engine_handler


@attrs.define(eq=False)
class Answer:
    """What came back, as it comes: usable while the request runs."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    ended: bool = False
    done: trio.Event = attrs.field(factory=trio.Event)
    left: trio.Event = attrs.field(factory=trio.Event)

    def leave(self) -> None:
        """The client closes its connection."""
        self.left.set()

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The server-sent events so far, decoded; ``[DONE]`` as it is."""
        return [e.data if e.is_done else json.loads(e.data) for e in EventParser().feed(self.body)]

    def text(self) -> str:
        """The streamed text so far."""
        chunks = [event for event in self.events() if event != "[DONE]" and "choices" in event]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        pieces = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
        return "".join(pieces)


@attrs.define(eq=False)
class Client:
    """Calls an ASGI app directly."""

    app: App
    nursery: trio.Nursery
    #: Seconds that the client takes for each message; None: it never reads again.
    slowness: float | None = 0.0

    def start(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request and return at once."""
        answer = Answer()
        raw = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            raw = json.dumps(body).encode()
        self.nursery.start_soon(self._run, method, path, raw, headers or {}, answer)
        return answer

    async def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request and wait for the end of its answer."""
        answer = self.start(method, path, body, headers)
        await answer.done.wait()
        return answer

    async def _run(
        self, method: str, path: str, body: bytes, headers: dict[str, str], answer: Answer
    ) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "extensions": {},
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                await trio.lowlevel.checkpoint()
                return messages.pop()
            await answer.left.wait()
            return {"type": "http.disconnect"}

        await self.app(scope, receive, partial(self._take, answer))
        answer.done.set()

    async def _take(self, answer: Answer, message: Any) -> None:
        if self.slowness is None:
            await trio.sleep_forever()
        await trio.sleep(self.slowness or 0)
        if message["type"] == "http.response.start":
            assert not answer.status, "two heads"
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert not answer.ended, "a body after its end"
            answer.body += message.get("body", b"")
            answer.ended = not message.get("more_body", False)


@attrs.define(eq=False)
class Site:
    """Everything that a test may want to touch."""

    client: Client
    frontend: Frontend
    lifecycle: Lifecycle
    runtime: DistributedRuntime
    engine: Engine
    core: SimCore

    async def stopped(self) -> float:
        """Wait for the end of a stop; returns the time at which it came."""
        await self.lifecycle.wait_stopped()
        return trio.current_time()


Opener = Callable[..., AbstractAsyncContextManager[Site]]


@asynccontextmanager
async def _open_site(
    *, itl_ms: float = 100.0, prefill_ms: float = 0.0, context_tokens: int = 512, **limits: Any
) -> AsyncIterator[Site]:
    settings = SimSettings(
        itl_ms=itl_ms, prefill_ms=prefill_ms, context_tokens=context_tokens, virtual=True
    )
    core = SimCore(settings)
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, "http_drain": 5.0, **limits}))
    frontend = Frontend(lifecycle)
    tokenizer = ByteTokenizer()

    async def load(card: ModelCard) -> Preprocessor:
        return Preprocessor(tokenizer, context_length=card.context_length, model=card.name)

    hold = partial(
        hold_engine, lifecycle, core, host=InlineHost(), limits=Limits(step=30.0, interrupt=5.0)
    )
    async with trio.open_nursery() as clients, trio.open_nursery() as services:
        services.start_soon(lifecycle.run)
        async with (
            open_runtime(lifecycle) as runtime,
            open_catalog(runtime.discovery, runtime.planes, load) as frontend.catalog,
        ):
            async with trio.open_nursery() as engines:
                engine: Engine = await engines.start(lifecycle.supervise, hold)
                endpoint = EndpointId.parse("dynamo.backend.generate")
                card = ModelCard(
                    "sim", endpoint, runtime.instance_id, context_length=context_tokens
                )
                async with runtime.endpoint(str(endpoint)).serving(
                    engine_handler(engine), request_type=PreprocessedRequest, card=card
                ):
                    await frontend.catalog.wait_for("sim")
                    frontend.ready = True
                    client = Client(App(frontend), clients)
                    yield Site(client, frontend, lifecycle, runtime, engine, core)
                    lifecycle.request_stop("the test is over")
                    await lifecycle.wait_stopped()
        clients.cancel_scope.cancel()


@pytest.fixture
def open_site() -> Opener:
    """``async with open_site(itl_ms=…, http_drain=…) as site``.

    The test itself must ask for ``autojump_clock``: a clock counts only in its own signature.
    """
    return _open_site
