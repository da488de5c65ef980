"""What an operator can see of a mux connection: who is there, who is not, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import RemoteProtocolError, UnexpectedTls
from dynamo_trio.plane import Acknowledgements, Connections
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.mux.link import NO_HELLO, _root
from dynamo_trio.plane.net.tls import TlsSettings, explain
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.receiver import MUX_BEGINNING, stranger
from dynamo_trio.wire.mux.limits import MAGIC
from tests.plane.mux_peer import ADDRESS, PATH, Endpoint, open_pair
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOPBACK = MuxSettings(host="127.0.0.1", retry_time=0.05, max_retry_time=0.05)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - a log, or a count
            await trio.sleep(0.01)


# --- strangers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"\x15\x03\x03\x00\x02", "TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (MAGIC, "mux"),
    ],
)
def test_a_stranger_is_called_what_it_is(data: bytes, what: str) -> None:
    assert f"the peer speaks {what}" in str(stranger(data))


def test_others_are_not_known() -> None:
    assert MAGIC.startswith(MUX_BEGINNING)
    assert [stranger(data) for data in (b"", b"GE", b"\0\0\0\x05", b"SSH-2.0-")] == [None] * 4


def test_tls_is_explained_on_the_side_on_which_it_is_missing() -> None:
    fault = UnexpectedTls("the peer speaks TLS")
    assert explain(fault).endswith("this port does not (DYN_TCP_TLS_CERT_PATH is not set)")
    missing = "this process does not (DYN_TCP_TLS_CA_CERT_PATH is not set)"
    assert explain(fault, dialled=True).endswith(missing)
    assert explain(RemoteProtocolError("x"), dialled=True) == "x"


@pytest.mark.parametrize(
    ("data", "what"), [(b"GET / HTTP/1.1\r\n\r\n", "HTTP"), (b"\x16\x03\x01\x02\x00", "TLS")]
)
async def test_a_stranger_at_a_mux_port(
    data: bytes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_mux_plane(LOOPBACK) as worker, worker.serve(PATH, Endpoint()) as address:
        place = TcpTarget.parse(address).address
        async with await trio.open_tcp_stream(place.host, place.port) as stream:
            await stream.send_all(data)
            await until(lambda: f"the peer speaks {what}" in "".join(lines(caplog)))


async def test_a_mux_client_at_a_tcp_port(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        open_tcp_plane(TcpSettings(rpc_host="127.0.0.1")) as worker,
        open_mux_plane(LOOPBACK) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        client.instance_found(address)
        speaks = "the peer speaks mux, and this port is one of the tcp plane"
        await until(lambda: speaks in "".join(lines(caplog)))
        await until(lambda: NO_HELLO in "".join(lines(caplog)))


# --- TLS that is not alike ----------------------------------------------------------------


@pytest.mark.parametrize("worker_has_it", [True, False])
async def test_a_mismatch_is_told_once_on_both_sides(
    worker_has_it: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls, plain = mutual_tls(tmp_path), TlsSettings()
    worker_tls, client_tls = (tls, plain) if worker_has_it else (plain, tls)
    tries = 0
    async with (
        open_mux_plane(attrs.evolve(LOOPBACK, tls=worker_tls)) as worker,
        open_mux_plane(attrs.evolve(LOOPBACK, tls=client_tls)) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        way = client.client._way(TcpTarget.parse(address).address)
        dial = way._dial

        async def count(address: HostPort) -> trio.abc.Stream:
            nonlocal tries
            tries += 1
            return await dial(address)

        way._dial = count
        client.instance_found(address)
        await until(lambda: tries > 8)
    at_worker = lines(caplog, logging.WARNING)
    at_client = [text for text in lines(caplog) if text.startswith("no mux connection")]
    assert (len(at_worker), len(at_client)) == (1, 1)
    if worker_has_it:
        assert "the peer does not speak TLS; is DYN_TCP_TLS_CA_CERT_PATH set there?" in at_worker[0]
        assert "TLS" in at_client[0]
        assert "DYN_TCP_TLS_" in at_client[0]
    else:
        assert "this port does not (DYN_TCP_TLS_CERT_PATH is not set)" in at_worker[0]
        assert "the peer closed the connection; is DYN_TCP_TLS_CERT_PATH set there?" in at_client[0]


@pytest.mark.parametrize("reset", [True, False])
async def test_somebody_else_who_closes_is_told_of_once(
    reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    came = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal came
        came += 1
        if not reset:
            await stream.receive_some()
        await stream.aclose()  # with something unread that is a reset

    async with trio.open_nursery() as nursery, open_mux_plane(LOOPBACK) as client:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        client.instance_found(f"127.0.0.1:{port}/{PATH}")
        await until(lambda: came > 8)
        nursery.cancel_scope.cancel()
    text = f"no mux connection to the worker at 127.0.0.1:{port}: {NO_HELLO}"
    assert lines(caplog) == [text]


def test_an_error_without_words_is_told_by_what_lies_below_it() -> None:
    error = trio.BrokenResourceError()
    assert _root(error) == "the connection broke"
    error.__cause__ = trio.BrokenResourceError()
    error.__cause__.__cause__ = OSError(104, "reset")
    assert _root(error) == "[Errno 104] reset"


# --- connections --------------------------------------------------------------------------


async def test_a_connection_is_seen_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        open_mux_plane(LOOPBACK) as worker,
        open_mux_plane(LOOPBACK) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        client.instance_found(address)
        await until(lambda: worker.connections == Connections(0, 1))
        await until(lambda: client.connections == Connections(1, 0))
        client.instance_gone(address)
        await until(lambda: (client.connections, worker.connections) == (Connections(),) * 2)
    place = TcpTarget.parse(address).address
    # That it has ended is what this side wanted, and no news.
    assert lines(caplog) == [
        f"mux connections are taken at {place}",
        f"connected over mux to the worker at {place}",
    ]


async def test_who_has_acknowledged(autojump_clock: MockClock) -> None:
    async with open_pair() as pair:
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        (link,) = pair.server._links
        assert pair.server.acknowledgements == Acknowledgements(1)
        pair.server.withdraw(ADDRESS, f"{ADDRESS}2")
        assert link._notice == 1  # both in one
        assert pair.server.acknowledgements == Acknowledgements(1, (link.peer,))
        await pair.server.wait_acknowledged()
        assert pair.server.acknowledgements == Acknowledgements(1)
        pair.client.instance_gone(ADDRESS)  # it leaves, since it knows of nobody there any more
        await wait_all_tasks_blocked()
        await trio.sleep(2)
        assert pair.server.connections == 0
        assert pair.server.acknowledgements == Acknowledgements(1)
        pair.client.instance_found(ADDRESS)
        await wait_all_tasks_blocked()
        await trio.sleep(2)
        assert pair.server.connections == 1
        assert pair.server.acknowledgements == Acknowledgements(1)
        pair.server.restore(ADDRESS)
        pair.server.restore(f"{ADDRESS}2")
        pair.client.instance_gone(ADDRESS)
        await trio.sleep(2)
        assert pair.server.acknowledgements == Acknowledgements(0)
