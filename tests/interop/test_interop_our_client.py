"""Our frontend and our client in front of NVIDIA's mocker and of a worker on NVIDIA's runtime."""

from __future__ import annotations

import signal
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio import open_runtime
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.errors import EngineShutdown, Unknown
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from tests.interop.load import CHAT
from tests.interop.namespace import in_thread
from tests.interop.scene import axes
from tests.interop.stores import EtcdStore, FileStore
from tests.standalone.harness import ask, chat, in_parallel, open_streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio import Client
    from tests.interop.fleet import Frontend
    from tests.interop.model import Model
    from tests.interop.processes import Process
    from tests.interop.scene import Scene

COMPLETIONS = "/v1/completions"
USAGE = {"include_usage": True}


# --- our frontend --------------------------------------------------------------------------------


def before_mocker(scene: Scene, model: Model, *flags: str) -> Frontend:
    mocker = scene.their_mocker(model, *flags)
    frontend = scene.our_frontend()
    frontend.wait_model(model, mocker)
    return frontend


def before_python_worker(scene: Scene, model: Model) -> tuple[Frontend, Process]:
    worker = scene.their_python_worker(model)
    frontend = scene.our_frontend()
    frontend.wait_model(model, worker)
    return frontend, worker


@axes(0)
def test_their_mocker_answers_chat_and_completions(scene: Scene) -> None:
    model = scene.model()
    frontend = before_mocker(scene, model)
    streamed = frontend.ask("POST", CHAT, chat(12, model=model.name, stream_options=USAGE))
    assert streamed.is_done
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == 12
    unary = frontend.ask("POST", CHAT, chat(12, model=model.name, stream=False)).json()
    assert unary["usage"]["completion_tokens"] == 12
    assert unary["choices"][0]["finish_reason"] == "length"
    body: dict[str, Any] = {"model": model.name, "prompt": "Once", "max_tokens": 12}
    unary = frontend.ask("POST", COMPLETIONS, body).json()
    assert unary["usage"]["completion_tokens"] == 12
    streamed = frontend.ask("POST", COMPLETIONS, body | {"stream": True})
    assert streamed.is_done


@axes(0)
def test_their_workers_serve_requests_with_a_deadline(scene: Scene) -> None:
    """They are told of it in the metadata, which they need not know."""
    model = scene.model()
    frontend, _worker = before_python_worker(scene, model)
    header = {"x-dynamo-trio-deadline-secs": "60"}
    body = chat(12, model=model.name, stream=False)
    answer = ask(frontend.port, "POST", CHAT, body, **header)
    assert answer.json()["usage"]["completion_tokens"] == 12
    header = {"x-dynamo-trio-deadline-secs": "0.5"}
    body = chat(6000, model=model.name, stream=False)
    answer = ask(frontend.port, "POST", CHAT, body, **header)
    assert (answer.status, answer.json()["error"]["code"]) == (504, "deadline")


@axes(1)
def test_their_mocker_answers_forty_requests_in_parallel(scene: Scene) -> None:
    model = scene.model()
    frontend = before_mocker(scene, model)
    body = chat(20, model=model.name, stream_options=USAGE)
    answers = in_parallel([partial(frontend.ask, "POST", CHAT, body)] * 40)
    assert all(answer.is_done for answer in answers)
    assert {a.chunks[-1]["usage"]["completion_tokens"] for a in answers} == {20}


