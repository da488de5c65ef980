"""graceful_shutdown() and install_signal_handlers(), with Dynamo's parameters."""

from __future__ import annotations

import signal
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio import (
    DistributedRuntime,
    Lifecycle,
    Phase,
    Timetable,
    dynamo_worker,
    graceful_shutdown,
    install_signal_handlers,
    open_runtime,
)
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.lifecycle import Hooks
from dynamo_trio.process import signals
from dynamo_trio.program.limits import tell_timetable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from trio.testing import MockClock

    from dynamo_trio import Endpoint

CALLBACKS = ("drain_callback", "pre_shutdown_callback", "cleanup_callback")


@attrs.define(eq=False)
class World:
    """A runtime with one endpoint, and a diary of what happened when."""

    runtime: DistributedRuntime
    endpoint: Endpoint
    event: trio.Event = attrs.field(factory=trio.Event)
    began: float = attrs.field(factory=trio.current_time)
    diary: list[tuple[str, float]] = attrs.field(factory=list)

    @property
    def now(self) -> float:
        return round(trio.current_time() - self.began, 3)

    def note(self, what: str) -> None:
        self.diary.append((what, self.now))

    def callback(self, name: str, seconds: float = 0) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            self.note(name)
            await trio.sleep(seconds)

        return call

    def callbacks(self) -> dict[str, Any]:
        return {name: self.callback(name) for name in CALLBACKS}

    async def shut_down(self, **given: Any) -> None:
        await graceful_shutdown(self.runtime, [self.endpoint], self.event, **given)
        self.note("returned")

    async def ask(self, seconds: float) -> None:
        """Send a request that takes so long, and note its end."""
        async with self.endpoint.client() as client:
            await client.wait_for_instances()
            async with client.generate(seconds) as stream:
                async for item in stream:
                    self.note(item)
        self.note("answered")


async def sleepy(seconds: float) -> AsyncGenerator[str, None]:
    yield "begun"
    await trio.sleep(seconds)


@asynccontextmanager
async def open_world(timetable: Timetable = Timetable()) -> AsyncIterator[World]:  # noqa: B008 - frozen
    lifecycle = Lifecycle(timetable)
    async with trio.open_nursery() as outer:
        outer.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            endpoint = runtime.endpoint("t.b.generate")
            async with endpoint.serving(sleepy):
                yield World(runtime, endpoint)
                lifecycle.request_stop("the test is over")
                await lifecycle.wait_stopped()


def ended(world: World) -> dict[str, str]:
    return {s.name: str(s.ending) for s in world.runtime.lifecycle.report().steps}


# --- the sequence ------------------------------------------------------------------------


async def test_the_steps_come_in_dynamos_order(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        lifecycle = world.runtime.lifecycle

        async def drain() -> None:
            world.note("drain")
            assert world.runtime.endpoint_states() == {"generate": False}
            assert lifecycle.work.is_open  # those who have not noticed are still served
            await trio.sleep(1)

        async def pre_shutdown() -> None:
            world.note("pre_shutdown")
            assert not world.event.is_set()
            await trio.sleep(1)

        async def cleanup() -> None:
            world.note("cleanup")
            assert world.event.is_set()
            assert not lifecycle.work.is_open
            await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.ask, 20)
            await trio.testing.wait_all_tasks_blocked()
            await world.shut_down(
                drain_callback=drain, pre_shutdown_callback=pre_shutdown, cleanup_callback=cleanup
            )
            # Initiated, not over: the runtime waits for the request.
            assert lifecycle.phase is Phase.DRAINING
        await lifecycle.wait_stopped()
    assert world.diary == [
        ("begun", 0),
        ("drain", 5),
        ("pre_shutdown", 6),
        ("cleanup", 7),
        ("returned", 8),
        ("answered", 20),
    ]
    assert lifecycle.cause == "graceful_shutdown()"
    assert lifecycle.exit_code() == 0


async def test_the_grace_period_of_the_caller_wins(autojump_clock: MockClock) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 60)
        await trio.testing.wait_all_tasks_blocked()
        await world.shut_down(grace_period_s=17.5)
    assert world.diary == [("begun", 0), ("returned", 17.5), ("answered", 60)]


