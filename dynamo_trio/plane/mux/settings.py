"""What may be set on the ``mux`` plane. Seconds, bytes and counts."""

from __future__ import annotations

import attrs

from dynamo_trio.plane.net.tls import TlsSettings

#: As on Dynamo's tcp plane, so that a request that fits one plane fits the other.
MAX_MESSAGE = 32 * 2**20


@attrs.frozen(kw_only=True)
class MuxSettings:
    """The ``mux`` plane of one process."""

    # --- where it listens ---

    #: ``DYN_TCP_RPC_HOST``: where peers connect, and what discovery says. None: this machine's
    #: routable address.
    host: str | None = None
    #: ``DYN_TRIO_MUX_PORT``. 0: any free one.
    port: int = 0

    # --- both sides ---

    #: ``DYN_TCP_MAX_MESSAGE_SIZE``: bytes of the largest payload.
    max_message: int = MAX_MESSAGE
    #: From a connection until the peer has said which protocol it speaks.
    handshake_time: float = 10.0
    #: From the first byte of a frame until its last.
    frame_time: float = 60.0
    #: How long a peer may take nothing of what is sent before it counts as gone; to a worker
    #: also how long it may say nothing, although it is asked, and how long it may give a stream
    #: no credit that needs some, before that is ended.
    stall_time: float = 300.0
    #: Bytes on a connection that may wait to be sent before who produces them is held back ...
    high_water: int = 256 * 1024
    #: ... until so few are left.
    low_water: int = 64 * 1024
    #: Bytes that the streams of one connection may have been given and not have consumed: at a
    #: client answers, at a worker requests and what streams in. Items below 4 KiB do not count.
    max_unread: int = 512 * 2**20
    tls: TlsSettings = attrs.field(factory=TlsSettings)

    # --- as a client ---

    #: ``DYN_TRIO_HEARTBEAT_SECS``: silence after which a worker is asked whether it is there. After
    #: two of them it gets nothing new.
    heartbeat: float = 1.0
    #: Silence after which the streams that have begun are given up, and the connection with them.
    patience: float = 10.0
    #: ``DYN_TCP_CONNECT_TIMEOUT``: until a connection that is dialled stands.
    connect_time: float = 5.0
    #: Until a worker that could not be connected is tried again: at first, and at most.
    retry_time: float = 0.25
    max_retry_time: float = 10.0
    #: Until a connection is closed on which nothing runs, to a worker that is not in discovery.
    idle_time: float = 10.0

    # --- as a worker ---

    #: Requests of one peer that may run at once.
    max_streams: int = 4096
    #: Peers that may be connected at once.
    max_peers: int = 1024
    #: Bytes of messages that have not arrived whole, of all peers together.
    max_arriving: int = 256 * 2**20
    #: When the plane is left: how long what is finished may take to leave.
    farewell_time: float = 1.0
