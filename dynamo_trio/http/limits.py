"""The limits of the HTTP server: what one client may hold, and for how long."""

from __future__ import annotations

import resource

import attrs

KIB = 1024
MIB = 1024 * KIB
#: File descriptors that stay free for everything that is not a client's connection.
RESERVED_DESCRIPTORS = 64


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Seconds, bytes and counts. The defaults are those of the ``DYN_TRIO_HTTP_*`` variables."""

    #: Connections open at once. At the cap the longest idle one is closed for a newcomer, or
    #: else the oldest whose request is still incomplete; while there is neither, newcomers
    #: wait in the backlog.
    max_connections: int = 4096
    #: Connections that the kernel holds until they are accepted.
    backlog: int = 1024
    #: From the first byte of a request until its head is complete (HTTP/1.1).
    head_time: float = 10.0
    head_bytes: int = 32 * KIB
    #: From the end of the head until the end of the body.
    body_time: float = 60.0
    body_bytes: int = 192 * MIB
    #: How long a connection may stay open without a request.
    idle_time: float = 75.0
    #: How long a client may take nothing of what is sent before it counts as gone.
    write_time: float = 30.0
    #: From a cut until the farewell has left, or the connection is aborted.
    farewell_time: float = 1.0
    #: How long what the client still sends is read away behind an early answer, so that
    #: a reset does not overtake the answer.
    linger_time: float = 1.0
    #: Bytes that a client may send ahead of the answer that it is being given.
    read_ahead: int = 64 * KIB
    #: A response that holds this many unsent bytes asks its source to pause ...
    high_water: int = 64 * KIB
    #: ... until this few are left ...
    low_water: int = 16 * KIB
    #: ... and with this many it is cut: the source ignored the credit that it had.
    max_unsent: int = MIB
    #: Bytes of one HTTP/2 stream that may lie in the protocol engine, behind the client's window.
    h2_unsent: int = 64 * KIB
    #: Requests at once on one HTTP/2 connection.
    h2_streams: int = 256
    ws_message_bytes: int = 16 * MIB

    def connection_cap(self) -> int:
        """``max_connections``, or what this process's descriptor limit leaves room for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        return max(1, min(self.max_connections, soft - RESERVED_DESCRIPTORS))
