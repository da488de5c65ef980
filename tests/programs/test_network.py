"""From the settings to discovery and planes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from dynamo_trio.config import Config
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.errors import DiscoveryUnavailable
from dynamo_trio.frontend.assembly import ROUTERS
from dynamo_trio.plane import MemoryPlane, Planes
from dynamo_trio.plane.mux import MuxSettings
from dynamo_trio.plane.tcp import TcpSettings
from dynamo_trio.program import network
from dynamo_trio.program.network import (
    mux_settings,
    open_discovery,
    open_planes,
    tcp_settings,
    wait_unreachable,
)

if TYPE_CHECKING:
    from dynamo_trio.config.tables.request_plane import MuxMode


class SilentPlane(MemoryPlane):
    """A plane on which somebody came who cannot say that they know of our leaving."""

    name = "silent"
    silent = False

    @property
    def has_silent_peers(self) -> bool:
        return self.silent


async def test_an_etcd_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network.etcd_settings
    monkeypatch.setattr(network, "etcd_settings", lambda c: attrs.evolve(made(c), start_time=0.1))
    config = Config(etcd_endpoints=("http://127.0.0.1:1",))
    with pytest.raises(DiscoveryUnavailable, match=r"etcd at http://127.0.0.1:1 \(ETCD_ENDPOINTS"):
        async with open_discovery(config):
            raise AssertionError("it opened")


async def test_memory_is_nobody_elses() -> None:
    async with open_discovery(Config(discovery_backend="mem")) as discovery:
        assert isinstance(discovery, MemoryDiscovery)


def test_every_setting_of_the_plane_arrives() -> None:
    given = {
        "tcp_rpc_host": "a", "tcp_rpc_port": 1, "tcp_response_host": "b", "tcp_response_port": 2,
        "tcp_max_message": 3000, "tcp_connect_timeout": 4.0, "tcp_request_timeout": 5.5,
        "tcp_pool_size": 6, "tcp_channel_buffer": 7, "tcp_host_idle": 8.0,
        "tcp_tls_cert": Path("c"), "tcp_tls_key": Path("k"), "tcp_tls_client_ca": Path("cca"),
        "tcp_tls_ca": Path("ca"), "tcp_tls_insecure": True, "tcp_tls_client_cert": Path("cc"),
        "tcp_tls_client_key": Path("ck"), "tcp_tls_server_name": "n",
        "tcp_tls_handshake_timeout": 9.0,
    }  # fmt: skip
    settings = tcp_settings(Config(**given))  # type: ignore[arg-type]  # a dict of many types
    arrived = {*attrs.asdict(settings, recurse=False).values()}
    arrived |= {*attrs.asdict(settings.tls, recurse=False).values()}
    assert {*given.values()} <= arrived
    assert tcp_settings(Config()) == TcpSettings()


def test_mux_takes_its_own_settings_and_what_both_planes_have() -> None:
    config = Config(
        tcp_rpc_host="a", mux_port=1, tcp_max_message=3000, tcp_connect_timeout=4.0,
        heartbeat=0.5, tcp_tls_ca=Path("ca"),
    )  # fmt: skip
    expected = MuxSettings(
        host="a", port=1, max_message=3000, connect_time=4.0, heartbeat=0.5,
        tls=tcp_settings(config).tls,
    )  # fmt: skip
    assert mux_settings(config) == expected
    assert mux_settings(Config()) == MuxSettings()


@pytest.mark.parametrize(
    ("mode", "names"), [("auto", ["mux", "tcp"]), ("off", ["tcp"]), ("only", ["mux"])]
)
async def test_the_planes_in_the_order_in_which_they_are_tried(
    mode: MuxMode, names: list[str]
) -> None:
    config = Config(mux=mode, tcp_response_host="127.0.0.1")
    async with open_planes(config, asks=True) as planes:
        assert list(planes) == names


def test_every_setting_of_etcd_arrives() -> None:
    given = {
        "etcd_endpoints": ("http://a:1",), "etcd_lease_ttl": 11, "etcd_username": "u",
        "etcd_password": "p", "etcd_ca": Path("ca"), "etcd_client_cert": Path("c"),
        "etcd_client_key": Path("k"),
    }  # fmt: skip
    settings = network.etcd_settings(Config(**given))  # type: ignore[arg-type]  # as above
    assert {*given.values()} <= {*attrs.asdict(settings, recurse=False).values()}


def test_every_router_mode_routes() -> None:
    assert {*ROUTERS} == {"round-robin", "random"}


async def test_without_silent_peers_nobody_is_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    before = trio.current_time()
    await wait_unreachable(Planes.of([MemoryPlane(), SilentPlane()]))
    assert trio.current_time() == before


async def test_a_silent_peer_is_waited_for_until_the_caller_has_enough(
    autojump_clock: trio.testing.MockClock,
) -> None:
    plane = SilentPlane()
    plane.silent = True
    with trio.move_on_after(1000) as scope:
        await wait_unreachable(Planes.of([MemoryPlane(), plane]))
    assert scope.cancelled_caught
