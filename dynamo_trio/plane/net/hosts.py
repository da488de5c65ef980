"""Which address of this machine a listener takes, and tells to others."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

from dynamo_trio.errors import ConfigError

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
#: Never reached: connecting a datagram socket only asks the kernel for its route.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def listening_host(host: str | None, setting: str) -> tuple[str, str]:
    """Where to bind, and what to tell others; ``host`` may be an interface, an address or a name.

    None: this machine's routable address. An unspecified address (``0.0.0.0``) is bound as it
    is, and others are told the routable one.

    Raises:
        ConfigError: an interface without an address; ``setting`` is the variable to name.
    """
    if host is None:
        address = routable_address()
        return address, address
    if host in (name for _, name in socket.if_nameindex()):
        address = interface_address(host, setting)
        return address, address
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return host, routable_address()
    return host, host


def routable_address() -> str:
    """The address of this machine from which others would be reached; else the loopback."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_address(name: str, setting: str) -> str:
    """An interface's address, IPv4 first.

    Raises:
        ConfigError: it has none; ``setting`` is the variable to name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            request = struct.pack("40s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.inet_ntop(socket.AF_INET, answer[20:24])
    address = _ipv6_address(name)
    if address is None:
        raise ConfigError(f"{setting}={name}: the interface has no address")
    return address


def _ipv6_address(name: str) -> str | None:
    with suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope in ("00", "10"):  # global, or the loopback's own
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None
