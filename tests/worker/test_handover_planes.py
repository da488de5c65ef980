"""Streams that a stopping worker hands over: what their peers hear on each plane."""

from __future__ import annotations

from functools import partialmethod
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from dynamo_trio.errors import DynamoException, EngineDead, EngineShutdown, Unknown
from dynamo_trio.lifecycle import DrainPolicy, Outcome
from dynamo_trio.testing import Fault
from dynamo_trio.wire.llm import LLMEngineOutput, SamplingOptions
from dynamo_trio.wire.mux.client_connection import ClientConnection
from tests.plane.test_plane_contract import PATIENCE
from tests.worker.test_engine_handler_planes import Site, asking, open_site

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_trio.wire.llm import PreprocessedRequest

#: At the pace of the simulated engine that takes far longer than any drain here.
LONG = 5000
GUIDED = SamplingOptions(guided_decoding={"json": {"type": "object"}})


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients say that they can place two streams on other workers."""
    acknowledge = partialmethod(ClientConnection.acknowledge, places=2)
    monkeypatch.setattr(ClientConnection, "acknowledge", acknowledge)


async def stopped(site: Site, *requests: PreprocessedRequest) -> list[DynamoException]:
    """Stop the worker under these requests; their errors, in the order in which they came."""
    errors: list[DynamoException] = []
    begun = trio.Event()
    waiting = len(requests)

    async def ask(request: PreprocessedRequest) -> None:
        nonlocal waiting
        async with site.client.generate(request, item_type=LLMEngineOutput) as stream:
            for _ in range(3):  # the pace is known then
                await anext(stream)
            waiting -= 1
            if not waiting:
                begun.set()
            with pytest.raises(DynamoException) as caught:
                async for _ in stream:
                    pass
            errors.append(caught.value)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(ask, request)
            await begun.wait()
            site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
    return errors


def is_planned(error: DynamoException) -> bool:
    return isinstance(error, EngineShutdown) and error.planned


@pytest.mark.usefixtures("two_places")
async def test_over_mux_as_many_as_have_a_place_go_before_the_limit(tmp_path: Path) -> None:
    async with open_site("mux-msgpack", tmp_path, drain=3.0) as site:
        errors = await stopped(site, *(asking(n, LONG) for n in range(3)))
        assert [is_planned(error) for error in errors] == [True, True, False]
        assert all(error.migratable for error in errors)
        report = site.lifecycle.report()
        assert report.requests == {Outcome.HANDED_OVER: 2, Outcome.CUT: 1}
        assert report.unconfirmed == 0


@pytest.mark.usefixtures("two_places")
async def test_migrate_hands_over_at_once_what_the_peer_takes(tmp_path: Path) -> None:
    async with open_site("mux-msgpack", tmp_path, 1.0, DrainPolicy.MIGRATE) as site:
        errors = await stopped(site, *(asking(n, LONG) for n in range(3)))
        assert [is_planned(error) for error in errors] == [True, True, False]
        report = site.lifecycle.report()
        assert report.requests == {Outcome.HANDED_OVER: 2, Outcome.CUT: 1}
        assert report.unconfirmed == 0
        assert {s.name: s.ending for s in report.phases}["draining"] == "timed_out"


@pytest.mark.parametrize(
    ("kind", "outcome", "ending"),
    [
        ("mux-msgpack", Outcome.CUT, "timed_out"),
        ("tcp-msgpack", Outcome.HANDED_OVER, "completed"),
    ],
)
async def test_migrate_gives_nothing_to_a_peer_that_takes_nothing(
    tmp_path: Path, kind: str, outcome: Outcome, ending: str
) -> None:
    async with open_site(kind, tmp_path, policy=DrainPolicy.MIGRATE) as site:
        [error] = await stopped(site, asking(1, LONG))
        assert not is_planned(error)
        report = site.lifecycle.report()
        assert report.requests == {outcome: 1}
        assert report.unconfirmed == (kind == "tcp-msgpack")
        assert {s.name: s.ending for s in report.phases}["draining"] == ending


@pytest.mark.parametrize("kind", ["tcp-msgpack", "tcp-json"])
@pytest.mark.usefixtures("two_places")
async def test_over_tcp_they_go_at_the_limit(tmp_path: Path, kind: str) -> None:
    async with open_site(kind, tmp_path) as site:
        errors = await stopped(site, *(asking(n, LONG) for n in range(3)))
        assert [type(error) for error in errors] == [EngineShutdown] * 3
        report = site.lifecycle.report()
        assert report.requests == {Outcome.HANDED_OVER: 3}
        assert report.unconfirmed == 3
        assert {s.name: s.ending for s in report.phases}["draining"] == "timed_out"


@pytest.mark.parametrize("kind", ["mux-msgpack", "tcp-msgpack", "tcp-json"])
@pytest.mark.usefixtures("two_places")
async def test_nobody_is_asked_to_continue_what_cannot_be_continued(
    tmp_path: Path, kind: str
) -> None:
    async with open_site(kind, tmp_path) as site:
        guided = sampled(asking(1, LONG), GUIDED)
        [error] = await stopped(site, guided)
        assert not error.migratable
        assert isinstance(error, Unknown) or error.reason == "cut"
        assert site.lifecycle.report().requests == {Outcome.CUT: 1}


def sampled(request: PreprocessedRequest, sampling: SamplingOptions) -> PreprocessedRequest:
    return msgspec.structs.replace(request, sampling_options=sampling)


@pytest.mark.parametrize(
    ("kind", "outcome"), [("mux-msgpack", Outcome.CUT), ("tcp-msgpack", Outcome.HANDED_OVER)]
)
async def test_an_engine_that_dies_hands_over_what_can_go(
    tmp_path: Path, kind: str, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.RaisesGroup(EngineDead, allow_unwrapped=True, flatten_subgroups=True):
        async with open_site(kind, tmp_path) as site:
            async with site.client.generate(asking(1, 500), item_type=LLMEngineOutput) as stream:
                await anext(stream)
                with trio.CancelScope(shield=True):
                    site.core.arm(Fault("raise"))
                    with pytest.raises(EngineShutdown):
                        async for _ in stream:
                            pass
                    await site.ended(**{outcome.value: 1})
    assert site.lifecycle.work.unconfirmed == (outcome is Outcome.HANDED_OVER)
    assert "the handler failed" not in caplog.text
