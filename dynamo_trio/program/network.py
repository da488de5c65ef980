"""From the configuration to the way to other processes: discovery and request planes."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from dynamo_trio.discovery import MemoryDiscovery
from dynamo_trio.discovery.etcd import EtcdSettings, open_etcd_discovery
from dynamo_trio.discovery.file import FileSettings, open_file_discovery
from dynamo_trio.errors import DiscoveryUnavailable, StoreUnavailable
from dynamo_trio.plane.tcp import TcpSettings, TlsSettings, open_tcp_plane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.config import Config
    from dynamo_trio.discovery import Discovery
    from dynamo_trio.plane import RequestPlane
    from dynamo_trio.plane.tcp import TcpPlane

logger = logging.getLogger("dynamo_trio")


@asynccontextmanager
async def open_discovery(config: Config) -> AsyncIterator[Discovery]:
    """The store that the settings name.

    Raises:
        StartupError: it cannot be reached, or refuses us.
    """
    async with AsyncExitStack() as stack:
        try:
            discovery = await stack.enter_async_context(_backend(config))
        except StoreUnavailable as exc:
            raise DiscoveryUnavailable(f"discovery in {_place(config)}: {exc}") from exc
        logger.info("discovery is in %s", _place(config))
        yield discovery


def _backend(config: Config) -> AbstractAsyncContextManager[Discovery]:
    match config.discovery_backend:
        case "file":
            return open_file_discovery(FileSettings(root=config.file_kv))
        case "etcd":
            return open_etcd_discovery(etcd_settings(config))
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


def open_plane(config: Config) -> AbstractAsyncContextManager[TcpPlane]:
    """The request plane that the settings name."""
    return open_tcp_plane(tcp_settings(config))


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


async def wait_unreachable(planes: Iterable[RequestPlane]) -> None:
    """Wait until no peer can route here any more, as far as they can say so.

    A peer on Dynamo's ``tcp`` plane cannot: once one has sent a request, this waits for ever,
    and the caller's limit, the grace period, is what ends it.
    """
    await trio.lowlevel.checkpoint()
    if any(plane.has_silent_peers for plane in planes):
        await trio.sleep_forever()
