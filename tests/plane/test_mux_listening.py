"""Where the mux plane listens, and with whom it shakes hands."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.errors import ConfigError, NotConnected, PortInUse
from dynamo_trio.plane import RequestHead
from dynamo_trio.plane.mux import MuxPlane, MuxSettings, open_mux_plane
from dynamo_trio.plane.net.tls import TlsSettings
from dynamo_trio.wire.dynamo.addresses import TcpTarget
from tests.plane.mux_peer import PATH, Endpoint, Sink
from tests.plane.tls_files import mutual_tls

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK = MuxSettings(host="127.0.0.1")


def with_tls(tls: TlsSettings) -> MuxSettings:
    return attrs.evolve(LOOPBACK, tls=tls)


async def cannot_ask(client: MuxPlane, address: str) -> str:
    """A request there finds no connection; returns what is said of it."""
    with pytest.raises(NotConnected) as raised, trio.fail_after(20):
        async with client.open_stream(address, RequestHead("1"), b"", Sink()):
            raise AssertionError("it must not be connected")
    return str(raised.value)


async def warned(caplog: pytest.LogCaptureFixture, text: str) -> None:
    with trio.fail_after(20):
        while not any(text in r.getMessage() for r in caplog.records):  # noqa: ASYNC110 - a log
            await trio.sleep(0.01)


async def test_the_address_is_where_it_listens() -> None:
    async with (
        open_mux_plane(LOOPBACK) as plane,
        plane.serve(PATH, Endpoint()) as address,
        plane.serve("2f/other", Endpoint()) as other,
    ):
        target = TcpTarget.parse(address)
        assert (target.address.host, target.path) == ("127.0.0.1", PATH)
        assert TcpTarget.parse(other).address == target.address


async def test_a_port_that_is_taken_is_named_by_its_variable() -> None:
    async with open_mux_plane(LOOPBACK) as first, first.serve(PATH, Endpoint()) as address:
        port = TcpTarget.parse(address).address.port
        async with open_mux_plane(attrs.evolve(LOOPBACK, port=port)) as second:
            with pytest.raises(PortInUse, match=rf"127.0.0.1:{port} \(DYN_TRIO_MUX_PORT\)"):
                async with second.serve(PATH, Endpoint()):
                    raise AssertionError("the port is taken")


async def test_a_host_of_another_machine_is_named_by_its_variable() -> None:
    async with open_mux_plane(MuxSettings(host="203.0.113.7")) as plane:
        with pytest.raises(ConfigError, match="DYN_TCP_RPC_HOST"):
            async with plane.serve(PATH, Endpoint()):
                raise AssertionError("it cannot listen there")


async def test_settings_that_cannot_be_used_are_known_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be set together"):
        async with open_mux_plane(with_tls(TlsSettings(cert=tmp_path / "cert.pem"))):
            raise AssertionError("half an identity")


async def test_a_client_without_a_certificate_is_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = mutual_tls(tmp_path)
    stranger = attrs.evolve(tls, client_cert=None, client_key=None)
    async with (
        open_mux_plane(with_tls(tls)) as worker,
        open_mux_plane(with_tls(stranger)) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        await cannot_ask(client, address)
        await warned(caplog, "TLS handshake failed")


async def test_a_plain_client_at_a_port_with_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_mux_plane(with_tls(mutual_tls(tmp_path))) as worker,
        open_mux_plane(LOOPBACK) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        await cannot_ask(client, address)
        await warned(caplog, "the peer does not speak TLS; is DYN_TCP_TLS_CA_CERT_PATH set there?")


async def test_a_client_with_tls_at_a_plain_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_mux_plane(LOOPBACK) as worker,
        open_mux_plane(with_tls(mutual_tls(tmp_path))) as client,
        worker.serve(PATH, Endpoint()) as address,
    ):
        assert "TLS handshake failed" in await cannot_ask(client, address)
        await warned(caplog, "DYN_TCP_TLS_CERT_PATH is not set")
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_nobody_listens_where_nothing_is_served() -> None:
    async with open_mux_plane(LOOPBACK) as plane:
        assert plane.name == "mux"
        assert not plane.has_silent_peers
        assert plane.places == 0
        await plane.settle()
        assert plane.server._address is None