@pytest.mark.parametrize("name", CALLBACKS)
async def test_a_callback_that_raises_is_passed(
    autojump_clock: MockClock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("it is broken")

    async with open_world(Timetable(grace=0)) as world:
        await world.shut_down(**{**world.callbacks(), name: broken})
    others = [c for c in CALLBACKS if c != name]
    assert [what for what, _ in world.diary] == [*others, "returned"]
    assert world.event.is_set()
    assert ended(world)[name] == "failed"
    assert f"{name} failed; the stop goes on" in caplog.text


@pytest.mark.parametrize("name", CALLBACKS)
async def test_a_callback_that_hangs_is_passed(
    autojump_clock: MockClock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(Timetable(grace=0)) as world:
        await world.shut_down(**{**world.callbacks(), name: world.callback(name, 1000)})
    assert world.diary[-1:] == [("returned", 30)]
    assert world.event.is_set()
    assert ended(world)[name] == "timed_out"
    assert f"{name} was ended by its limit of 30 s" in caplog.text


async def test_a_handler_that_fails_has_ended(autojump_clock: MockClock) -> None:
    async def broken(request: object) -> AsyncGenerator[str, None]:
        yield "begun"
        await trio.sleep(8)
        raise RuntimeError("it is broken")

    async with open_runtime() as runtime:
        endpoint = runtime.endpoint("t.b.generate")
        async with endpoint.serving(broken), endpoint.client() as client:
            await client.wait_for_instances()
            async with client.generate(0) as stream:
                await anext(stream)
                began = trio.current_time()
                await graceful_shutdown(runtime, [endpoint], grace_period_s=0)
                await runtime.lifecycle.wait_stopped()
    assert trio.current_time() - began == pytest.approx(8)


async def test_a_second_call_returns_at_once(autojump_clock: MockClock) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 20)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(world.shut_down)
        await trio.testing.wait_all_tasks_blocked()
        await world.shut_down(drain_callback=world.callback("never"))
    assert world.diary == [("begun", 0), ("returned", 0), ("returned", 5), ("answered", 20)]


async def test_a_caller_that_is_cancelled_stops_no_stop(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.ask, 20)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1):
                await world.shut_down(drain_callback=world.callback("drain"))
        await world.runtime.lifecycle.wait_stopped()
    assert world.diary == [("begun", 0), ("drain", 5), ("answered", 20)]
    assert world.event.is_set()


# --- the event is set in any case ------------------------------------------------------------


async def test_a_fatal_error_passes_the_callbacks_and_sets_the_event(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(world.shut_down, **world.callbacks()))
            await trio.testing.wait_all_tasks_blocked()
            world.runtime.lifecycle.fail(RuntimeError("the engine is dead"))
        assert world.diary == [("returned", 0)]
        assert world.event.is_set()


async def test_an_escalation_sets_the_event(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.ask, 20)
            await trio.testing.wait_all_tasks_blocked()
            hang = partial(world.shut_down, grace_period_s=0, drain_callback=trio.sleep_forever)
            nursery.start_soon(hang)
            await trio.sleep(3)
            assert not world.event.is_set()
            world.runtime.lifecycle.escalate("SIGINT")
            await world.event.wait()
            nursery.cancel_scope.cancel()  # what the cut request raises is not the matter here
        assert trio.current_time() - world.began == pytest.approx(3)


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("began", ["graceful_shutdown", "something else"])
async def test_a_callback_that_asks_for_the_stop_does_not_wait_for_itself(
    autojump_clock: MockClock, name: str, began: str
) -> None:
    async with open_world(Timetable(grace=0)) as world, trio.open_nursery() as nursery:

        async def again() -> None:
            async with trio.open_nursery() as inner:  # as deep as it may be
                inner.start_soon(graceful_shutdown, world.runtime, [])
            world.note("asked again")

        lifecycle = world.runtime.lifecycle
        if began == "graceful_shutdown":
            nursery.start_soon(partial(world.shut_down, **{name: again}))
        else:
            given: dict[str, Any] = {name.removesuffix("_callback"): again}
            lifecycle.hooks = Hooks(**given)
            lifecycle.request_stop("SIGTERM")
        await lifecycle.wait_stopped()
        assert ended(world)[name] == "completed"
    assert world.diary[0] == ("asked again", 0)


async def test_an_event_that_cannot_be_set_stops_no_stop(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def set(self) -> None:
            raise SystemExit(5)

    async with open_world(Timetable(grace=0)) as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 5)
        await trio.testing.wait_all_tasks_blocked()
        world.runtime.shutdown()
        await world.runtime.lifecycle.endpoints_closed.wait()
        await graceful_shutdown(world.runtime, [world.endpoint], Broken())
    assert world.diary == [("begun", 0), ("answered", 5)]
    assert "shutdown_event.set() failed; the stop goes on" in caplog.text


# --- in a stop that something else began ---------------------------------------------------


async def test_callbacks_whose_turn_is_still_to_come_are_run(autojump_clock: MockClock) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 20)
        await trio.testing.wait_all_tasks_blocked()
        world.runtime.shutdown()
        await trio.sleep(2)
        await world.shut_down(**world.callbacks())
    assert [what for what, _ in world.diary] == ["begun", *CALLBACKS, "returned", "answered"]
    assert world.event.is_set()
    assert world.runtime.lifecycle.cause == "runtime.shutdown()"


