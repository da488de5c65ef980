"""What may be set on the ``tcp`` plane. Seconds, bytes and counts; names are Dynamo's."""

from __future__ import annotations

import attrs

from dynamo_trio.plane.net.tls import TlsSettings
from dynamo_trio.wire.dynamo.two_part import MAX_MESSAGE


@attrs.frozen(kw_only=True)
class TcpSettings:
    """The ``tcp`` plane of one process. Where no name stands, Dynamo has none."""

    # --- where it listens ---

    #: ``DYN_TCP_RPC_HOST``: where requests arrive, and what discovery says. None: this machine's
    #: routable address.
    rpc_host: str | None = None
    #: ``DYN_TCP_RPC_PORT``. 0: any free one.
    rpc_port: int = 0
    #: ``DYN_TCP_RESPONSE_STREAM_HOST``: where answers arrive; the name of an interface, or an
    #: address. None: this machine's routable address.
    response_host: str | None = None
    #: ``DYN_TCP_RESPONSE_STREAM_PORT``.
    response_port: int = 0

    # --- both sides ---

    #: ``DYN_TCP_MAX_MESSAGE_SIZE``: bytes of the largest frame.
    max_message: int = MAX_MESSAGE
    #: ``DYN_TCP_CONNECT_TIMEOUT``: until a connection that is dialled stands.
    connect_time: float = 5.0
    #: From the first byte of a frame until its last, and for an acknowledgement to be taken.
    frame_time: float = 60.0
    #: How long a peer may take nothing of what is sent before it counts as gone.
    stall_time: float = 300.0
    tls: TlsSettings = attrs.field(factory=TlsSettings)

    # --- as a client ---

    #: ``DYN_TCP_REQUEST_TIMEOUT``: until a request is acknowledged.
    ack_time: float = 5.0
    #: ``DYN_TCP_POOL_SIZE``: connections to one worker.
    pool_size: int = 100
    #: ``DYN_TCP_CHANNEL_BUFFER``: requests on one connection that wait for acknowledgement.
    channel_buffer: int = 1024
    #: ``DYN_TCP_HOST_IDLE_TTL_SECS``: until the idle connections to a worker are closed.
    host_idle: float = 300.0
    #: From a worker's call until it has said which request it answers.
    handshake_time: float = 10.0

    # --- as a worker ---

    #: Bytes of one answer that may wait to be sent before its handler is held back ...
    high_water: int = 64 * 1024
    #: ... until so few are left.
    low_water: int = 16 * 1024
    #: Behind the end of an answer: until its client closes, or the worker does.
    linger_time: float = 10.0
    #: When the plane is left: how long what is finished may take to leave.
    farewell_time: float = 1.0
