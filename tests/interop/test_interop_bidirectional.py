"""Requests that stream in: our client and NVIDIA's worker, NVIDIA's frontend and our worker."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from dynamo_trio import open_runtime
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.errors import EngineShutdown, Unknown
from dynamo_trio.models import make_realtime_card
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.codec import codec_named
from tests.interop.model import unique
from tests.interop.namespace import in_thread
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.interop.sessions import hear, say, session
from tests.interop.stores import EtcdStore, FileStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from dynamo_trio import Client, Context, DistributedRuntime
    from dynamo_trio.bidirectional import BidirectionalStream
    from dynamo_trio.request_stream import RequestStream
    from tests.interop.scene import Scene

PATIENCE = 30.0


@asynccontextmanager
async def our_runtime(scene: Scene) -> AsyncIterator[DistributedRuntime]:
    """In this process."""
    store = scene.store
    if isinstance(store, FileStore):
        opening = open_file_discovery(FileSettings(root=store.folder))
    else:
        assert isinstance(store, EtcdStore)
        opening = open_etcd_discovery(EtcdSettings(endpoints=(store.url,)))
    settings = TcpSettings(rpc_host="127.0.0.1", response_host="lo")
    async with (
        opening as discovery,
        open_tcp_plane(settings) as plane,
        open_runtime(
            discovery=discovery, planes=[plane], codec=codec_named(scene.codec)
        ) as runtime,
    ):
        yield runtime


# --- our client, their worker ----------------------------------------------------------------


@asynccontextmanager
async def our_client(scene: Scene, namespace: str) -> AsyncIterator[Client]:
    endpoint = f"{namespace}.backend.talk"
    async with our_runtime(scene) as runtime, runtime.endpoint(endpoint).client() as client:
        with trio.fail_after(PATIENCE):
            await client.wait_for_instances()
        yield client


async def exchange(stream: BidirectionalStream, item: object) -> Any:
    with trio.fail_after(PATIENCE):
        await stream.send(item)
        return await anext(stream)


@axes(0)
async def test_our_client_talks_with_their_worker(scene: Scene) -> None:
    namespace = unique("ns")
    worker = scene.their_bidirectional_worker(namespace)
    async with our_client(scene, namespace) as client:
        async with client.bidirectional() as stream:
            for number in range(3):
                item = {"n": number, "text": "é"}
                assert await exchange(stream, item) == {"echo": item}
            stream.end_input()
            assert [item async for item in stream] == [{"bye": False}]

        async with client.bidirectional() as stream:  # the worker ends first
            assert await exchange(stream, {}) == {"echo": {}}
            await stream.send({"then": "end"})
            assert [item async for item in stream] == []

        for then, error in (("raise", Unknown), ("hand over", EngineShutdown)):
            async with client.bidirectional() as stream:
                await exchange(stream, {})
                with pytest.raises(error):
                    await exchange(stream, {"then": then})
    assert worker.is_running


@axes(1)
async def test_their_worker_hears_stop_and_leaving_of_our_client(scene: Scene) -> None:
    namespace = unique("ns")
    worker = scene.their_bidirectional_worker(namespace)
    ended = "the input has ended, stopped=True"
    async with our_client(scene, namespace) as client:
        async with client.bidirectional() as stream:
            await exchange(stream, {})
            stream.stop_generating()
            with trio.fail_after(PATIENCE):
                assert [item async for item in stream] == []
            await in_thread(partial(worker.wait_log, ended))
        async with client.bidirectional() as stream:
            await exchange(stream, {})
        await in_thread(partial(worker.wait_log, ended, times=2))


@axes(0)
async def test_their_worker_holds_our_client_back(scene: Scene) -> None:
    """Two seconds in which it reads nothing: what is under way then is bounded."""
    namespace = unique("ns")
    scene.their_bidirectional_worker(namespace)
    text = "x" * 500_000
    async with our_client(scene, namespace) as client, client.bidirectional() as stream:
        await exchange(stream, {"then": "count", "text": text, "seconds": 2.0})
        sent = 0
        with trio.move_on_after(1.0):
            while sent < 1000:
                await stream.send({"then": "count", "text": text, "seconds": 0})
                sent += 1
        assert sent < 300
        with trio.fail_after(PATIENCE):
            for _ in range(sent):
                assert await anext(stream) == {"size": len(text)}


# --- their frontend, our worker --------------------------------------------------------------


class Worker:
    """Ours, on OpenAI's Realtime API: echoes audio as if it were a transcript."""

    def __init__(self) -> None:
        self.ends: list[object] = []

    async def talk(self, requests: RequestStream, context: Context) -> AsyncGenerator[Any, None]:
        number = 0
        try:
            async for event in requests:
                number += 1
                match event["type"], event.get("audio"):
                    case "session.update", _:
                        yield self.updated(number, event["session"])
                    case _, "RAISE000":
                        raise RuntimeError("boom")
                    case _, "END0":
                        return
                    case _, audio:
                        yield self.delta(number, audio)
        finally:
            self.ends.append(context.is_stopped())

    @staticmethod
    def updated(number: int, session: object) -> dict[str, Any]:
        return {"type": "session.updated", "event_id": f"event_{number}", "session": session}

    @staticmethod
    def delta(number: int, text: str) -> dict[str, Any]:
        return {
            "type": "conversation.item.input_audio_transcription.delta",
            "event_id": f"event_{number}",
            "item_id": "item_1",
            "content_index": 0,
            "delta": text,
            "logprobs": None,
        }


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says "whatever you like"
            await trio.sleep(0.01)


@axes(1)
async def test_their_frontend_talks_with_our_worker(scene: Scene) -> None:
    worker, name = Worker(), unique("voice-")
    frontend = await in_thread(lambda: scene.their_frontend)
    async with our_runtime(scene) as runtime:
        endpoint = runtime.endpoint(f"{unique('ns')}.backend.generate")
        card = make_realtime_card(
            name=name, endpoint=endpoint.id, instance_id=endpoint.connection_id()
        )
        async with endpoint.serving_bidirectional(worker.talk, card=card):
            offered = partial(wait_until, lambda: name in frontend.models(), f"model {name}")
            await in_thread(partial(offered, frontend.process))

            async with session(frontend.port, name) as socket:  # the client leaves
                for audio in ("AAAA", "A" * 400_000):
                    await say(socket, audio)
                    assert (await hear(socket))["delta"] == audio
            await until(lambda: worker.ends == [True])

            async with session(frontend.port, name) as socket:  # the worker ends
                await say(socket, "END0")
                with trio.fail_after(PATIENCE), pytest.raises(ConnectionClosed):
                    await socket.get_message()
            assert worker.ends == [True, False]

            async with session(frontend.port, name) as socket:  # the worker fails
                await say(socket, "RAISE000")
                assert (await hear(socket))["type"] == "error"
            assert worker.ends == [True, False, False]
