"""A process that stands still for a while (``kill -STOP``), on each side."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tests.interop.load import CHAT, Load, two_workers, wait_found
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.standalone.harness import chat, finish_all, in_parallel, open_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.interop.processes import Process
    from tests.interop.scene import Scene

#: Seconds. Not enough for anybody's registration to expire.
A_WHILE = 2.0


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    process.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        process.kill(signal.SIGCONT)


@axes(1)
def test_our_worker_stands_still_mid_stream(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model, "--itl-ms", "5")
    frontend = scene.their_frontend
    frontend.wait_model(model, worker.process)
    body = chat(100, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)
    with open_streams(frontend.port, 4, body) as streams:
        with frozen(worker.process):
            time.sleep(A_WHILE)
        answers = finish_all(streams)
    assert all(answer.is_done for answer in answers)
    assert [answer.text for answer in answers] == [undisturbed.text] * 4


@axes(0)
def test_their_frontend_stands_still_while_our_worker_sends(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model, "--itl-ms", "1")
    frontend = scene.their_frontend
    frontend.wait_model(model, worker.process)
    body = chat(600, model=model.name)
    undisturbed = frontend.ask("POST", CHAT, body)
    with open_streams(frontend.port, 4, body) as streams:
        with frozen(frontend.process):
            time.sleep(A_WHILE)
        answers = finish_all(streams)
    assert all(answer.is_done for answer in answers)
    assert [answer.text for answer in answers] == [undisturbed.text] * 4


@axes(0, few=True)
def test_no_request_fails_while_one_of_two_workers_stands_still_and_is_forgotten(
    scene: Scene,
) -> None:
    model = scene.model()
    first, second = two_workers(scene, model)
    load = Load(scene.their_frontend, model)
    with load.running():
        instance_id = first.instance_id
        with frozen(first.process):
            wait_until(
                lambda: instance_id not in scene.store.instances(model),
                *("the loss of a registration", second.process),
            )
        wait_found(scene, model, first)
    load.check()


@axes(1)
def test_their_mocker_stands_still_mid_stream_behind_our_frontend(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model)
    frontend = scene.our_frontend()
    frontend.wait_model(model, mocker)
    body = chat(200, model=model.name, stream_options={"include_usage": True})
    with open_streams(frontend.port, 4, body) as streams:
        with frozen(mocker):
            time.sleep(A_WHILE)
        answers = finish_all(streams)
    assert all(answer.is_done for answer in answers)
    assert [a.chunks[-1]["usage"]["completion_tokens"] for a in answers] == [200] * 4


@axes(0)
def test_our_frontend_stands_still_while_their_mocker_sends(scene: Scene) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model)
    frontend = scene.our_frontend()
    frontend.wait_model(model, mocker)
    body = chat(200, model=model.name, stream_options={"include_usage": True})
    with open_streams(frontend.port, 4, body) as streams:
        with frozen(frontend.process):
            time.sleep(A_WHILE)
        answers = finish_all(streams)
    assert all(answer.is_done for answer in answers)
    assert [a.chunks[-1]["usage"]["completion_tokens"] for a in answers] == [200] * 4
    again = partial(frontend.ask, "POST", CHAT, body)
    assert all(answer.is_done for answer in in_parallel([again] * 4))
