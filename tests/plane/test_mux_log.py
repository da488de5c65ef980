"""What peers can make the mux plane write to the log: reasons, and few lines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from dynamo_trio.console.seldom import SeldomEach
from dynamo_trio.plane.mux.complaints import VERSION_EVERY, WORKER_EVERY, Complaints
from dynamo_trio.plane.net.sockets import COMPLAIN_EVERY
from dynamo_trio.wire.mux import frames, worker_connection
from dynamo_trio.wire.mux.frames import encode
from dynamo_trio.wire.mux.limits import MAGIC
from tests.plane.mux_peer import ADDRESS, Pair, Valve, open_pair

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dynamo_trio.wire.dynamo.addresses import HostPort

logger = logging.getLogger("dynamo_trio.test")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


async def strangers_say(pair: Pair, data: bytes, *peers: str) -> None:
    """Each on a connection of its own, one after the other."""
    for peer in peers:
        ours, theirs = memory_stream_pair()
        pair.nursery.start_soon(pair.server.serve_stream, theirs, peer)
        await ours.send_all(data)
        while await ours.receive_some():
            pass
        await ours.aclose()
    await wait_all_tasks_blocked()


async def test_many_bad_connections_are_a_line_in_a_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [f"10.0.0.{number}:99" for number in range(50)]
    async with open_pair() as pair:
        await strangers_say(pair, b"nonsense", *peers)
        (line,) = lines(caplog)
        assert line.startswith("the connection to 10.0.0.0:99 is closed: ")
        assert "does not speak mux" in line
        await trio.sleep(COMPLAIN_EVERY)
        await strangers_say(pair, MAGIC + b"\0\0\0\1\1", *peers[:2])
    _, line = lines(caplog)
    assert "10.0.0.0:99" in line
    assert "HELLO" in line
    assert line.endswith("(and 49 more before it)")


async def test_a_client_of_another_version_is_a_line_in_a_long_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries again every minute, from another port each time."""
    hello = MAGIC + encode(frames.Hello([8, 9], 1, 1, "later"))
    async with open_pair() as pair:
        for number in range(50):
            await strangers_say(pair, hello, f"10.0.0.1:{number}", f"[fd00::7]:{number}")
            await trio.sleep(60)
        one, other = lines(caplog)
        assert one.startswith("the connection to 10.0.0.1:0 is closed: no version in common: ")
        assert "the client speaks [8, 9], the worker [1]" in one
        assert "[fd00::7]:0" in other
        await trio.sleep(VERSION_EVERY)
        await strangers_say(pair, hello, "10.0.0.1:7")
    assert lines(caplog)[2].endswith("(and 49 more before it)")


async def test_a_worker_of_another_version_is_one_line_on_each_side(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_connection, "VERSIONS", (99,))
    caplog.set_level(logging.INFO)
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await trio.sleep(VERSION_EVERY - 60)
        assert len(pair.dialled_at) > 50
    client, worker = sorted(lines(caplog, logging.INFO), key=lambda line: "worker at" not in line)
    assert client.startswith("no mux connection to the worker at 10.0.0.1:7000: ")
    assert worker.startswith("the connection to the client is closed: ")
    for line in (client, worker):
        assert "no version in common" in line


async def test_a_worker_that_is_no_more_of_another_version_is_tried_as_any_other(
    autojump_clock: MockClock,
) -> None:
    async with open_pair() as pair:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_connection, "VERSIONS", (99,))
            pair.client.instance_found(ADDRESS)
            await trio.sleep(100)
        pair.reachable = False  # it is being replaced
        await trio.sleep(60)
        pair.reachable = True
        await trio.sleep(pair.settings.max_retry_time)
        assert pair.server._links


@pytest.mark.parametrize("greets", [False, True])
async def test_a_worker_that_speaks_nonsense_is_a_line_in_a_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, *, greets: bool
) -> None:
    hello = MAGIC + encode(frames.Hello([1], 1, 1, "x"))
    caplog.set_level(logging.INFO)
    count = 0

    async def dial(address: HostPort) -> trio.abc.Stream:
        nonlocal count
        count += 1
        ours, theirs = memory_stream_pair()
        await theirs.send_all((hello if greets else b"") + b"\0\0\0\0nonsense")
        return Valve(ours)

    async with open_pair() as pair:
        pair.client._dial = dial
        pair.client.instance_found(ADDRESS)
        await trio.sleep(10 * WORKER_EVERY)
    assert count > 50
    told = lines(caplog)
    assert 5 <= len(told) <= 11
    assert all("is closed: " in line for line in told)
    connected = [t for t in lines(caplog, logging.INFO) if t.startswith("connected over mux")]
    assert len(connected) <= 10 * WORKER_EVERY / COMPLAIN_EVERY + 1
    assert len(lines(caplog, logging.INFO)) - len(connected) <= 23


async def test_each_is_spoken_of_once_in_a_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    each = SeldomEach(every=10, most=2)
    for whom in ("a", "b", "a", "b", "a"):
        each.log(whom, logger, logging.WARNING, "of %s", whom)
    assert lines(caplog) == ["of a", "of b"]
    await trio.sleep(10)
    each.log("b", logger, logging.WARNING, "of %s", "b")
    each.log("c", logger, logging.WARNING, "of %s", "c")  # and "a" is forgotten
    each.log("a", logger, logging.WARNING, "of %s", "a")
    assert lines(caplog)[2:] == ["of b (and 1 more before it)", "of c", "of a"]


async def test_kinds_of_complaints_do_not_hide_one_another(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = Complaints()
    for _ in range(2):
        complaints.silent("the worker")
        complaints.closed("the worker", "nothing was heard")
        complaints.incompatible("the worker", "no version")
    silent, closed, incompatible = lines(caplog)
    assert "is silent" in silent
    assert "nothing was heard" in closed
    assert "no version" in incompatible
