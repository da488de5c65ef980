"""Who calls the status server: somebody on this machine, or a page in somebody's browser?

A page cannot say who it is not. It can have its own name resolve to an address of this machine
(DNS rebinding), and its requests then come from here; but they carry that name as their Host.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Scope


def is_loopback(address: str) -> bool:
    """Is it an address of this machine that no other reaches?"""
    ip = _address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip is not None and (mapped or ip).is_loopback


def is_from_here(scope: Scope) -> bool:
    """Does the request come from this machine?"""
    client = scope.get("client")
    return client is not None and is_loopback(client[0])


def has_origin(scope: Scope) -> bool:
    """Does a web page send it? Then most browsers say which."""
    return any(name == b"origin" for name, _ in scope["headers"])


def foreign_host(scope: Scope, bound: str) -> str | None:
    """The name that the client took us for, if it may be anybody's: neither an address,
    nor ``localhost``, nor the host that is ``bound``. None also without a name.
    """
    names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return next((name for name in names if not _is_ours(_host(name), bound)), None)


def _is_ours(host: str, bound: str) -> bool:
    name = host.lower().removesuffix(".")
    return _address(name) is not None or name in ("localhost", bound.lower())


def _host(authority: str) -> str:
    """Without the port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(text.partition("%")[0])
    return None