@axes(0)
def test_their_mocker_takes_a_prompt_of_twenty_thousand_tokens(scene: Scene) -> None:
    model = scene.model(context_length=32768)
    frontend = before_mocker(scene, model)
    prompt = "the " * 20_000
    body = {"model": model.name, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = frontend.ask("POST", COMPLETIONS, body).json()
    assert answer["usage"]["prompt_tokens"] >= 20_000
    assert answer["usage"]["completion_tokens"] == 8


@axes(1)
def test_their_python_worker_answers_until_a_stop_string(scene: Scene) -> None:
    model = scene.model()
    frontend, worker = before_python_worker(scene, model)
    answer = frontend.ask("POST", CHAT, chat(10, model=model.name))
    assert answer.is_done
    assert answer.text == "abcdefghij"
    body = chat(5000, model=model.name, stop=["efg"], ignore_eos=False, stream=False)
    choice = frontend.ask("POST", CHAT, body).json()["choices"][0]
    assert choice["message"]["content"] == "abcd"
    assert choice["finish_reason"] == "stop"
    worker.wait_log("python_worker: stopped")


@axes(0)
def test_their_python_worker_hears_within_a_second_that_a_client_left(scene: Scene) -> None:
    model = scene.model()
    frontend, worker = before_python_worker(scene, model)
    with open_streams(frontend.port, 1, chat(5000, model=model.name)):
        assert worker.count("python_worker: stopped") == 0
    left = time.monotonic()
    worker.wait_log("python_worker: stopped")
    assert time.monotonic() - left < 10  # a quarter of a second, by design


@axes(1)
def test_their_mocker_is_killed_mid_stream_and_the_client_is_told(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model)
    frontend = scene.our_frontend()
    frontend.wait_model(model, mocker)
    with open_streams(frontend.port, 1, chat(2000, model=model.name)) as (stream,):
        mocker.kill(signal.SIGKILL)
        answer = stream.finish()
    assert answer.error["code"]
    assert answer.error["message"]


# --- our client ----------------------------------------------------------------------------------


@asynccontextmanager
async def our_client(scene: Scene, endpoint: str) -> AsyncIterator[Client]:
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
        open_runtime(discovery=discovery, planes=[plane]) as runtime,
        runtime.endpoint(endpoint).client() as client,
    ):
        await client.wait_for_instances()
        yield client


@axes(0)
async def test_our_client_reads_items_and_errors_of_their_python_worker(scene: Scene) -> None:
    model = scene.model()
    worker = scene.their_python_worker(model)
    async with our_client(scene, f"{model.namespace}.backend.act") as client:
        (instance_id,) = client.instance_ids()
        request: dict[str, Any] = {"items": 3, "echo": {"text": "é", "big": 2**63}}
        async with client.direct(request, instance_id) as stream:
            items = [item async for item in stream]
        assert items == [{"number": n, "echo": request["echo"]} for n in range(3)]

        for then, error in (("raise", Unknown), ("hand over", EngineShutdown)):
            async with client.generate({"items": 2, "then": then}) as stream:
                assert [await anext(stream), await anext(stream)] == [
                    {"number": number, "echo": None} for number in range(2)
                ]
                with pytest.raises(error):
                    await anext(stream)
    assert worker.is_running


@axes(1)
async def test_their_python_worker_obeys_stop_and_kill_of_our_client(scene: Scene) -> None:
    model = scene.model()
    worker = scene.their_python_worker(model)
    async with our_client(scene, f"{model.namespace}.backend.act") as client:
        async with client.generate({"items": 1, "then": "wait"}) as stream:
            await anext(stream)
            stream.stop_generating()
            with trio.fail_after(30):
                assert [item async for item in stream] == []
        await in_thread(partial(worker.wait_log, "python_worker: stopped"))
        async with client.generate({"items": 1, "then": "wait"}) as stream:
            await anext(stream)
        twice = partial(worker.wait_log, "python_worker: stopped", times=2)
        await in_thread(twice)


# --- their client --------------------------------------------------------------------------------


@axes(1)
def test_their_python_client_reads_what_our_worker_says(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model)
    worker.process.wait_log("is ready after")
    request = {
        "model": model.name,
        "token_ids": [5, 6, 7],
        "stop_conditions": {"max_tokens": 4, "ignore_eos": True},
        "sampling_options": {},
    }
    client = scene.their_python_client(model.endpoint, request, {"token_ids": "nonsense"})
    client.wait_log('{"error":')
    said = client.said()
    items = [each["item"] for each in said if "item" in each]
    assert sum(len(item["token_ids"]) for item in items) == 4
    assert items[-1]["finish_reason"] == "length"
    assert said[len(items)] == {"end": None}
    assert "InvalidArgument" in said[-1]["error"]
    assert worker.process.is_running
