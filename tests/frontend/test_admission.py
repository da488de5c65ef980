"""Whom a frontend lets in: its own limits, and workers that are busy or full."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.discovery import MemoryDiscovery, ModelCard
from dynamo_trio.errors import Disconnected, InvalidArgument, Overloaded
from dynamo_trio.events import MemoryEvents
from dynamo_trio.frontend.admission import Slots
from dynamo_trio.frontend.busy import BusyThresholds, BusyWorkers, Capacity
from dynamo_trio.frontend.loads import keep_busy_told, tell_own_load
from dynamo_trio.kv import open_load_publisher
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.models.card_builder import make_card
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.runtime import open_runtime
from dynamo_trio.testing import make_model_folder
from dynamo_trio.wire.dynamo.card import RuntimeConfig
from dynamo_trio.wire.dynamo.kv_events import KvMetrics
from tests.frontend.test_placement import (
    CHAT,
    GENERATE,
    NEVER,
    TEXT,
    WELL,
    Deed,
    Scene,
    both_kinds,
    chat,
    open_scene,
    said,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

    from tests.frontend.conftest import Opener


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


REJECTED = "dynamo_frontend_requests_total"


def load(worker: int, rank: int = 0, *, blocks: int = 0, tokens: int = 0) -> KvMetrics:
    return KvMetrics(
        worker_id=worker, dp_rank=rank, active_decode_blocks=blocks, active_prefill_tokens=tokens
    )


def tell(scene: Scene, *loads: KvMetrics) -> None:
    """What the frontend believes of its workers."""
    told: dict[int, dict[int, KvMetrics]] = {}
    for one in loads:
        told.setdefault(one.worker_id, {})[one.dp_rank] = one
    scene.frontend.busy.loads = lambda _: told
    scene.frontend.busy.capacity = lambda endpoint, worker: Capacity(100, 1000)


# --- the frontend's own limits -----------------------------------------------------------------


@both_kinds
async def test_one_request_too_many_is_refused_and_costs_nothing(
    autojump_clock: MockClock, stream: bool
) -> None:
    async with open_scene(Deed(tokens=TEXT, after=5)) as scene:
        scene.frontend.slots = Slots(most=2)
        running = [scene.caller.start("POST", CHAT, chat(stream=stream)) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked()
        refused = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert (refused.status, refused.json()["error"]["code"]) == (529, "overloaded")
        assert refused.headers["x-dynamo-reason"] == "overloaded"
        assert "2" in refused.json()["error"]["message"]
        assert scene.asked == ["w1", "w1"]
        for answer in running:
            await answer.done.wait()
            assert said(answer, stream=stream) == TEXT
        again = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(again, stream=stream) == TEXT
        assert scene.total(REJECTED, error_type="overload") == 1
        assert scene.total(REJECTED, status="success") == 3
        assert scene.total("dynamo_frontend_requests_started_total") == 4
        assert scene.lifecycle.http.tally == {Outcome.FINISHED: 3}
        assert not scene.frontend.slots.running


async def test_the_limit_of_a_model_leaves_room_for_others(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(tokens=TEXT, after=5)) as scene:
        other = attrs.evolve(ModelCard("other", GENERATE, 2))
        await scene.discovery.register(other)
        await scene.frontend.catalog.wait_for("other")
        scene.frontend.slots = Slots(most=3, most_per_model=1)
        first = scene.caller.start("POST", CHAT, chat(stream=False))
        await trio.testing.wait_all_tasks_blocked()
        second = await scene.caller.ask("POST", CHAT, chat(stream=False))
        assert second.status == 529
        elsewhere = await scene.caller.ask("POST", CHAT, {**chat(stream=False), "model": "other"})
        assert elsewhere.status == 200
        await first.done.wait()
        assert first.status == 200


async def test_a_slot_is_free_again_however_its_request_has_ended(
    autojump_clock: MockClock,
) -> None:
    deeds = [Deed(error=InvalidArgument("why")), Deed(Overloaded("why"))]
    async with open_scene(*deeds) as scene:
        scene.frontend.slots = Slots(most=1)
        for _ in range(2):
            await scene.caller.ask("POST", CHAT, chat(stream=True))
            assert not scene.frontend.slots.running
        scene.workers.deeds = {"w1": NEVER, "w2": NEVER}
        leaver = scene.caller.start("POST", CHAT, chat(stream=True))
        await trio.sleep(1)
        assert scene.frontend.slots.running == {"m": 1}
        leaver.leave()
        await leaver.done.wait()
        assert not scene.frontend.slots.running


async def test_who_drains_says_so_even_when_it_is_full(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(tokens=TEXT, after=2)) as scene:
        scene.frontend.slots = Slots(most=1)
        running = scene.caller.start("POST", CHAT, chat(stream=True))
        await trio.testing.wait_all_tasks_blocked()
        scene.lifecycle.request_stop("test")
        await trio.testing.wait_all_tasks_blocked()
        late = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (late.status, late.json()["error"]["code"]) == (503, "draining")
        await running.done.wait()
        assert said(running, stream=True) == TEXT


async def test_the_status_of_overload_is_a_setting(autojump_clock: MockClock) -> None:
    async with open_scene(Deed(Overloaded("full"))) as scene:
        scene.frontend.overload_status = 503
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "overloaded")


# --- who is busy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thresholds", "one", "busy"),
    [
        (BusyThresholds(), load(1, blocks=100, tokens=10**6), False),
        (BusyThresholds(0.5), load(1, blocks=50), False),
        (BusyThresholds(0.5), load(1, blocks=51), True),
        (BusyThresholds(0.0), load(1, blocks=0), False),
        (BusyThresholds(0.0), load(1, blocks=1), True),
        (BusyThresholds(0.5), load(1, tokens=10**6), False),
        (BusyThresholds(None, 10), load(1, tokens=10), False),
        (BusyThresholds(None, 10), load(1, tokens=11), True),
        (BusyThresholds(None, 0), load(1, tokens=1), True),
        (BusyThresholds(None, None, 1.5), load(1, tokens=1500), False),
        (BusyThresholds(None, None, 1.5), load(1, tokens=1501), True),
        (BusyThresholds(0.9, 10**6, 0.001), load(1, tokens=2), True),
        (BusyThresholds(0.9, 1, 10), load(1, tokens=2), True),
        (BusyThresholds(0.5), KvMetrics(worker_id=1), False),
        (BusyThresholds(0.5), KvMetrics(worker_id=1, kv_used_blocks=51), True),
        (BusyThresholds(0.5), KvMetrics(worker_id=1, kv_used_blocks=50), False),
        (
            BusyThresholds(0.5),
            KvMetrics(worker_id=1, kv_used_blocks=51, active_decode_blocks=0),
            True,
        ),
    ],
)
def test_above_one_threshold_is_busy(
    thresholds: BusyThresholds, one: KvMetrics, busy: bool
) -> None:
    assert thresholds.exceeded(one, Capacity(100, 1000)) is busy


def test_what_a_card_does_not_tell_is_never_exceeded() -> None:
    thresholds = BusyThresholds(0.1, None, 0.1)
    assert not thresholds.exceeded(load(1, blocks=10**9, tokens=10**9), Capacity())
    assert BusyThresholds(None, 5).exceeded(load(1, tokens=6), Capacity())


@pytest.mark.parametrize(
    "bad",
    [
        {"active_decode_blocks_threshold": 1.1},
        {"active_decode_blocks_threshold": -0.1},
        {"active_decode_blocks_threshold": math.nan},
        {"active_prefill_tokens_threshold": -1},
        {"active_prefill_tokens_threshold_frac": math.inf},
    ],
)
def test_a_threshold_out_of_its_bounds_is_refused(bad: dict[str, Any]) -> None:
    busy = BusyWorkers()
    with pytest.raises(InvalidArgument) as caught:
        busy.set("m", **bad)
    assert caught.value.param == next(iter(bad))
    assert busy.get("m") == BusyThresholds()


def test_what_is_set_for_one_model_changes_no_other() -> None:
    busy = BusyWorkers(BusyThresholds(0.5, 7))
    assert busy.set("m", active_decode_blocks_threshold=0.25) == BusyThresholds(0.25, 7)
    assert busy.set("m", active_prefill_tokens_threshold_frac=2.0) == BusyThresholds(0.25, 7, 2.0)
    assert busy.get("other") == BusyThresholds(0.5, 7)


async def test_a_busy_worker_is_left_out(autojump_clock: MockClock) -> None:
    async with open_scene(WELL, WELL, WELL) as scene:
        scene.frontend.busy.set("m", active_decode_blocks_threshold=0.5)
        tell(scene, load(1, blocks=51), load(2, blocks=50))
        for _ in range(8):
            answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
            assert answer.status == 200
        assert set(scene.asked) == {"w2", "w3"}  # of w3 nothing is known
        assert 3 <= scene.asked.count("w2") <= 5


@both_kinds
async def test_while_all_are_busy_nobody_is_asked(autojump_clock: MockClock, stream: bool) -> None:
    async with open_scene(WELL, WELL) as scene:
        scene.frontend.busy.set("m", active_prefill_tokens_threshold=10)
        tell(scene, load(1, tokens=11), load(2, tokens=12))
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert (answer.status, answer.json()["error"]["code"]) == (529, "overloaded")
        assert scene.asked == []
        tell(scene, load(1, tokens=10), load(2, tokens=12))
        answer = await scene.caller.ask("POST", CHAT, chat(stream=stream))
        assert said(answer, stream=stream) == TEXT
        assert scene.asked == ["w1"]
        assert scene.total(REJECTED, error_type="overload") == 1


async def test_a_worker_is_busy_when_all_of_its_ranks_are(autojump_clock: MockClock) -> None:
    async with open_scene(WELL) as scene:
        scene.frontend.busy.set("m", active_decode_blocks_threshold=0.5)
        tell(scene, load(1, 0, blocks=99), load(1, 1, blocks=1))
        assert (await scene.caller.ask("POST", CHAT, chat(stream=True))).status == 200
        tell(scene, load(1, 0, blocks=99), load(1, 1, blocks=51))
        assert (await scene.caller.ask("POST", CHAT, chat(stream=True))).status == 529


async def test_a_retry_goes_to_no_busy_worker(autojump_clock: MockClock) -> None:
    broken = Deed(error=Disconnected("why"))
    async with open_scene(broken, WELL, broken) as scene:
        scene.frontend.busy.set("m", active_decode_blocks_threshold=0.5)
        tell(scene, load(2, blocks=99))
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "unanswered")
        assert sorted(scene.asked) == ["w1", "w3"]


async def test_busy_ones_do_not_hide_that_nobody_can_be_asked(autojump_clock: MockClock) -> None:
    async with open_scene(WELL, WELL) as scene:
        scene.frontend.busy.set("m", active_decode_blocks_threshold=0.5)
        tell(scene, load(1, blocks=99))
        scene.workers.avoided = {"w1", "w2"}
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker")
        scene.workers.avoided = {"w2"}  # the busy one could be asked
        answer = await scene.caller.ask("POST", CHAT, chat(stream=True))
        assert (answer.status, answer.json()["error"]["code"]) == (529, "overloaded")


# --- what workers tell --------------------------------------------------------------------------


@attrs.define(eq=False)
class Fleet:
    discovery: MemoryDiscovery = attrs.field(factory=MemoryDiscovery)
    events: MemoryEvents = attrs.field(factory=MemoryEvents)
    plane: MemoryPlane = attrs.field(factory=MemoryPlane)

    @asynccontextmanager
    async def worker(self, folder: Path) -> AsyncIterator[tuple[int, Any]]:
        """A worker with 100 blocks and steps of 1000 tokens: its id, and what tells its load."""
        opening = open_runtime(discovery=self.discovery, planes=self.plane, events=self.events)
        async with opening as runtime:
            endpoint = runtime.endpoint(str(GENERATE))
            card = make_card(
                folder,
                name="m",
                endpoint=GENERATE,
                instance_id=runtime.instance_id,
                runtime_config=RuntimeConfig(total_kv_blocks=100, max_num_batched_tokens=1000),
            )
            await self.discovery.register(card)
            async with open_load_publisher(endpoint) as publisher:
                yield runtime.instance_id, publisher
            await self.discovery.unregister(card)


@attrs.frozen
class _Endpoint:
    endpoint: Any = GENERATE


@attrs.frozen
class _Model:
    name: str = "m"
    client: Any = _Endpoint()


MODEL: Any = _Model()


async def test_loads_and_capacities_are_followed_once_there_is_a_threshold(
    autojump_clock: MockClock, hf_folder: Path
) -> None:
    fleet, busy = Fleet(), BusyWorkers()
    opened: list[int] = []

    def events() -> MemoryEvents:
        opened.append(1)
        return fleet.events

    async with (
        keep_busy_told(busy, fleet.discovery, events),
        fleet.worker(hf_folder) as (one, first),
        fleet.worker(hf_folder) as (two, second),
    ):
        first.update(active_decode_blocks=60, active_prefill_tokens=0)
        second.update(active_decode_blocks=0, active_prefill_tokens=2100)
        await trio.sleep(3)
        assert not opened, "nobody wanted to know"
        busy.set("m", active_decode_blocks_threshold=0.5)
        await trio.sleep(3)
        assert opened == [1]
        assert busy.busy(MODEL) == {one}
        busy.set("m", active_prefill_tokens_threshold_frac=2.0)
        assert busy.busy(MODEL) == {one, two}
        first.update(active_decode_blocks=50, active_prefill_tokens=0)
        await trio.sleep(3)
        assert busy.busy(MODEL) == {two}
    assert busy.busy(MODEL) == frozenset()


def test_who_is_busy_is_looked_for_once_between_two_changes() -> None:
    looks: list[object] = []
    load = KvMetrics(worker_id=7, dp_rank=0, active_decode_blocks=60)

    def loads(endpoint: object) -> dict[int, dict[int, KvMetrics]]:
        looks.append(endpoint)
        return {7: {0: load}}

    busy = BusyWorkers(BusyThresholds(0.5))
    busy.follow(loads, lambda endpoint, worker: Capacity(100, 1000))
    assert [busy.busy(MODEL) for _ in range(3)] == [{7}] * 3
    assert len(looks) == 1
    load = KvMetrics(worker_id=7, dp_rank=0, active_decode_blocks=10)
    busy.note_change()
    assert not busy.busy(MODEL)
    busy.set("m", active_decode_blocks_threshold=0.0)
    assert busy.busy(MODEL) == {7}
    assert len(looks) == 3


async def test_a_worker_that_is_gone_is_not_busy(
    autojump_clock: MockClock, hf_folder: Path
) -> None:
    fleet, busy = Fleet(), BusyWorkers(BusyThresholds(0.0))
    async with keep_busy_told(busy, fleet.discovery, lambda: fleet.events):
        async with fleet.worker(hf_folder) as (one, publisher):
            publisher.update(active_decode_blocks=1)
            await trio.sleep(3)
            assert busy.busy(MODEL) == {one}
        await trio.sleep(3)
        assert busy.busy(MODEL) == frozenset()


async def test_events_that_cannot_be_heard_harm_nobody(
    autojump_clock: MockClock, hf_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @attrs.define(eq=False)
    class Broken(MemoryEvents):
        def open_inlet(self, address: str, topic: str) -> Any:
            raise OSError("no descriptor is left")

    fleet, busy = Fleet(), BusyWorkers(BusyThresholds(0.0))
    async with keep_busy_told(busy, fleet.discovery, Broken):
        async with fleet.worker(hf_folder) as (_, publisher):
            publisher.update(active_decode_blocks=1)
            await trio.sleep(3)
            assert busy.busy(MODEL) == frozenset()
    assert "a worker's load cannot be listened to" in caplog.text


async def test_the_engine_of_the_same_process_is_asked_itself(
    autojump_clock: MockClock, open_site: Opener
) -> None:
    async with open_site(itl_ms=1000.0) as site:
        busy = site.frontend.busy
        tell_own_load(busy, site.engine, site.runtime.instance_id)
        busy.set("sim", active_decode_blocks_threshold=0.0)
        asked = {**chat(stream=True), "model": "sim", "max_tokens": 20}
        running = site.client.start("POST", CHAT, asked)
        await trio.sleep(5)
        refused = await site.client.ask("POST", CHAT, asked)
        assert refused.status == 529
        await running.done.wait()
        assert running.status == 200
        assert (await site.client.ask("POST", CHAT, asked)).status == 200
