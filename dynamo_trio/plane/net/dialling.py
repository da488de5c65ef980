"""Connecting to others: what the planes' dialers share."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import trio

from dynamo_trio.plane.net.sockets import NO_ROOM, RETRY_ACCEPT, keep_alive
from dynamo_trio.plane.net.tls import greet

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from dynamo_trio.plane.net.tls import TlsSettings
    from dynamo_trio.wire.dynamo.addresses import HostPort

#: Connections to one address that may be under way at once. Peers name addresses, also such as
#: never answer, and must not take all descriptors by it.
MAX_DIALS = 64
#: Threads in which names are looked up. A name comes from a peer, and its server may hang: the
#: threads in which everything else reads its files must not wait for it.
LOOKUPS = 8


class DialSettings(Protocol):
    """What a plane's settings say of dialling."""

    @property
    def connect_time(self) -> float:
        """Seconds until a connection that is dialled stands."""

    @property
    def tls(self) -> TlsSettings:
        """Whom to trust, and who this process is."""


async def dial(
    address: HostPort, context: ssl.SSLContext | None, settings: DialSettings
) -> trio.abc.Stream:
    """Connect, within ``connect_time``, and shake hands if there is a context.

    Raises:
        OSError: nobody there, not in time, or no handshake.
    """
    with trio.move_on_after(settings.connect_time) as scope:
        async with _turn(address):
            stream = await _connect_once_there_is_room(address, settings.connect_time)
    if scope.cancelled_caught:
        raise ConnectionError(f"not connected within {settings.connect_time:g} s")
    keep_alive(stream)
    if context is None:
        return stream
    name = settings.tls.server_name or address.host
    try:
        return await greet(stream, context, name, settings.tls.handshake_time)
    except (ValueError, TypeError) as exc:  # no certificate could name such a host
        stream.socket.close()
        raise ConnectionError(f"no certificate names {name[:100]!r}") from exc
    except BaseException:
        stream.socket.close()
        raise


_dialled: trio.lowlevel.RunVar[dict[HostPort, trio.CapacityLimiter]] = trio.lowlevel.RunVar(
    "dialled"
)


@asynccontextmanager
async def _turn(address: HostPort) -> AsyncIterator[None]:
    """While the block runs this is one of the few that dial the address."""
    try:
        dialled = _dialled.get()
    except LookupError:
        _dialled.set(dialled := {})
    limiter = dialled.setdefault(address, trio.CapacityLimiter(MAX_DIALS))
    try:
        async with limiter:
            yield
    finally:
        use = limiter.statistics()
        if not use.borrowed_tokens and not use.tasks_waiting and dialled.get(address) is limiter:
            del dialled[address]


async def _connect_once_there_is_room(address: HostPort, limit: float) -> trio.SocketStream:
    """A crowd may have taken all descriptors; whoever is dialled has no other way to hear of us."""
    while True:
        try:
            return await _connect(address, limit)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
        await trio.sleep(RETRY_ACCEPT)


async def _connect(address: HostPort, limit: float) -> trio.SocketStream:
    numeric = _family(address.host)
    if numeric is not None:  # as nearly every address is: no look-up, no choice
        return await _connect_to(numeric, (address.host, address.port), "")
    places = await _look_up(address)
    for family, place in places[:-1]:
        with trio.move_on_after(limit / len(places)), suppress(OSError):
            return await _connect_to(family, place, f" at {place[0]}")
    family, place = places[-1]
    return await _connect_to(family, place, f" at {place[0]}")


async def _connect_to(family: int, place: Any, where: str) -> trio.SocketStream:
    """``where``: what the error says of the place, if that is not known from the address."""
    raw = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await raw.connect(place)
    except OSError as exc:
        raw.close()
        raise OSError(exc.errno, os.strerror(exc.errno or 0) + where) from exc
    except BaseException:
        raw.close()
        raise
    return trio.SocketStream(raw)


_lookups: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("lookups")


async def _look_up(address: HostPort) -> list[tuple[int, Any]]:
    """The addresses behind a name, each with its family; there is at least one."""
    try:
        limiter = _lookups.get()
    except LookupError:
        _lookups.set(limiter := trio.CapacityLimiter(LOOKUPS))
    ask = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        found = await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=limiter)
    except ValueError as exc:  # no name could look like that; a UnicodeError is one too
        raise ConnectionError(f"no host is called {address.host[:100]!r}") from exc
    return [(family, place) for family, _, _, _, place in found]


def _family(host: str) -> socket.AddressFamily | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None
