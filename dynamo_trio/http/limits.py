"""The limits of the HTTP server: what one client may hold, and for how long."""

from __future__ import annotations

import resource

import attrs

KIB = 1024
MIB = 1024 * KIB
#: File descriptors that stay free for everything that no client's connection brings about:
#: listeners, the store, the connections to workers over which requests go out.
RESERVED_DESCRIPTORS = 128


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Seconds, bytes and counts. The defaults are those of the ``DYN_TRIO_HTTP_*`` variables."""

    #: Connections open at once. At the cap the longest idle one is closed for a newcomer, or
    #: else the oldest whose request is still incomplete, or else the one whose client has for
    #: longest taken nothing, or else the longest idle realtime session; while there is none of
    #: these, newcomers come into the reserve, and then wait in the backlog.
    max_connections: int = 4096
    #: Connections beyond those, which are asked nothing but how the process is; all else is refused
    #: on them. And how long each of them may take for everything.
    reserved_connections: int = 16
    reserved_time: float = 2.0
    #: File descriptors that a connection and its request need together: its own, and on the tcp
    #: plane the one by which the worker answers.
    descriptors: int = 1
    #: Connections that the kernel holds until they are accepted.
    backlog: int = 1024
    #: From the first byte of a request until its head is complete (HTTP/1.1).
    head_time: float = 10.0
    head_bytes: int = 32 * KIB
    #: For a TLS handshake.
    handshake_time: float = 10.0
    #: From the end of the head until the end of the body.
    body_time: float = 60.0
    body_bytes: int = 192 * MIB
    #: Of all bodies that are being read, but for the first ``body_free`` bytes of each.
    body_total: int = 1024 * MIB
    body_free: int = 64 * KIB
    #: How long a connection may stay open without a request.
    idle_time: float = 75.0
    #: How long a client may take nothing of what is sent before it counts as gone.
    write_time: float = 30.0
    #: At the cap, a client that has taken nothing for so long makes room for a newcomer.
    stall_time: float = 10.0
    #: At the cap, a realtime session that has been idle for so long is ended for a newcomer.
    quiet_time: float = 5.0
    #: A WebSocket's client that was silent for so long is asked whether it is there; it is gone if
    #: it says nothing for ``write_time`` then.
    ping_time: float = 30.0
    #: From a cut until the farewell has left, or the connection is aborted. A little less than
    #: the second that a stop allows: it is not meant to find anybody left.
    farewell_time: float = 0.9
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

    def hasty(self) -> HttpLimits:
        """Those of a connection in the reserve."""
        names = ("head_time", "handshake_time", "body_time", "idle_time", "write_time")
        times = {name: min(self.reserved_time, getattr(self, name)) for name in names}
        return attrs.evolve(self, **times)

    def connection_cap(self) -> int:
        """``max_connections``, or what this process's descriptor limit leaves room for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        room = (soft - RESERVED_DESCRIPTORS - self.reserved_connections) // self.descriptors
        return max(1, min(self.max_connections, room))
