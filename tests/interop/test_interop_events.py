"""KV events both ways: NVIDIA's KV router hears our workers, and we hear NVIDIA's mocker."""

from __future__ import annotations

import re
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from dynamo_trio import open_runtime
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.events import EventPlane, Inlet, sockets
from dynamo_trio.events.sockets import ZmqEvents
from dynamo_trio.kv import FollowSettings, KvFleet, follow_fleet
from dynamo_trio.kv.fleet import CacheId
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.testing.model_folder import WORDS
from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes
from tests.interop.load import CHAT
from tests.interop.processes import wait_until
from tests.interop.scene import axes
from tests.interop.stores import EtcdStore, FileStore
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dynamo_trio import Client
    from dynamo_trio.runtime import DistributedRuntime
    from tests.interop.fleet import Frontend, Worker
    from tests.interop.model import Model
    from tests.interop.scene import Scene

#: Our simulated engine's block, in tokens.
BLOCK = 16
KV = ("--router-mode", "kv")


@pytest.fixture(autouse=True)
def _libzmq_in_here(_inside: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """libzmq's I/O thread stays in the network in which it began: let one begin in this one."""
    context = sockets._context.__wrapped__()
    monkeypatch.setattr(sockets, "_context", lambda: context)
    yield
    context.term()


# --- their router, our workers -------------------------------------------------------------------


@attrs.frozen
class Routed:
    """Where a request went, and what the router knew of its prompt."""

    worker: int
    hit_rate: float
    cached: int
    prompt: int


def route(frontend: Frontend, model: Model, first: str, words: int = 300) -> Routed:
    """Ask with a prompt that differs from others in its first block already."""
    body = chat(2, model=model.name, stream=False)
    body["messages"] = [{"role": "user", "content": f"{first} " * words}]
    body["nvext"] = {"extra_fields": ["worker_id", "timing"]}
    answer = frontend.ask("POST", CHAT, body).json()
    usage, told = answer["usage"], answer["nvext"]
    return Routed(
        told["worker_id"]["decode_worker_id"],
        told["timing"]["kv_hit_rate"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
    )


def applied(frontend: Frontend) -> dict[tuple[str, str], int]:
    """How many events its indexes have applied: kind and outcome -> number."""
    text = frontend.ask("GET", "/metrics").body.decode()
    found: dict[tuple[str, str], int] = {}
    for labels, count in re.findall(r"kv_cache_events_applied\{(.*)\} (\d+)", text):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if int(count):
            key = (named["event_type"], named["status"])
            found[key] = found.get(key, 0) + int(count)
    return found


def settled(frontend: Frontend, model: Model, worker: Worker, first: str) -> Routed:
    """Ask until the router knows nearly all of the prompt."""
    results: list[Routed] = []

    def known() -> bool:
        results.append(route(frontend, model, first))
        return results[-1].hit_rate > 0.9

    wait_until(known, f"overlap for {first!r}", frontend.process, worker.process)
    return results[-1]


@axes(0)
def test_their_kv_router_sends_a_prompt_where_it_is_cached(scene: Scene) -> None:
    model = scene.model()
    workers = [scene.our_worker(model) for _ in range(2)]
    silent = scene.model()
    mute = scene.our_worker(silent, DYN_TRIO_KV_EVENTS="0")
    # One that does not look at caches comes first: what it leaves there, the other must ask for.
    early = scene.their_frontend
    early.wait_model(model, *(worker.process for worker in workers))
    warm = [early.ask("POST", CHAT, _warm(model)) for _ in workers]
    assert [answer.status for answer in warm] == [200, 200]

    frontend = scene.their_own_frontend(*KV)
    frontend.wait_serving(model, *workers)
    frontend.wait_serving(silent, mute)
    assert settled(frontend, model, workers[0], "early").cached > 250

    before: dict[str, Routed] = {}
    for first in WORDS:  # nobody has them: the router tosses a coin
        before[first] = route(frontend, model, first)
        assert before[first].hit_rate < 0.1
        if len(before) >= 6 and len({result.worker for result in before.values()}) == 2:
            break
    time.sleep(0.5)  # events travel
    assert len({result.worker for result in before.values()}) == 2
    for first in [*before, *before]:
        result = route(frontend, model, first)
        assert result.worker == before[first].worker
        assert result.hit_rate > 0.9
        assert result.cached == (result.prompt - 1) // BLOCK * BLOCK

    assert {status for _, status in applied(frontend)} == {"ok"}
    # The control: the same engine, of which nobody hears.
    results = [route(frontend, silent, "the") for _ in range(3)]
    assert [result.hit_rate for result in results] == [0, 0, 0]
    assert results[-1].cached > 250


def _warm(model: Model) -> dict[str, Any]:
    content = "early " * 300
    return chat(2, model=model.name, stream=False) | {
        "messages": [{"role": "user", "content": content}]
    }


@axes(1, few=True)
def test_their_kv_router_forgets_what_our_worker_evicts(scene: Scene) -> None:
    model = scene.model()
    worker = scene.our_worker(model, "--kv-blocks", "50")
    frontend = scene.their_own_frontend(*KV)
    frontend.wait_serving(model, worker)
    assert settled(frontend, model, worker, "the").cached > 250
    for first in ("house", "people", "point"):
        assert settled(frontend, model, worker, first).cached > 250
    wait_until(lambda: ("removed", "ok") in applied(frontend), "eviction", frontend.process)
    result = route(frontend, model, "the")
    assert (result.hit_rate, result.cached) == (0, 0)
    assert {status for _, status in applied(frontend)} == {"ok"}


# --- our subscriber, their mocker ----------------------------------------------------------------


@attrs.define(eq=False)
class Deaf(EventPlane):
    """Over ZeroMQ, but what arrives while ``deaf`` is dropped."""

    deaf: bool = False
    dropped: int = 0
    heard: int = 0
    _plane: ZmqEvents = attrs.field(factory=partial(ZmqEvents, "127.0.0.1", "127.0.0.1"))

    def open_outlet(self) -> AbstractContextManager[Any]:
        return self._plane.open_outlet()

    @contextmanager
    def open_inlet(self, address: str, topic: str) -> Iterator[Inlet]:
        with self._plane.open_inlet(address, topic) as inlet:
            yield _DeafInlet(self, inlet)


@attrs.frozen(eq=False)
class _DeafInlet:
    how: Deaf
    inlet: Inlet

    async def receive(self) -> list[bytes]:
        while True:
            frames = await self.inlet.receive()
            if not self.how.deaf:
                self.how.heard += 1
                return frames
            self.how.dropped += 1


@asynccontextmanager
async def our_runtime(scene: Scene, events: EventPlane) -> AsyncIterator[DistributedRuntime]:
    store = scene.store
    if isinstance(store, EtcdStore):
        opening = open_etcd_discovery(EtcdSettings(endpoints=(store.url,)))
    else:
        assert isinstance(store, FileStore)
        opening = open_file_discovery(FileSettings(root=store.folder))
    settings = TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1")
    async with opening as discovery, open_tcp_plane(settings) as plane:
        async with open_runtime(discovery=discovery, planes=[plane], events=events) as runtime:
            yield runtime


async def ask(client: Client, tokens: Sequence[int], max_tokens: int = 1) -> None:
    request = {
        "model": "m",
        "token_ids": [*tokens],
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {},
    }
    async with client.generate(request) as stream:
        async for _ in stream:
            pass


async def until(fleet: KvFleet, condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            with trio.move_on_after(0.2):
                await fleet.wait_changed()


@axes(0)
async def test_we_hear_their_mocker_and_repair_a_gap(scene: Scene) -> None:
    model = scene.model()
    scene.their_mocker(model, "--block-size", str(BLOCK))
    events = Deaf()
    # No audit within the test: what is repaired is repaired because a gap was seen.
    settings = FollowSettings(audit=600)
    early, missed, late = (range(at, at + 160) for at in (1000, 1200, 1400))
    async with our_runtime(scene, events) as runtime:
        endpoint = runtime.endpoint(model.endpoint)
        async with endpoint.client() as client:
            with trio.fail_after(60):
                await client.wait_for_instances()
            await ask(client, early)  # before anybody listens: known by the dump alone
            async with follow_fleet(endpoint, settings) as fleet:
                await until(fleet, lambda: overlaps(fleet, early) == [10])
                (cache,) = fleet.caches
                assert cache == CacheId(client.instance_ids()[0])
                follower = fleet.caches[cache]
                await trio.sleep(2)  # the first audit is over
                asked = follower.queries
                await ask(client, late[:80])
                await until(fleet, lambda: overlaps(fleet, late) == [5])
                assert follower.queries == asked

                events.deaf = True
                await ask(client, missed)
                await until(fleet, lambda: events.dropped > 0)
                await trio.sleep(0.5)
                assert overlaps(fleet, missed) == [0]
                events.deaf = False
                await ask(client, late)
                await until(fleet, lambda: overlaps(fleet, late) == [10])
                assert overlaps(fleet, missed) == [10]
                assert follower.gaps == 1
                assert follower.queries > asked

                # Their names of the blocks are ours.
                for tokens in (early, missed, late):
                    names = chain_hashes(tokens_hashes(tokens, BLOCK))
                    assert set(names) <= follower.view.state.places.keys()
                with trio.fail_after(30):
                    while cache not in fleet.loads:  # it tells a change, and not every one
                        await ask(client, range(3000, 3100), 50)
                assert fleet.loads[cache].kv_used_blocks is not None


def overlaps(fleet: KvFleet, tokens: Sequence[int]) -> list[int]:
    return [*fleet.overlaps(tokens_hashes(tokens, BLOCK)).values()]
