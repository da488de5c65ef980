"""Canaries in virtual time: when they are sent, what they find, and what follows from it."""

from __future__ import annotations

import json
import logging
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.discovery import Instance, MemoryDiscovery
from dynamo_trio.errors import EngineDead
from dynamo_trio.health import HEALTH_CHECK_KEY, CanarySettings, is_probe, marked
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.push import Output, PushHandler
from dynamo_trio.runtime import open_runtime
from dynamo_trio.worker.status import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dynamo_trio.client import Client
    from dynamo_trio.context import Context
    from dynamo_trio.discovery.records import Record
    from dynamo_trio.endpoint import AnyHandler
    from dynamo_trio.runtime import DistributedRuntime, Endpoint

NAME = "test.backend.generate"
PAYLOAD = marked({"question": "?"})
SETTINGS = CanarySettings(enabled=True, wait=10.0, limit=3.0)


class ForeignCancel(BaseException):
    """As another library's loop cancels its tasks."""


class Store(MemoryDiscovery):
    """Takes its time; and is away for so many calls."""

    slow: float = 0.0
    away: int = 0

    async def register(self, record: Record) -> None:
        await self._answer()
        await super().register(record)

    async def unregister(self, record: Record) -> None:
        await self._answer()
        await super().unregister(record)

    async def _answer(self) -> None:
        await trio.sleep(self.slow)
        if self.away:
            self.away -= 1
            raise OSError("the store is away")


@attrs.define(eq=False)
class Patient:
    """A handler that does what it is told, and remembers its canaries."""

    ail: str = ""
    #: When each canary came, on Trio's clock.
    asked: list[float] = attrs.field(factory=list)
    alive: int = 0
    most_alive: int = 0
    #: Let a canary that shields itself go.
    release: trio.Event = attrs.field(factory=trio.Event)

    async def __call__(self, request: dict[str, Any]) -> AsyncGenerator[object, None]:
        if not is_probe(request):
            yield "served"
            return
        self.asked.append(trio.current_time())
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        try:
            async with aclosing(self._answer()) as items:
                async for item in items:
                    yield item
        finally:
            self.alive -= 1

    async def _answer(self) -> AsyncGenerator[object, None]:
        match self.ail:
            case "hangs":
                await trio.sleep_forever()
            case "hangs in a shield":
                with trio.CancelScope(shield=True):
                    await self.release.wait()
            case "raises":
                raise EngineDead("dead")
            case "breaks":
                raise ValueError("broken")
            case "exits":
                raise SystemExit(0)
            case "cancels":
                raise ForeignCancel
            case "says error":
                yield {"token_ids": [], "finish_reason": {"error": "out of memory"}}
            case "annotates":
                yield {"event": "error", "comment": ["bad"]}
            case "says nothing":
                return
            case "is late":
                await trio.sleep(SETTINGS.limit + 0.1)
                yield "late"
            case "never ends":
                while True:
                    yield "more"
            case "dribbles":
                yield "one"
                await trio.sleep_forever()
            case _:
                yield "well"


@attrs.frozen(eq=False)
class Ward:
    """A served endpoint and what others see of it."""

    runtime: DistributedRuntime
    endpoint: Endpoint
    client: Client
    status: WorkerStatus

    @property
    def found(self) -> bool:
        return bool(self.client.instance_ids())

    @property
    def health(self) -> int:
        return self.status.health()[0]

    async def wait_found(self, found: bool) -> None:
        while self.found is not found:  # noqa: ASYNC110 - a client has no event for it
            await trio.sleep(0.01)