async def test_what_comes_too_late_is_said(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(Timetable(grace=0)) as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 20)
        await trio.testing.wait_all_tasks_blocked()
        world.runtime.shutdown()
        await trio.sleep(2)
        await world.shut_down(**world.callbacks())
    assert world.diary == [("begun", 0), ("returned", 2), ("answered", 20)]
    assert world.event.is_set()
    assert "comes too late in the stop for its callbacks" in caplog.text


# --- endpoints of other runtimes -------------------------------------------------------------


async def test_endpoints_of_another_runtime_leave_too(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_world() as world,
        open_runtime(discovery=MemoryDiscovery()) as other,
    ):
        theirs, unserved = other.endpoint("t.c.generate"), other.endpoint("t.c.unserved")
        async with theirs.serving(sleepy):
            everybody = [world.endpoint, theirs, theirs, unserved]
            await graceful_shutdown(world.runtime, everybody)
            assert other.endpoint_states() == {"generate": False}
            assert not other.lifecycle.stopping
    assert caplog.text.count("could not be unregistered") == 1  # that which is not served


# --- what is refused ---------------------------------------------------------------------------


async def started_already() -> None:
    raise AssertionError("it must not run")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"grace_period_s": -1}, ValueError, "grace_period_s=-1: must be 0..315360000 seconds"),
        ({"grace_period_s": float("nan")}, ValueError, "grace_period_s=nan"),
        ({"grace_period_s": float("inf")}, ValueError, "grace_period_s=inf"),
        ({"drain_callback": 1}, TypeError, "drain_callback=1: must be an async function"),
        ({"shutdown_event": True}, TypeError, r"shutdown_event=True: must have set\(\)"),
        ({"endpoints": ["t.b.generate"]}, TypeError, "'t.b.generate', which is not an endpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_bad_argument_stops_nothing(
    autojump_clock: MockClock, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with open_world() as world:
        with pytest.raises(error, match=message):
            await graceful_shutdown(world.runtime, **{"endpoints": [], **given})
        with pytest.raises(error, match=message):
            install_signal_handlers(None, world.runtime, **{"endpoints": [], **given})
        assert not world.runtime.lifecycle.stopping


async def test_a_coroutine_is_no_callback(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        with pytest.raises(TypeError, match=r"cleanup_callback=.*not yet called"):
            await world.shut_down(cleanup_callback=started_already())


# --- signals ---------------------------------------------------------------------------------


@pytest.fixture
def no_desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[signals.SignalDesk]:
    """A desk of its own, and the handlers as they were before."""
    desk = signals.SignalDesk()
    monkeypatch.setattr(signals, "desk", desk)
    before = {signum: signal.getsignal(signum) for signum in signals.HANDLED}
    yield desk
    after = {signum: signal.getsignal(signum) for signum in signals.HANDLED}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    if desk.handle not in after.values():
        assert after == before, "handlers were left behind"


@pytest.mark.usefixtures("no_desk")
async def test_a_fast_exit_sets_the_event_after_unregistering(autojump_clock: MockClock) -> None:
    async with open_world(Timetable(fast_exit=True)) as world:
        install_signal_handlers(
            None, world.runtime, [world.endpoint], world.event, **world.callbacks()
        )
        signal.raise_signal(signal.SIGTERM)
        await world.runtime.lifecycle.wait_stopped()
        assert world.now == 0
        assert world.event.is_set()
    assert world.diary == []


@pytest.mark.usefixtures("no_desk")
@pytest.mark.parametrize("signum", signals.HANDLED)
async def test_a_signal_starts_the_same_sequence(
    autojump_clock: MockClock, signum: signal.Signals
) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, 20)
        await trio.testing.wait_all_tasks_blocked()
        install_signal_handlers(
            None, world.runtime, [world.endpoint], world.event, 2.0, **world.callbacks()
        )
        signal.raise_signal(signum)
    assert [what for what, _ in world.diary] == ["begun", *CALLBACKS, "answered"]
    assert dict(world.diary)["drain_callback"] == 2
    assert world.event.is_set()
    assert world.runtime.lifecycle.cause == signum.name


@pytest.mark.usefixtures("no_desk")
async def test_the_timetable_is_told_again_only_where_it_has_changed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dynamo_trio")
    async with open_world(Timetable(hooks=0)) as world:
        tell_timetable(world.runtime.lifecycle)  # as the entry of a program does
        install_signal_handlers(None, world.runtime, [world.endpoint], **world.callbacks())
        tell_timetable(world.runtime.lifecycle)
        world.runtime.lifecycle.request_stop("test")
    told = [line for line in caplog.messages if line.startswith("shutdown timetable")]
    first, second = told
    assert first.startswith("shutdown timetable: unregister <= 2 s, grace <= 5 s, drain")
    assert second.startswith("shutdown timetable, as the program has changed it: unregister")
    assert "callbacks <= 30 s each" in second


@pytest.mark.usefixtures("no_desk")
async def test_more_signals(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dynamo_trio.lifecycle")
    async with open_world() as world:
        lifecycle = world.runtime.lifecycle
        install_signal_handlers(None, world.runtime, [world.endpoint])
        stubborn = lifecycle.work.admit("stubborn 1")
        stubborn.__enter__()
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep(1)
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep(1)
        assert lifecycle.phase.label == "grace"
        assert "SIGTERM again: stopping already; 1 request" in caplog.text
        signal.raise_signal(signal.SIGINT)
        await trio.sleep(0.1)
        assert lifecycle.phase.label == "stopping"
        stubborn.__exit__(None, None, None)
        await lifecycle.wait_stopped()


@pytest.mark.usefixtures("no_desk")
async def test_the_last_sigint_is_an_interrupt(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        async with open_runtime() as runtime:
            install_signal_handlers(None, runtime, [])
            with runtime.lifecycle.work.admit("stubborn 1"):
                for _ in range(3):
                    signal.raise_signal(signal.SIGINT)
                    await trio.testing.wait_all_tasks_blocked()
                await trio.sleep_forever()


@pytest.mark.usefixtures("no_desk")
async def test_runtime_shutdown_runs_the_callbacks_too(autojump_clock: MockClock) -> None:
    async with open_world(Timetable(grace=0)) as world:
        install_signal_handlers(
            None, world.runtime, [world.endpoint], world.event, **world.callbacks()
        )
        world.runtime.shutdown()
        assert world.runtime.lifecycle.stopping
        await world.runtime.lifecycle.wait_stopped()
    assert [what for what, _ in world.diary] == [*CALLBACKS]


async def test_the_desk_is_told_where_there_is_one(
    autojump_clock: MockClock, no_desk: signals.SignalDesk
) -> None:
    no_desk.install()
    async with open_world() as first, open_runtime() as second:
        install_signal_handlers(None, first.runtime, [first.endpoint])
        assert no_desk.lifecycle is first.runtime.lifecycle
        install_signal_handlers(None, second, [])
        assert signal.getsignal(signal.SIGTERM) == no_desk.handle
        signal.raise_signal(signal.SIGTERM)
        await second.lifecycle.wait_stop_requested()
        assert first.runtime.lifecycle.cause == "SIGTERM"
        assert second.lifecycle.cause == "SIGTERM, heard by another runtime of this process"


@pytest.mark.usefixtures("no_desk")
async def test_one_receiver_serves_all_runtimes(autojump_clock: MockClock) -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with open_world() as first:
        async with open_runtime() as second:
            install_signal_handlers(None, first.runtime, [first.endpoint])
            receiver = signal.getsignal(signal.SIGTERM)
            install_signal_handlers(None, first.runtime, [first.endpoint], grace_period_s=1)
            install_signal_handlers(None, second, [])
            assert signal.getsignal(signal.SIGTERM) is receiver
            assert first.runtime.lifecycle.timetable.grace == 1
            signal.raise_signal(signal.SIGTERM)
            await second.lifecycle.wait_stop_requested()
            assert first.runtime.lifecycle.cause == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    async with open_runtime() as third:
        install_signal_handlers(None, third, [])
        assert signal.getsignal(signal.SIGTERM) is not before


@pytest.mark.parametrize("installed", [False, True], ids=["no desk", "desk"])
async def test_only_the_main_thread_may(no_desk: signals.SignalDesk, installed: bool) -> None:
    if installed:
        no_desk.install()

    def elsewhere() -> None:
        async def main() -> None:
            async with open_runtime() as runtime:
                with pytest.raises(RuntimeError, match="main thread"):
                    install_signal_handlers(None, runtime, [], drain_callback=started_already)
                assert runtime.lifecycle.hooks.callbacks == 0

        trio.run(main)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await trio.to_thread.run_sync(thread.join)


# --- under dynamo_worker ---------------------------------------------------------------------


@pytest.mark.usefixtures("no_desk")
def test_it_works_under_dynamo_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    diary: list[str] = []

    @dynamo_worker()
    async def main(runtime: DistributedRuntime) -> None:
        endpoint, event = runtime.endpoint("t.b.generate"), trio.Event()

        async def cleanup() -> None:
            diary.append(f"cleanup, event {event.is_set()}")

        async def stop_when_found() -> None:
            async with endpoint.client() as client:
                await client.wait_for_instances()
            diary.append("found")
            signal.raise_signal(signal.SIGTERM)

        install_signal_handlers(None, runtime, [endpoint], event, 0, cleanup_callback=cleanup)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_when_found)
            await endpoint.serve_endpoint(sleepy)
            diary.append("served")

    trio.run(main)
    assert diary == ["found", "cleanup, event True", "served"]
    assert not list((tmp_path / "v1" / "instances").iterdir())
