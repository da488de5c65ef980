"""``/v1/realtime`` of our frontend, before workers on NVIDIA's runtime."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from tests.interop.namespace import in_thread
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.interop.sessions import PATIENCE, hear, say, session, websocket

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

    from tests.interop.fleet import Frontend
    from tests.interop.model import Model
    from tests.interop.processes import Process
    from tests.interop.scene import Scene


async def tell(socket: WebSocketConnection, type: str, **fields: Any) -> None:
    await socket.send_message(json.dumps({"type": type, **fields}))


async def two_workers(scene: Scene, model: Model) -> tuple[Frontend, dict[int, Process]]:
    """Both are known to a frontend of ours; the workers by their process ids."""
    workers = [scene.their_realtime_worker(model) for _ in range(2)]
    frontend = await in_thread(scene.our_frontend)

    def both() -> bool:
        return len(frontend.ask("GET", "/health").json()["instances"]) == 2

    await in_thread(partial(wait_until, both, "two workers", frontend.process, *workers))
    return frontend, {worker.popen.pid: worker for worker in workers}


async def code_of_close(socket: WebSocketConnection) -> int:
    with trio.fail_after(PATIENCE), pytest.raises(ConnectionClosed) as caught:
        await socket.get_message()
    assert caught.value.reason is not None
    return int(caught.value.reason.code)


@axes(0)
async def test_our_frontend_talks_with_their_worker(scene: Scene) -> None:
    model = scene.model()
    worker = scene.their_realtime_worker(model)
    frontend = await in_thread(scene.our_frontend)
    await in_thread(partial(frontend.wait_model, model, worker))
    answer = await in_thread(
        partial(
            frontend.ask,
            "POST",
            "/v1/chat/completions",
            {"model": model.name, "messages": [{"role": "user", "content": "x"}]},
        )
    )
    assert answer.status == 404

    async with session(frontend.port, model.name) as socket:
        await tell(socket, "an.event.of.our.own", text="é", n=[1, None, 2.5])
        event = {"type": "an.event.of.our.own", "text": "é", "n": [1, None, 2.5]}
        assert (await hear(socket))["event"] == event
        await say(socket, "A" * 400_000)
        await tell(socket, "input_audio_buffer.commit")
        assert (await hear(socket))["transcript"] == "A" * 400_000
    # The client has closed it, which is no reason to kill anybody.
    ended = "the input has ended, stopped=True killed=False"
    await in_thread(partial(worker.wait_log, ended))

    async with session(frontend.port, model.name) as socket:
        await say(socket, "END0")
        assert await code_of_close(socket) == 1000

    async with session(frontend.port, model.name) as socket:
        await say(socket, "RAISE000")
        error = (await hear(socket))["error"]
        assert (error["type"], error["message"]) == ("server_error", "Internal server error.")
        assert await code_of_close(socket) == 1000

    for frame, code in (("no json", 1007), (b"\x00", 1003)):
        async with session(frontend.port, model.name) as socket:
            await socket.send_message(frame)
            assert await code_of_close(socket) == code
    assert worker.is_running


@axes(1)
async def test_a_session_leaves_their_worker_when_it_is_told_to_stop(scene: Scene) -> None:
    """Theirs would wait for as long as the client stays."""
    model = scene.model()
    frontend, workers = await two_workers(scene, model)
    async with websocket(frontend.port, "/v1/realtime") as socket:
        await hear(socket)
        wanted = {"type": "realtime", "model": model.name}
        await tell(socket, "session.update", session=wanted)
        old = workers.pop((await hear(socket))["pid"])
        [new] = workers.values()
        await say(socket, "AAAA")
        await in_thread(partial(old.wait_log, "heard input_audio_buffer.append"))
        old.popen.terminate()
        await in_thread(partial(new.wait_log, "heard input_audio_buffer.append"))
        with trio.fail_after(PATIENCE):
            await in_thread(old.popen.wait)
        await say(socket, "BBBB")
        await tell(socket, "input_audio_buffer.commit")
        assert (await hear(socket))["transcript"] == "AAAABBBB"


@axes(0, few=True)
async def test_a_session_goes_on_when_their_worker_is_killed(scene: Scene) -> None:
    model = scene.model()
    frontend, workers = await two_workers(scene, model)
    async with websocket(frontend.port, f"/v1/realtime?model={model.name}") as socket:
        assert (await hear(socket))["session"]["model"] == model.name
        await tell(socket, "session.update", session={"type": "realtime"})
        old = workers.pop((await hear(socket))["pid"])
        await say(socket, "AAAA")
        await in_thread(partial(old.wait_log, "heard input_audio_buffer.append"))
        old.popen.kill()
        await tell(socket, "input_audio_buffer.commit")
        assert (await hear(socket))["transcript"] == "AAAA"
