"""What a worker tells its clients when it stops, and how it knows that they have heard it."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import Draining
from dynamo_trio.plane.mux import server_side
from dynamo_trio.wire.mux.client_connection import ClientConnection
from tests.plane.mux_peer import ADDRESS, PATH, PLACE, Endpoint, Pair, Sink, open_pair

OTHER = f"{PLACE}/1f/other"


async def acknowledged(pair: Pair) -> bool:
    """Has every client acknowledged by now?"""
    await wait_all_tasks_blocked()
    with trio.move_on_after(0.01) as scope:
        await pair.server.wait_acknowledged()
    return not scope.cancelled_caught


async def test_without_clients_there_is_nothing_to_wait_for(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.server.withdraw(ADDRESS)
        assert await acknowledged(pair)


async def test_a_client_obeys_at_once_and_says_so(autojump_clock: MockClock) -> None:
    running = Sink()
    async with open_pair() as pair:
        async with pair.ask(running):
            pair.server.withdraw(ADDRESS)
            assert await acknowledged(pair)
            assert pair.client.avoids(ADDRESS)
            sent = pair.to_client.sent
            with pytest.raises(Draining):
                async with pair.ask(Sink()):
                    raise AssertionError("nothing new goes there")
            await wait_all_tasks_blocked()
            assert pair.to_client.sent == sent
            pair.call.outbox.put_tokens([1])
            pair.call.outbox.finish(None)
            assert await running.end() is None
    assert len(pair.endpoint.calls) == 1


async def test_only_what_was_withdrawn_is_avoided(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.server._acceptors["1f/other"] = Endpoint(), True
        pair.client.instance_found(ADDRESS)
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        assert pair.client.avoids(ADDRESS)
        assert not pair.client.avoids(OTHER)
        pair.server.withdraw(OTHER)
        assert await acknowledged(pair)
        assert pair.client.avoids(OTHER)


async def test_what_is_restored_takes_requests_again(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.server.withdraw(ADDRESS)
        pair.server.withdraw(ADDRESS)  # told once
        await wait_all_tasks_blocked()
        pair.server.restore(ADDRESS)
        pair.server.restore(ADDRESS)
        await wait_all_tasks_blocked()
        assert not pair.client.avoids(ADDRESS)
        async with pair.ask(Sink()):
            assert len(pair.endpoint.calls) == 1
        pair.server.withdraw(ADDRESS)
        assert await acknowledged(pair)
        assert pair.client.avoids(ADDRESS)


async def test_serving_a_path_anew_restores_it(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        del pair.server._acceptors[PATH]
        pair.server.settings = pair.settings
        async with pair.server.serve(PATH, pair.endpoint):
            await wait_all_tasks_blocked()
            assert not pair.client.avoids(ADDRESS)


async def test_a_client_that_does_not_answer_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = True
        pair.server.withdraw(ADDRESS)
        assert not await acknowledged(pair)
        pair.to_client.open()
        assert await acknowledged(pair)


async def test_a_client_that_comes_later_hears_it_too(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.server.withdraw(ADDRESS)
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        assert pair.client.avoids(ADDRESS)
        assert await acknowledged(pair)


async def test_a_client_that_breaks_off_has_not_acknowledged(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = True
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        pair.reachable = False
        pair.cut()
        assert not await acknowledged(pair)
        pair.server.restore(ADDRESS)
        assert await acknowledged(pair)


async def breaks_off_after_a_notice(pair: Pair) -> None:
    pair.client.instance_found(ADDRESS)
    await wait_all_tasks_blocked()
    pair.to_client.shut = True
    pair.server.withdraw(ADDRESS)
    await wait_all_tasks_blocked()
    pair.reachable = False
    pair.cut()
    assert not await acknowledged(pair)
    pair.reachable = True


async def test_a_client_that_comes_back_and_acknowledges_is_known_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_pair() as pair:
        await breaks_off_after_a_notice(pair)
        await trio.sleep(10)
        assert len(pair.dialled_at) > 1
        assert pair.client.avoids(ADDRESS)
        assert await acknowledged(pair)
    (line,) = [r.getMessage() for r in caplog.records if "broke off" in r.getMessage()]
    assert f"(process {pair.client.process})" in line


async def test_a_client_that_comes_back_must_acknowledge(autojump_clock: MockClock) -> None:
    """Until it does it may send something that the worker would have to take."""
    async with open_pair() as pair:
        await breaks_off_after_a_notice(pair)
        while len(pair.server._links) == 0:  # noqa: ASYNC110 - of another task
            await trio.sleep(0.1)
        pair.to_client.shut = True
        pair.server.withdraw(OTHER)
        assert not await acknowledged(pair)
        pair.to_client.open()
        assert await acknowledged(pair)


async def test_another_client_does_not_stand_in_for_one_that_broke_off(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        await breaks_off_after_a_notice(pair)
        pair.reachable = False
        second = Pair(pair.settings, pair.nursery)
        second.server = pair.server
        second.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        assert second.client.avoids(ADDRESS)
        assert not await acknowledged(pair)


async def test_who_does_not_say_which_process_it_is_is_waited_for_until_the_end(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        pair.client.process = ""
        await breaks_off_after_a_notice(pair)
        await trio.sleep(10)
        assert pair.client.avoids(ADDRESS)
        assert not await acknowledged(pair)
        pair.server.restore(ADDRESS)
        assert await acknowledged(pair)


async def test_a_connection_that_is_only_half_gone_does_not_count_behind_the_next(
    autojump_clock: MockClock,
) -> None:
    """The client knows that it is broken and has connected anew; the worker does not know yet."""
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = True
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_worker.shut = True  # it hears nothing, not even the end
        await trio.sleep(20)  # the client gives it up
        assert len(pair.dialled_at) == 2
        assert len(pair.server._links) == 2
        assert await acknowledged(pair)
        pair.valves[0][1].open()
        await wait_all_tasks_blocked()
        assert len(pair.server._links) == 1
        assert await acknowledged(pair)


async def test_a_crowd_that_breaks_off_is_not_remembered_without_an_end(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "MAX_STRAYS", 3)
    async with open_pair() as pair:
        for number in range(5):
            second = Pair(pair.settings, pair.nursery)
            second.server = pair.server
            second.client.instance_found(ADDRESS)
            await wait_all_tasks_blocked()
            second.to_client.shut = True
            pair.server.withdraw(f"{PLACE}/{number + 16:x}/generate")
            second.reachable = False
            second.cut()
            await wait_all_tasks_blocked()
        assert len(pair.server._strays) == 3
        assert not await acknowledged(pair)


async def test_a_client_that_says_goodbye_needs_not_acknowledge(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = True
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        pair.client.instance_gone(ADDRESS)
        assert await acknowledged(pair)


async def test_an_open_that_left_before_the_notice_came_is_served(
    autojump_clock: MockClock,
) -> None:
    """The acknowledgement comes behind it, so the worker never waits for less than all."""
    sink = Sink()
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        pair.to_client.shut = True
        pair.server.withdraw(ADDRESS)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with pair.ask(sink, b"x" * 3_000_000):
                    await sink.end()

            nursery.start_soon(ask)
            while not pair.client._ways[PLACE]._users:
                await trio.lowlevel.checkpoint()
            pair.to_client.open()
            await pair.server.wait_acknowledged()
            assert len(pair.endpoint.calls) == 1
            assert len(pair.call.payload) == 3_000_000
            await wait_all_tasks_blocked()
            pair.call.outbox.finish(None)
        assert await sink.end() is None


async def test_many_paths_are_withdrawn(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        addresses = [f"{PLACE}/{number:x}/generate" for number in range(1000, 1200)]
        for address in addresses[:150]:
            pair.server.withdraw(address)
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        for address in addresses[150:]:
            pair.server.withdraw(address)
        assert await acknowledged(pair)
        assert all(map(pair.client.avoids, addresses))
        assert not pair.client.avoids(ADDRESS)
        assert pair.server.places == 0


async def test_how_many_it_can_place_is_renewed_by_every_acknowledgement(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter([1, 4])

    def acknowledge(wire: ClientConnection, notice: int) -> None:
        for number in places:
            said(wire, notice, number)

    said = ClientConnection.acknowledge
    async with open_pair() as pair, pair.ask(Sink()):
        peer = pair.call.outbox.peer
        assert (peer.places, peer.take()) == (0, False)
        monkeypatch.setattr(ClientConnection, "acknowledge", acknowledge)
        pair.server.withdraw(ADDRESS)  # one notice, acknowledged twice
        await wait_all_tasks_blocked()
        assert pair.server.places == peer.places == 4
        assert pair.call.outbox.peer is peer
        assert peer.take()
        assert pair.server.places == 3
        pair.call.outbox.finish(None)
