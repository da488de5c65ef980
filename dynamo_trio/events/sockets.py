"""The event plane over ZeroMQ, as Dynamo has it (``DYN_EVENT_PLANE=zmq``).

Theory of operation
-------------------
libzmq does its I/O in a thread of its own and talks to ours through queues. Sending puts a
message into the queue of each subscriber; where that queue is full, this subscriber does not
get the message. So publishing never waits, and what a slow or frozen subscriber can cost is
one full queue. Subscribers see what they have missed by the numbers of the messages.

Receiving with ``NOBLOCK`` says :exc:`zmq.Again` when the queue is empty. For the wait there
is a file descriptor (``zmq.FD``) that becomes readable when libzmq has news *for us*, of any
kind, and it is *edge-triggered*: what happened before the last call into the socket does not
show any more. Hence the one safe order: receive until ``Again``, then wait for the descriptor,
then receive again, and call nothing else on the socket in between.

A publisher that breaks ZeroMQ's rules, or sends a frame that is too long, is cut by libzmq and
not connected to again; the socket then stays silent.

The context, and with it the I/O thread, is made once and never terminated: termination waits
for that thread, and a process that leaves must not. Closing a socket with ``LINGER`` 0 does
not wait; what is in its queues is dropped.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import attrs
import trio
import zmq

from dynamo_trio.errors import PortInUse
from dynamo_trio.events.abc import EventPlane

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    Socket = zmq.Socket[bytes]

#: Messages that are received in a row before others may run.
BATCH = 64


@attrs.frozen(kw_only=True)
class SocketSettings:
    """What the sockets of one process may cost."""

    #: Messages that are kept for each subscriber; further ones are not sent to it.
    send_queue: int = 1000
    #: Messages that wait here for us, of each publisher.
    receive_queue: int = 64
    #: Bytes of one frame; a publisher that sends a longer one is cut.
    max_frame: int = 4 * 1024 * 1024
    #: Seconds after which a peer that does not answer pings is cut.
    silence: float = 30.0
    #: Seconds that a peer has for ZeroMQ's handshake.
    handshake_time: float = 10.0
    #: Seconds between attempts to connect, at first and at most.
    reconnect: tuple[float, float] = (0.1, 5.0)


@cache
def _context() -> zmq.Context[Socket]:
    context: zmq.Context[Socket] = zmq.Context()
    # A file descriptor per connection is the limit that counts, and the process has its own.
    context.set(zmq.MAX_SOCKETS, min(65_535, context.get(zmq.SOCKET_LIMIT)))
    return context


@contextmanager
def _socket(kind: int, address: str, settings: SocketSettings) -> Iterator[Socket]:
    socket = _context().socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in address.removeprefix("tcp://").rpartition(":")[0])
        socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(settings.handshake_time))
        socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(settings.silence / 2))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(settings.silence))
        yield socket
    finally:
        socket.close(linger=0)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# --- publishing ---------------------------------------------------------------------------


@attrs.frozen(eq=False)
class ZmqOutlet:
    """A bound PUB socket."""

    address: str
    _socket: Socket

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message to every subscriber whose queue has room. Never blocks."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)


@contextmanager
def open_outlet(host: str, told: str, settings: SocketSettings) -> Iterator[ZmqOutlet]:
    """Listen on any free port of ``host``; ``told`` is the host by which others reach it.

    Raises:
        PortInUse: this machine does not have that address, or no port is free.
    """
    address = f"tcp://{_authority(host, '*')}"
    with _socket(zmq.PUB, address, settings) as socket:
        socket.setsockopt(zmq.SNDHWM, settings.send_queue)
        # From subscribers come subscriptions only.
        socket.setsockopt(zmq.MAXMSGSIZE, 1024)
        # Whoever does not speak ZMTP 3 is turned away then, though nobody is authenticated.
        # Otherwise any stranger counts as a subscriber of ZMTP 1, and libzmq aborts the process
        # if it meets the stranger's first bytes while the socket is being closed.
        socket.setsockopt(zmq.ZAP_DOMAIN, b"dynamo")
        try:
            socket.bind(address)
        except zmq.ZMQError as exc:
            raise PortInUse(f"events cannot be published on {host}: {exc}") from exc
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        yield ZmqOutlet(f"tcp://{_authority(told, port)}", socket)


def _authority(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- subscribing --------------------------------------------------------------------------


@attrs.define(eq=False)
class ZmqInlet:
    """A SUB socket that is connected, sooner or later, to one publisher. One reader."""

    _socket: Socket
    _fd: int
    _received: int = 0

    async def receive(self) -> list[bytes]:
        """The next message, as its frames."""
        self._received += 1
        if self._received % BATCH == 0:
            await trio.lowlevel.checkpoint()
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await trio.lowlevel.wait_readable(self._fd)


@contextmanager
def open_inlet(address: str, topic: str, settings: SocketSettings) -> Iterator[ZmqInlet]:
    """Connect to ``address``, again and again if need be, for messages that begin with ``topic``.

    Raises:
        ValueError: no address that ZeroMQ can connect to.
    """
    with _socket(zmq.SUB, address, settings) as socket:
        socket.setsockopt(zmq.RCVHWM, settings.receive_queue)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_frame)
        first, most = settings.reconnect
        socket.setsockopt(zmq.RECONNECT_IVL, _ms(first))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(most))
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int), "libzmq says so"
        if not address.startswith("tcp://"):
            # Dynamo has no other, and ipc:// or inproc:// would reach into this machine.
            raise ValueError(f"no address of events: {address[:256]!r}")
        try:
            socket.connect(address)
        except zmq.ZMQError as exc:
            raise ValueError(f"no address of events: {address[:256]!r}: {exc}") from exc
        yield ZmqInlet(socket, fd)


# --- the plane ----------------------------------------------------------------------------


@attrs.frozen
class ZmqEvents(EventPlane):
    """Publishes on any free port of ``host``, an address of this machine.

    ``told`` is the host by which others reach it: ``host`` itself, unless you say otherwise.
    Whoever only listens has no port.
    """

    host: str
    told: str = attrs.Factory(lambda self: self.host, takes_self=True)
    settings: SocketSettings = SocketSettings()

    def open_outlet(self) -> AbstractContextManager[ZmqOutlet]:
        return open_outlet(self.host, self.told, self.settings)

    def open_inlet(self, address: str, topic: str) -> AbstractContextManager[ZmqInlet]:
        return open_inlet(address, topic, self.settings)
