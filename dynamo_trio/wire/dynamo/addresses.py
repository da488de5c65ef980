"""Addresses as Dynamo writes them: no brackets around IPv6, a path behind a slash."""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from dynamo_trio.errors import RemoteProtocolError

_MAX_PORT = 65535
_MAX_LENGTH = 512


@frozen
class HostPort:
    """Where to connect. ``host`` has no brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Read ``HOST:PORT``. The *last* colon counts, since ``::1:8133`` is written so too.

        Raises:
            RemoteProtocolError: no host, or no port from 1 to 65535.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or len(text) > _MAX_LENGTH or not _is_port(port):
            raise RemoteProtocolError(f"no address: {text[:_MAX_LENGTH]!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _is_port(text: str) -> bool:
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PORT))
    return digits and 0 < int(text) <= _MAX_PORT


@frozen
class TcpTarget:
    """What an Endpoint record's ``transport.tcp`` says: where, and the path for the frame."""

    address: HostPort
    path: str

    @classmethod
    @lru_cache(maxsize=1024)  # asked for each instance with each request
    def parse(cls, text: str) -> TcpTarget:
        """Read ``HOST:PORT/PATH``, split at the first slash.

        Raises:
            RemoteProtocolError: no such address, or no path.
        """
        address, slash, path = text.partition("/")
        if not slash or not path:
            raise RemoteProtocolError(f"no path behind the address: {text[:_MAX_LENGTH]!r}")
        return cls(HostPort.parse(address), path)

    def __str__(self) -> str:
        return f"{self.address}/{self.path}"
