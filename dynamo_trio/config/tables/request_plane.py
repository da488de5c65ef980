"""Settings of the request plane, and of the events beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from dynamo_trio.config.option import Group, option, optional
from dynamo_trio.config.rules import Boolean, Choice, FilePath, Integer, Seconds, Text

if TYPE_CHECKING:
    from pathlib import Path

RequestPlaneKind = Literal["tcp"]
EventPlaneKind = Literal["zmq"]
CodecName = Literal["msgpack", "json"]
MuxMode = Literal["auto", "off", "only"]

_PEM = FilePath(metavar="FILE.pem")


@attrs.frozen(kw_only=True, slots=False)
class RequestPlaneTable:
    """How requests travel from frontends to workers, and their answers back."""

    request_plane: RequestPlaneKind = option(
        "tcp",
        Choice[RequestPlaneKind](
            ("tcp",),
            refused={
                "nats": "NATS is not offered; the request plane is tcp",
                "http": "HTTP is not offered as a request plane; it is tcp",
            },
        ),
        group=Group.REQUEST_PLANE,
        env="DYN_REQUEST_PLANE",
        help="How requests travel to and from Dynamo's own processes; see DYN_TRIO_MUX for ours.",
    )
    mux: MuxMode = option(
        "auto",
        Choice[MuxMode](("auto", "off", "only")),
        group=Group.REQUEST_PLANE,
        env="DYN_TRIO_MUX",
        help="The plane of our own beside tcp, one connection for all requests: auto takes it where"
        " the other side has it too, only speaks nothing else.",
    )
    mux_port: int = option(
        0,
        Integer(0, 65535, metavar="PORT"),
        group=Group.SERVE,
        env="DYN_TRIO_MUX_PORT",
        help="Port on which a worker listens for mux connections, at the same address as for other"
        " requests; 0 takes any free one.",
    )
    heartbeat: float = option(
        1.0,
        Seconds(minimum=0.05),
        group=Group.REQUEST_PLANE,
        env="DYN_TRIO_HEARTBEAT_SECS",
        help="Time without a word on a mux connection after which the worker is asked whether it"
        " lives. After twice that time it gets no new requests until it speaks again.",
    )
    event_plane: EventPlaneKind = option(
        "zmq",
        Choice[EventPlaneKind](
            ("zmq",), refused={"nats": "NATS is not offered; the event plane is zmq"}
        ),
        group=Group.REQUEST_PLANE,
        env="DYN_EVENT_PLANE",
        help="How the events of workers travel: what is in their KV caches, and their load.",
    )
    kv_events: bool = option(
        True,
        Boolean(),
        group=Group.SERVE,
        env="DYN_TRIO_KV_EVENTS",
        help="A worker tells KV routers what is in its KV cache, if its engine knows.",
    )
    request_plane_codec: CodecName = option(
        "msgpack",
        Choice[CodecName](("msgpack", "json")),
        group=Group.REQUEST_PLANE,
        env="DYN_REQUEST_PLANE_CODEC",
        help="In which a worker wants its requests, and answers them.",
    )
    tcp_rpc_host: str | None = optional(
        Text(metavar="ADDRESS"),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_RPC_HOST",
        help="Address on which a worker listens for requests, and which it tells others; without"
        " it, the one by which this machine reaches others.",
    )
    tcp_rpc_port: int = option(
        0,
        Integer(0, 65535, metavar="PORT"),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_RPC_PORT",
        help="Port on which a worker listens for requests; 0 takes any free one.",
    )
    tcp_response_host: str | None = optional(
        Text(metavar="INTERFACE"),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_RESPONSE_STREAM_HOST",
        help="Network interface, or address, on which a frontend listens for answers; without it,"
        " the one by which this machine reaches others.",
    )
    tcp_response_port: int = option(
        0,
        Integer(0, 65535, metavar="PORT"),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_RESPONSE_STREAM_PORT",
        help="Port on which a frontend listens for answers; 0 takes any free one.",
    )
    tcp_max_message: int = option(
        32 * 1024 * 1024,
        Integer(1024, 2**32 - 1, unit="bytes", metavar="BYTES"),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_MAX_MESSAGE_SIZE",
        help="Largest message; a larger one is refused.",
    )
    tcp_connect_timeout: float = option(
        5.0,
        Seconds(),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_CONNECT_TIMEOUT",
        help="Time for a connection to be made.",
    )
    tcp_request_timeout: float = option(
        5.0,
        Seconds(),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_REQUEST_TIMEOUT",
        help="Time for a worker to say whether it takes a request.",
    )
    tcp_pool_size: int = option(
        100,
        Integer(1, 65535),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_POOL_SIZE",
        help="Connections to one worker at most.",
    )
    tcp_channel_buffer: int = option(
        1024,
        Integer(1, 1_000_000),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_CHANNEL_BUFFER",
        help="Requests on one connection that wait for the worker's word; more open another one.",
    )
    tcp_host_idle: float = option(
        300.0,
        Seconds(),
        group=Group.REQUEST_PLANE,
        env="DYN_TCP_HOST_IDLE_TTL_SECS",
        help="Time after which the unused connections to a worker are closed.",
    )
    inhibited_duration: float = option(
        5.0,
        Seconds(),
        group=Group.REQUEST_PLANE,
        env="DYN_RUNTIME_INHIBITED_DURATION_SECS",
        help="Time for which a worker that could not be reached gets no requests, as long as there"
        " are others; 0 sends it its share at once.",
    )

    # --- TLS ---------------------------------------------------------------------

    tcp_tls_cert: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_CERT_PATH",
        help="Certificate of this process's listening ports, which then speak TLS.",
    )
    tcp_tls_key: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_KEY_PATH",
        help="Private key of that certificate.",
    )
    tcp_tls_client_ca: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_CLIENT_CA_CERT_PATH",
        help="Certificates that whoever connects is checked against (mutual TLS).",
    )
    tcp_tls_ca: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_CA_CERT_PATH",
        help="Certificates that the ports of others are checked against; connections then speak"
        " TLS.",
    )
    tcp_tls_insecure: bool = option(
        False,
        Boolean(),
        group=Group.TLS,
        env="DYN_TCP_TLS_INSECURE",
        help="Speak TLS to others without checking who they are.",
    )
    tcp_tls_client_cert: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_CLIENT_CERT_PATH",
        help="Certificate that this process shows when it connects (mutual TLS).",
    )
    tcp_tls_client_key: Path | None = optional(
        _PEM,
        group=Group.TLS,
        env="DYN_TCP_TLS_CLIENT_KEY_PATH",
        help="Private key of that certificate.",
    )
    tcp_tls_server_name: str | None = optional(
        Text(metavar="NAME"),
        group=Group.TLS,
        env="DYN_TCP_TLS_SERVER_NAME",
        help="Name that the certificates of others must carry; without it, the address.",
    )
    tcp_tls_handshake_timeout: float = option(
        3.0,
        Seconds(),
        group=Group.TLS,
        env="DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS",
        flag="--tcp-tls-handshake-timeout",
        help="Time for a TLS handshake.",
    )
