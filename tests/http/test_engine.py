"""What lies between hypercorn and the guard: messages for the app, and sends in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from dynamo_trio.http.connection import exchange_of
from dynamo_trio.http.engine import MAX_QUEUED, Inbox
from dynamo_trio.http.guard import TURN, GuardedStream
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.respond import read_body, send_json
from tests.http.harness import Http1Client, MemoryStream, client_of, in_memory, running

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.http.asgi import Message, Receive, Scope, Send

LIMITS = HttpLimits(write_time=30)


def part(data: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def guarded(stream: trio.StapledStream[Any, Any]) -> GuardedStream:
    return GuardedStream(cast("trio.SocketStream", MemoryStream(stream)), LIMITS)


async def test_an_empty_last_part_is_told_by_the_one_before() -> None:
    inbox = Inbox()
    await inbox.put(part(b"a", more=True))
    await inbox.put(part(b"b", more=True))
    await inbox.put(part(b"", more=False))
    assert inbox.whole_body() is None
    assert await inbox.receive() == part(b"a", more=True)
    assert await inbox.receive() == part(b"b", more=False)
    await inbox.put(part(b"", more=False))  # nobody is before it
    assert inbox.whole_body() == b""


async def test_an_app_that_takes_nothing_holds_back_its_client_but_not_the_end(
    autojump_clock: MockClock,
) -> None:
    inbox, put = Inbox(), 0

    async def fill() -> None:
        nonlocal put
        while True:
            await inbox.put(part(b"x", more=True))
            put += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await trio.sleep(1)
        assert put == MAX_QUEUED
        await inbox.put({"type": "http.disconnect"})  # does not wait
        for _ in range(3):
            await inbox.receive()
        await trio.sleep(1)
        assert put == MAX_QUEUED + 2  # what was told of the end counts as well
        nursery.cancel_scope.cancel()


async def test_receive_is_a_checkpoint_for_cancellation() -> None:
    inbox = Inbox()
    await inbox.put(part(b"x", more=False))
    with trio.CancelScope() as scope:
        scope.cancel()
        await inbox.receive()
    assert scope.cancelled_caught
    assert inbox.whole_body() == b"x"  # and nothing is lost


async def test_a_send_that_waits_is_not_torn_and_others_wait_behind_it(
    autojump_clock: MockClock,
) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    guard = guarded(ours)
    got = b""
    async with trio.open_nursery() as nursery:
        for data in (b"a" * 1000, b"b" * 1000):
            nursery.start_soon(guard.send_all, data)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            while len(got) < 2000:
                got += await theirs.receive_some(300)
    assert got == b"a" * 1000 + b"b" * 1000


async def test_a_send_that_waits_behind_another_has_its_own_time(
    autojump_clock: MockClock,
) -> None:
    ours, _ = trio.testing.lockstep_stream_pair()
    guard = guarded(ours)
    errors: list[type[Exception]] = []

    async def send(data: bytes) -> None:
        try:
            await guard.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            errors.append(type(exc))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, b"a")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(send, b"b")
    assert trio.current_time() - began == pytest.approx(LIMITS.write_time)
    assert len(errors) == 2
    assert guard.was_reset


async def test_what_is_held_back_leaves_with_what_follows(autojump_clock: MockClock) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    guard = guarded(ours)
    guard.cork()
    await guard.send_all(b"head ")
    guard.uncork()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard.send_all, b"body")
        assert await theirs.receive_some() == b"head body"
    guard.cork()
    await guard.send_all(b"more")
    assert guard.take_held() == b"more"
    assert guard.take_held() == b""


async def test_a_whole_answer_is_one_write() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, LIMITS)
        await send_json(scope, send, 200, b"{}")

    async with running(app) as server, client_of(server) as client:
        for _ in range(2):
            await client.send("POST", "/", b"{}")
            data = await cast("trio.SocketStream", client.stream).receive_some()
            assert data.endswith(b"\r\n\r\n{}")
            client.parser.receive_data(data)
            assert (await client.answer()).body == b"{}"


async def test_others_get_their_turn_while_a_client_takes_all() -> None:
    turns = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal turns
        await read_body(scope, receive, LIMITS)
        head = [(b"content-length", b"%d" % (16 * TURN))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            for at in range(16 * 64):
                last = at == 16 * 64 - 1
                message = {"type": "http.response.body", "body": b"x" * (TURN // 64)}
                await send({**message, "more_body": not last})
            nursery.cancel_scope.cancel()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with running(app) as server, client_of(server) as client:
        assert len((await client.ask("GET", "/")).body) == 16 * TURN
    assert turns >= 15


async def test_a_request_is_few_steps_of_tasks() -> None:
    """What a request on a kept connection costs, in a measure that is the same everywhere."""

    class Steps(trio.abc.Instrument):
        count = 0
        spawned = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += "_serve" in task.name or "_attend" in task.name or "app" in task.name

        def task_spawned(self, task: trio.lowlevel.Task) -> None:
            self.spawned += 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert exchange_of(scope) is not None
        await read_body(scope, receive, LIMITS)
        await send_json(scope, send, 200, b"{}")

    steps, requests = Steps(), 20
    async with running(app) as server, client_of(server) as client:
        await client.ask("POST", "/", b"{}")
        trio.lowlevel.add_instrument(steps)
        for _ in range(requests):
            await client.ask("POST", "/", b"{}")
        trio.lowlevel.remove_instrument(steps)
    assert steps.spawned == requests  # the app's own task
    assert steps.count <= 3 * requests  # it, the reader of the socket, and the engine


async def test_requests_that_come_together_are_answered_in_their_order(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, LIMITS)
        await trio.sleep(1)
        await send_json(scope, send, 200, body)

    request = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 1\r\n\r\n"
    async with in_memory(app) as memory:
        client = Http1Client(memory.connect())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream.send_all, request + b"1" + request + b"2")
            got = b""
            while not got.endswith(b"2"):
                got += bytes(await client.stream.receive_some())
        assert [piece[-1:] for piece in got.split(b"HTTP/1.1 200")[1:]] == [b"1", b"2"]
