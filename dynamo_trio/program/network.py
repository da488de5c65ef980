"""From the configuration to the way to other processes: discovery and request planes."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.errors import DiscoveryUnavailable, StoreUnavailable
from dynamo_trio.plane import Planes
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.net.hosts import listening_host
from dynamo_trio.plane.tcp import TcpSettings, TlsSettings, open_tcp_plane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.config import Config
    from dynamo_trio.context import Cleanup
    from dynamo_trio.discovery import Discovery
    from dynamo_trio.events import EventPlane
    from dynamo_trio.plane import Acknowledgements, RequestPlane

logger = logging.getLogger("dynamo_trio")

#: Peers that the log names.
MOST_PEERS = 4


@asynccontextmanager
async def open_discovery(
    config: Config, close_scope: Cleanup = plain_cleanup
) -> AsyncIterator[Discovery]:
    """The store that the settings name. ``close_scope``, given a limit, is what its end runs in.

    Raises:
        StartupError: it cannot be reached, or refuses us.
    """
    async with AsyncExitStack() as stack:
        try:
            discovery = await stack.enter_async_context(_backend(config, close_scope))
        except StoreUnavailable as exc:
            raise DiscoveryUnavailable(f"discovery in {_place(config)}: {exc}") from exc
        logger.info("discovery is in %s", _place(config))
        yield discovery


def _backend(config: Config, close_scope: Cleanup) -> AbstractAsyncContextManager[Discovery]:
    match config.discovery_backend:
        case "file":
            settings = FileSettings(root=config.file_kv)
            return open_file_discovery(settings, close_scope=close_scope)
        case "etcd":
            return open_etcd_discovery(etcd_settings(config), close_scope=close_scope)
        case "mem":
            return _open_memory()


def _place(config: Config) -> str:
    """Where the store is, with the variable that says so."""
    if config.discovery_backend == "file":
        return f"{config.file_kv} (DYN_FILE_KV)"
    if config.discovery_backend == "mem":
        return "this process's memory"
    return f"etcd at {', '.join(config.etcd_endpoints)} (ETCD_ENDPOINTS)"


@asynccontextmanager
async def _open_memory() -> AsyncIterator[Discovery]:
    logger.warning("discovery backend mem: no other process sees this one, nor this one them")
    yield MemoryDiscovery()


def etcd_settings(config: Config) -> EtcdSettings:
    """The way to etcd."""
    return EtcdSettings(
        endpoints=config.etcd_endpoints,
        ttl=float(config.etcd_lease_ttl),
        username=config.etcd_username,
        password=config.etcd_password,
        ca=config.etcd_ca,
        cert=config.etcd_client_cert,
        key=config.etcd_client_key,
    )


@asynccontextmanager
async def open_planes(
    config: Config, close_scope: Cleanup = plain_cleanup, *, asks: bool = False
) -> AsyncIterator[Planes]:
    """The request planes that the settings name, the one that is preferred first.

    ``close_scope``, given a limit, is what their end runs in. ``asks``: the process is there to
    ask others, so what it cannot do as a client is an error now, and not at the first request.

    Raises:
        StartupError: a plane's settings cannot be used.
    """
    async with AsyncExitStack() as stack:
        planes: list[RequestPlane] = []
        if config.mux != "off":
            mux = open_mux_plane(mux_settings(config), close_scope=close_scope)
            planes.append(await stack.enter_async_context(mux))
        if config.mux != "only":
            opening = open_tcp_plane(tcp_settings(config), close_scope=close_scope)
            tcp = await stack.enter_async_context(opening)
            planes.append(tcp)
            if asks:
                await tcp.listen_for_answers()
        yield Planes.of(planes)


def open_events(config: Config) -> EventPlane:
    """The event plane that the settings name. Nothing of it listens until it is used.

    Raises:
        ConfigError: ``DYN_TCP_RPC_HOST`` is an interface without an address.
    """
    from dynamo_trio.events.sockets import ZmqEvents

    host, told = listening_host(config.tcp_rpc_host, "DYN_TCP_RPC_HOST")
    return ZmqEvents(_address(host), told)


def open_listening() -> EventPlane:
    """The event plane of a process that only listens: it needs no address of its own."""
    from dynamo_trio.events.sockets import ZmqEvents

    return ZmqEvents("127.0.0.1")


def _address(host: str) -> str:
    """The address of a name: libzmq does not bind to names. Asked once, as a process starts."""
    with suppress(OSError):  # whoever binds to it says what is wrong
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return host


def mux_settings(config: Config) -> MuxSettings:
    """The settings of the ``mux`` plane; what both planes have is set once."""
    return MuxSettings(
        host=config.tcp_rpc_host,
        port=config.mux_port,
        max_message=config.tcp_max_message,
        connect_time=config.tcp_connect_timeout,
        heartbeat=config.heartbeat,
        tls=_tls_settings(config),
    )


def tcp_settings(config: Config) -> TcpSettings:
    """The settings of the ``tcp`` plane."""
    return TcpSettings(
        rpc_host=config.tcp_rpc_host,
        rpc_port=config.tcp_rpc_port,
        response_host=config.tcp_response_host,
        response_port=config.tcp_response_port,
        max_message=config.tcp_max_message,
        connect_time=config.tcp_connect_timeout,
        ack_time=config.tcp_request_timeout,
        pool_size=config.tcp_pool_size,
        channel_buffer=config.tcp_channel_buffer,
        host_idle=config.tcp_host_idle,
        tls=_tls_settings(config),
    )


def _tls_settings(config: Config) -> TlsSettings:
    return TlsSettings(
        cert=config.tcp_tls_cert,
        key=config.tcp_tls_key,
        client_ca=config.tcp_tls_client_ca,
        ca=config.tcp_tls_ca,
        insecure=config.tcp_tls_insecure,
        client_cert=config.tcp_tls_client_cert,
        client_key=config.tcp_tls_client_key,
        server_name=config.tcp_tls_server_name,
        handshake_time=config.tcp_tls_handshake_timeout,
    )


async def wait_unreachable(planes: Planes, tell: Callable[[str], object] = logger.info) -> None:
    """Wait until no peer can route here any more, as far as they can say so.

    A peer on Dynamo's ``tcp`` plane cannot: once one has sent a request, this waits for ever,
    and the caller's limit, the grace period, is what ends it. ``tell`` is told in words what is
    waited for, and at the end that all have acknowledged.
    """
    if not planes.has_silent_peers:
        if planes.acknowledgements.waiting:
            tell(_awaited(planes.acknowledgements))
        await planes.wait_acknowledged()
    if planes.has_silent_peers:  # asked last: one may have come during the wait
        tell("the full grace period is kept: a peer is on tcp, and cannot acknowledge")
        await trio.sleep_forever()
    peers = planes.acknowledgements.peers
    said = f"{peers} of {peers} have acknowledged" if peers else "none is connected over mux"
    tell(f"peers: {said}, none on tcp")


def _awaited(these: Acknowledgements) -> str:
    some = ", ".join(these.waiting[:MOST_PEERS])
    more = ", ..." if len(these.waiting) > MOST_PEERS else ""
    return f"waiting for {len(these.waiting)} of {these.peers} peers ({some}{more})"