@asynccontextmanager
async def ward(
    handler: AnyHandler,
    settings: CanarySettings = SETTINGS,
    plane: MemoryPlane | None = None,
    store: Store | None = None,
    **limits: Any,
) -> AsyncIterator[Ward]:
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, **limits}))
    status = WorkerStatus(lifecycle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        planes = (plane or MemoryPlane(),)
        opened = open_runtime(lifecycle, discovery=store, canary=settings, planes=planes)
        async with opened as runtime:
            nursery.start_soon(runtime.drain.run)
            status.attach(runtime)
            endpoint = runtime.endpoint(NAME)
            async with (
                endpoint.client() as client,
                endpoint.serving(handler, health_check_payload=PAYLOAD),
            ):
                await trio.testing.wait_all_tasks_blocked()  # the client knows what is registered
                yield Ward(runtime, endpoint, client, status)
                lifecycle.request_stop("the test is over")
                await lifecycle.wait_stopped()
        nursery.cancel_scope.cancel("the test is over")


async def ask(client: Client) -> list[object]:
    async with client.generate({"question": "2+2"}) as stream:
        return [item async for item in stream]


ILL = [
    "hangs",
    "raises",
    "breaks",
    "exits",
    "cancels",
    "says error",
    "annotates",
    "says nothing",
    "is late",
]
WELL = ["", "never ends", "dribbles"]


@pytest.mark.parametrize("ail", WELL)
async def test_who_answers_is_found(autojump_clock: trio.testing.MockClock, ail: str) -> None:
    patient = Patient(ail)
    async with ward(patient) as at:
        await trio.sleep(35)
        assert (at.found, at.health) == (True, 200)
        assert len(patient.asked) == 3 + (ail != "dribbles")
        assert patient.most_alive == 1


async def test_who_stood_still_is_not_ill(mock_clock: trio.testing.MockClock) -> None:
    goes_on, asked = trio.Event(), list[float]()
    goes_on.set()

    async def handler(request: dict[str, Any]) -> AsyncGenerator[str, None]:
        asked.append(trio.current_time())
        await goes_on.wait()
        yield "well"

    async with ward(handler) as at:
        goes_on = trio.Event()
        for passes in (SETTINGS.wait, 60.0, SETTINGS.limit / 3):  # the process stands still
            mock_clock.jump(passes)
            await trio.testing.wait_all_tasks_blocked()
            assert (at.found, at.health, len(asked)) == (True, 200, 2)
        goes_on.set()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(SETTINGS.limit)
        await trio.testing.wait_all_tasks_blocked()
        assert (at.found, at.health) == (True, 200)


@pytest.mark.parametrize("ail", ILL)
async def test_who_does_not_answer_leaves_routing_and_comes_back(
    autojump_clock: trio.testing.MockClock, ail: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    patient = Patient()
    async with ward(patient) as at:
        await trio.sleep(1)
        assert (at.found, at.health) == (True, 200)
        patient.ail = ail
        await at.wait_found(False)
        began = trio.current_time()
        assert 10 <= began <= 13.2
        assert at.health == 503
        assert json.loads(at.status.live())["endpoints"] == {"generate": "notready"}
        await trio.sleep(30)  # further failures change nothing
        assert not at.found
        patient.ail = ""
        await at.wait_found(True)
        assert at.health == 200
        assert await ask(at.client) == ["served"]
        assert patient.most_alive == 1
    said = [r.getMessage() for r in caplog.records if "health check" in r.getMessage()]
    assert [line.partition("(")[0] for line in said if "fails" in line] == [
        f"dyn://{NAME} fails its health check "
    ]
    assert sum("passes its health checks again" in line for line in said) == 1


async def test_what_the_handler_raises_is_told_in_full_once(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[bool]:
        """For each failure of the handler: with a traceback?"""
        failures = [r for r in caplog.records if "the handler failed" in r.getMessage()]
        assert all("ValueError: broken" in record.getMessage() for record in failures)
        return [record.exc_info is not None for record in failures]

    patient = Patient("breaks")
    async with ward(patient) as at:
        await trio.sleep(35)
        assert told() == [True, False, False, False]
        patient.ail = "hangs"  # another fault, about which a traceback says nothing
        await trio.sleep(20)
        patient.ail = ""
        await at.wait_found(True)
        patient.ail = "breaks"
        await at.wait_found(False)
        assert told()[4:] == [True]


async def test_who_has_never_answered_is_not_found(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient("hangs")
    async with ward(patient) as at:
        assert trio.current_time() == pytest.approx(SETTINGS.limit)
        assert (at.found, at.health, at.status.stage) == (False, 503, "loading")
        patient.ail = ""
        await at.wait_found(True)
        assert (at.health, at.status.stage) == (200, "ready")
        assert len(patient.asked) == 2


async def test_the_first_canary_comes_before_anybody_can_ask(
    autojump_clock: trio.testing.MockClock,
) -> None:
    seen: list[int] = []

    async def handler(request: object) -> AsyncGenerator[object, None]:
        seen.append(len(watch.snapshot) + bool(is_probe(request)) * 10)
        yield "well"

    async with (
        open_runtime(canary=SETTINGS) as runtime,
        runtime.discovery.watch(Instance) as watch,
        runtime.endpoint(NAME).serving(handler, health_check_payload=PAYLOAD),
    ):
        assert trio.current_time() == 0
        assert seen == [10]


async def test_answers_to_others_are_proof_enough(autojump_clock: trio.testing.MockClock) -> None:
    patient = Patient()
    async with ward(patient) as at:
        for _ in range(20):
            await trio.sleep(7)
            assert await ask(at.client) == ["served"]
        assert len(patient.asked) == 1, "the one at the start"
        await trio.sleep(13)
        assert len(patient.asked) == 2, "as soon as there was silence"


async def test_a_stream_that_goes_on_is_proof_enough(
    autojump_clock: trio.testing.MockClock,
) -> None:
    probes = 0

    async def handler(request: dict[str, Any]) -> AsyncGenerator[object, None]:
        nonlocal probes
        if is_probe(request):
            probes += 1
        for number in range(1 if is_probe(request) else 20):
            await trio.sleep(0 if is_probe(request) else 5)
            yield number

    async with ward(handler) as at:
        assert len(await ask(at.client)) == 20
        assert probes == 1


async def test_a_busy_endpoint_is_not_ill(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The canary waits behind other work, and that work gives answers meanwhile."""
    probes = 0

    async def handler(request: dict[str, Any]) -> AsyncGenerator[object, None]:
        nonlocal probes
        if is_probe(request):
            probes += 1
            await trio.sleep(0 if probes == 1 else 8)
        else:
            await trio.sleep(12)
        yield "done"

    async with ward(handler) as at, trio.open_nursery() as nursery:
        nursery.start_soon(ask, at.client)  # answers at 12; the canary of 10 has until 13
        await trio.sleep(15)
        assert (probes, at.found) == (2, True)
    assert "fails its health check" not in caplog.text


async def test_a_canary_that_does_not_leave_stays_the_only_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient("hangs in a shield")
    async with ward(patient) as at:
        await trio.sleep(200)
        assert (len(patient.asked), patient.alive, at.found) == (1, 1, False)
        patient.release.set()
        patient.ail = ""
        await at.wait_found(True)
        assert patient.most_alive == 1


async def test_a_canary_that_cannot_be_cancelled_is_named(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    patient = Patient("hangs in a shield")
    async with ward(patient) as at:
        await trio.sleep(20)
        lifecycle, began = at.runtime.lifecycle, trio.current_time()
        lifecycle.request_stop("enough")
        await lifecycle.wait_stopped()
        assert trio.current_time() == began  # no phase waits for it
        assert lifecycle.report().leftovers == ("canary of generate",)
        assert lifecycle.snapshot().leftovers == ("canary of generate",)
        assert "not before these end: canary of generate" in caplog.text
        patient.release.set()
    assert lifecycle.snapshot().leftovers == ()
    assert lifecycle.exit_code() == 0


@pytest.mark.parametrize("away", [1, 3])
async def test_what_the_store_does_not_do_is_asked_of_it_again(
    autojump_clock: trio.testing.MockClock, away: int, caplog: pytest.LogCaptureFixture
) -> None:
    patient, store = Patient(), Store()
    async with ward(patient, store=store) as at:
        patient.ail, store.away = "raises", away
        await at.wait_found(False)
        assert trio.current_time() == pytest.approx(10 + away, abs=0.1)
        assert "taking it out of routing failed" in caplog.text
        patient.ail, store.away = "", away
        await at.wait_found(True)
        assert trio.current_time() == pytest.approx(20 + away, abs=0.1)
        assert "its return to routing failed" in caplog.text
        assert at.health == 200


async def test_who_is_well_again_before_the_store_has_let_it_go_is_found(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient, store = Patient(), Store()
    async with ward(patient, store=store) as at:
        patient.ail, store.away = "raises", 5
        await trio.sleep(10.5)
        patient.ail, store.away = "", 0
        assert await ask(at.client) == ["served"]  # proof enough
        await trio.sleep(1)
        assert (at.health, at.found) == (200, True)


async def test_a_stop_takes_over_what_a_canary_has_begun(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient, store = Patient(), Store()
    async with ward(patient, store=store) as at:
        store.slow, patient.ail = 0.5, "raises"
        while at.health == 200:  # noqa: ASYNC110 - a status is only asked for
            await trio.sleep(0.01)
        assert at.found
        lifecycle = at.runtime.lifecycle
        lifecycle.request_stop("enough")
        await lifecycle.wait_stopped()
        assert not at.found


async def test_others_can_prove_the_health_that_a_stuck_canary_cannot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()

    async def handler(request: dict[str, Any]) -> AsyncGenerator[object, None]:
        await trio.sleep(0 if is_probe(request) else 30)
        async with aclosing(patient(request)) as items:
            async for item in items:
                yield item

    async with ward(handler) as at:
        patient.ail = "hangs in a shield"
        async with at.client.generate({"question": "slow"}) as stream:
            await at.wait_found(False)
            assert [item async for item in stream] == ["served"]
            await at.wait_found(True)
            assert trio.current_time() < 33
        assert (len(patient.asked), patient.alive) == (2, 1)
        patient.release.set()


async def test_it_is_no_admitted_work(autojump_clock: trio.testing.MockClock) -> None:
    """No drain waits for a canary, no metric of requests counts it, no limit refuses it."""
    patient = Patient("hangs")
    async with ward(patient) as at:
        await trio.sleep(11)
        assert patient.alive == 1
        assert at.runtime.lifecycle.work.count == 0
        assert b'requests_total{dynamo_component="backend"' in at.runtime.metrics.exposition()
        text = at.runtime.metrics.exposition().decode().splitlines()
        counts = [line for line in text if line.startswith("dynamo_component_requests_total{")]
        assert [line.rpartition(" ")[2] for line in counts] == ["0.0"]
        began = trio.current_time()
        at.runtime.shutdown()
        await at.runtime.lifecycle.wait_stopped()
        assert trio.current_time() == began


async def test_nothing_is_sent_once_the_process_stops(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()
    async with ward(patient, grace=100.0, drain=100.0, grace_mode="fixed") as at:
        at.runtime.shutdown()
        patient.ail = "hangs"
        await trio.sleep(60)
        assert len(patient.asked) == 1
        assert not at.runtime.lifecycle.report().errors


async def test_a_stop_during_the_first_canary_registers_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient("hangs")
    lifecycle = Lifecycle(Timetable(grace=0.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle, canary=SETTINGS) as runtime:

            async def stop() -> None:
                await trio.sleep(1)
                lifecycle.request_stop("the test")

            nursery.start_soon(stop)
            serving = runtime.endpoint(NAME).serving(patient, health_check_payload=PAYLOAD)
            async with serving, runtime.discovery.watch(Instance) as watch:
                assert trio.current_time() == pytest.approx(1)
                assert not watch.snapshot
                await trio.testing.wait_all_tasks_blocked()
                assert patient.alive == 0


async def test_who_sleeps_is_left_alone(autojump_clock: trio.testing.MockClock) -> None:
    patient = Patient()
    async with ward(patient) as at:
        await at.endpoint.unregister_endpoint_instance()
        patient.ail = "hangs"
        await trio.sleep(65)
        assert len(patient.asked) == 1
        patient.ail = ""
        await at.endpoint.register_endpoint_instance()
        await trio.sleep(11)
        assert (at.found, len(patient.asked)) == (True, 2)


async def test_health_does_not_wake_who_sleeps(autojump_clock: trio.testing.MockClock) -> None:
    patient = Patient()
    async with ward(patient) as at:
        patient.ail = "hangs"
        await at.wait_found(False)
        await at.endpoint.unregister_endpoint_instance()
        patient.ail = ""
        await trio.sleep(60)
        assert (at.found, len(patient.asked)) == (False, 2)
        await at.endpoint.register_endpoint_instance()
        assert not at.found, "it has to pass a health check first"
        await at.wait_found(True)
        assert len(patient.asked) == 3


async def test_an_answer_does_not_wake_who_sleeps(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()

    async def handler(request: dict[str, Any]) -> AsyncGenerator[object, None]:
        await trio.sleep(0 if is_probe(request) else 60)
        async with aclosing(patient(request)) as items:
            async for item in items:
                yield item

    async with ward(handler) as at:
        patient.ail = "hangs"
        async with at.client.generate({"question": "slow"}) as stream:
            await at.wait_found(False)
            await at.endpoint.unregister_endpoint_instance()
            patient.ail = ""
            assert [item async for item in stream] == ["served"]
        await trio.sleep(30)
        assert not at.found


async def test_who_was_drained_while_ill_comes_back_once_well(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()
    async with ward(patient) as at:
        patient.ail = "hangs"
        await at.wait_found(False)
        at.runtime.drain.begin()
        await trio.sleep(60)
        assert len(patient.asked) == 2
        at.runtime.drain.resume()
        await trio.sleep(30)
        assert (at.found, len(patient.asked) > 2) == (False, True)
        patient.ail = ""
        await at.wait_found(True)


class SlowToSettle(MemoryPlane):
    """Whose requests take a moment to begin."""

    async def settle(self) -> None:
        await trio.sleep(0.5)


async def test_who_falls_ill_while_it_is_drained_is_left_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()
    async with ward(patient, plane=SlowToSettle()) as at:
        await trio.sleep(1)
        patient.ail = "hangs"
        await trio.sleep(11.8)
        assert trio.current_time() == pytest.approx(12.8)
        assert patient.alive == 1
        at.runtime.drain.begin()  # the canary fails at 13.0, the withdrawal takes until 13.3
        await trio.sleep(60)
        assert len(patient.asked) == 2
        patient.ail = ""
        at.runtime.drain.resume()
        await at.wait_found(True)


async def test_a_client_that_was_slow_to_learn_is_served(
    autojump_clock: trio.testing.MockClock,
) -> None:
    patient = Patient()
    async with ward(patient) as at:
        stale = at.client.generate({"question": "sent before"})
        async with stale as stream:
            patient.ail = "raises"
            await at.wait_found(False)
            assert [item async for item in stream] == ["served"]


async def test_a_handler_that_pushes_is_checked_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ill = False

    async def push(request: dict[str, Any], context: Context, output: Output) -> None:
        if ill:
            await trio.sleep_forever()
        output.put_tokens([1])
        output.put_last({"token_ids": [], "finish_reason": "length"})

    async with ward(PushHandler(push)) as at:
        assert at.found
        ill = True
        await at.wait_found(False)
        ill = False
        await at.wait_found(True)


@pytest.mark.parametrize("payload", [None, PAYLOAD])
async def test_without_payload_or_switch_who_is_registered_is_ready(
    autojump_clock: trio.testing.MockClock, payload: dict[str, object] | None
) -> None:
    patient = Patient("hangs")
    settings = attrs.evolve(SETTINGS, enabled=payload is None)
    async with (
        open_runtime(canary=settings) as runtime,
        runtime.endpoint(NAME).serving(patient, health_check_payload=payload),
    ):
        await trio.sleep(60)
        assert runtime.endpoint_states() == {"generate": True}
        assert not patient.asked


async def test_serve_endpoint_takes_the_payload_as_it_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    seen: list[object] = []

    async def handler(request: object) -> AsyncGenerator[object, None]:
        seen.append(request)
        yield "well"

    async with open_runtime(canary=SETTINGS) as runtime, trio.open_nursery() as nursery:
        endpoint = runtime.endpoint(NAME)
        payload = {"prompt": "hi", HEALTH_CHECK_KEY: True}
        nursery.start_soon(lambda: endpoint.serve_endpoint(handler, health_check_payload=payload))
        async with endpoint.client() as client:
            await client.wait_for_instances()
        runtime.shutdown()
    assert seen == [payload]
