"""The events of a worker as a process: its records, who hears it, and that it ends in time."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio import open_runtime
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.events.sockets import ZmqEvents
from dynamo_trio.kv import KvFleet, follow_fleet
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from tests.programs.conftest import wait_instances
from tests.standalone.harness import ask, chat, open_streams, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.programs.conftest import Fleet

ENDPOINT = "dynamo.backend.generate"
EVENTS = ("event_channels", "event_sources")


def asks(tokens: int) -> dict[str, object]:
    return chat(tokens, model="demo")


def helpers(fleet: Fleet) -> list[Path]:
    """The instances of query endpoints."""
    return [*(fleet.store / "v1" / "instances").glob("*worker%5Fkv%5Fquery*")]


@asynccontextmanager
async def following(fleet: Fleet) -> AsyncIterator[KvFleet]:
    async with (
        open_file_discovery(FileSettings(root=fleet.store)) as discovery,
        open_mux_plane(MuxSettings(host="127.0.0.1")) as mux,
        open_tcp_plane(TcpSettings(rpc_host="127.0.0.1", response_host="127.0.0.1")) as tcp,
        open_runtime(
            discovery=discovery, planes=[mux, tcp], events=ZmqEvents("127.0.0.1", "127.0.0.1")
        ) as runtime,
        follow_fleet(runtime.endpoint(ENDPOINT)) as known,
    ):
        yield known


async def until_blocks(known: KvFleet, count: int) -> None:
    """Wait until the caches hold at least so many blocks together."""
    with trio.fail_after(20):
        while sum(len(cache.view.state) for cache in known.caches.values()) < count:
            with trio.move_on_after(0.2):
                await known.wait_changed()


@pytest.mark.parametrize("mux", ["off", "only"])
async def test_who_follows_the_fleet_knows_what_is_cached(fleet: Fleet, mux: str) -> None:
    fleet.worker("--mux", mux)
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    # Cached before anybody listens: only the query can tell.
    early = await trio.to_thread.run_sync(
        ask, frontend.port, "POST", "/v1/chat/completions", asks(20)
    )
    assert early.is_done
    async with following(fleet) as known:
        await until_blocks(known, 2)
        answer = await trio.to_thread.run_sync(
            ask, frontend.port, "POST", "/v1/chat/completions", asks(64)
        )
        assert answer.is_done
        await until_blocks(known, 5)
        with trio.fail_after(10):
            while not known.loads:
                await known.wait_changed()


def test_records_of_events_stay_until_the_last_request_is_served(fleet: Fleet) -> None:
    worker = fleet.worker("--itl-ms", "20")
    frontend = fleet.frontend()
    wait_instances(frontend, 1)
    assert [len(fleet.records(bucket)) for bucket in EVENTS] == [2, 1]
    assert len(helpers(fleet)) == 1
    with open_streams(frontend.port, 1, asks(60)) as (stream,):
        worker.kill(signal.SIGTERM)
        wait_until(lambda: fleet.records("instances") == [], "no instance")
        assert helpers(fleet) == []
        assert [len(fleet.records(bucket)) for bucket in EVENTS] == [2, 1]
        assert stream.finish().is_done
    assert worker.end() == 0
    assert worker.report["leftovers"] == worker.report["errors"] == []
    assert [fleet.records(bucket) for bucket in EVENTS] == [[], []]


def test_a_worker_that_is_to_tell_nothing_of_its_cache(fleet: Fleet) -> None:
    fleet.worker(DYN_TRIO_KV_EVENTS="0")
    wait_instances(fleet.frontend(), 1)
    assert [len(fleet.records(bucket)) for bucket in EVENTS] == [1, 0]
    assert helpers(fleet) == []
    (card,) = fleet.records("mdc")
    assert b'"kv_event_publishing_enabled":false' in card.read_bytes()
