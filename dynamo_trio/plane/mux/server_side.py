"""The server side of the ``mux`` plane: a worker's listener and its clients."""

from __future__ import annotations

import logging
import secrets
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import CannotConnect, DynamoException, RemoteProtocolError, Unknown
from dynamo_trio.plane.abc import Acknowledgements
from dynamo_trio.plane.mux.complaints import Complaints
from dynamo_trio.plane.mux.server_link import ServerLink
from dynamo_trio.plane.net.accepting import accept_connections, open_listener, peer_of
from dynamo_trio.plane.net.hosts import listening_host
from dynamo_trio.plane.net.sockets import COMPLAIN_EVERY
from dynamo_trio.plane.net.tls import listener_context, shake_hands
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.plane.abc import AcceptedCall, Acceptor, Outbox, RequestHead
    from dynamo_trio.plane.mux.settings import MuxSettings

logger = logging.getLogger("dynamo_trio.plane.mux")

#: The variable that names the host is that of Dynamo's tcp plane.
_HOST_SETTING, _PORT_SETTING = "DYN_TCP_RPC_HOST", "DYN_TRIO_MUX_"
#: The part of the time for the farewell in which clients hear that the worker goes away.
GOODBYE_SHARE = 0.25
#: Clients that are known by name among those that broke off after a notice.
MAX_STRAYS: Final = 4096


@attrs.define(eq=False)
class MuxServerSide:
    """Its tasks live in ``nursery``, and end when that is cancelled.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """

    settings: MuxSettings
    nursery: trio.Nursery
    #: What tells this process from others.
    process: str = attrs.field(factory=partial(secrets.token_hex, 8), kw_only=True)
    _acceptors: dict[str, tuple[Acceptor, bool]] = attrs.field(factory=dict)
    #: Paths that get nothing new, in the order in which they were withdrawn.
    _withdrawn: dict[str, None] = attrs.field(factory=dict)
    #: Invariant: a link is in here from the client's HELLO until it is over.
    _links: set[ServerLink] = attrs.field(factory=set)
    #: What arrives in parts and is not whole: bytes by link, oldest first, and all together.
    _arrivals: dict[ServerLink, int] = attrs.field(factory=dict)
    _arriving: int = 0
    #: Processes that broke off after a notice, and neither acknowledged it nor said goodbye, until
    #: they come back, or something is restored. They may still send something at any time.
    _strays: dict[str, None] = attrs.field(factory=dict)
    #: Those that left after they had acknowledged, as their process or else their address.
    _left: set[str] = attrs.field(factory=set)
    #: There are some strays which are not known by name.
    _nameless_strays: bool = False
    #: Where it can be reached, once it listens.
    _address: HostPort | None = None
    _binding: trio.Lock = attrs.field(factory=trio.Lock)
    #: Where one waits for acknowledgements, and for last words to leave.
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _complaint: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))
    _complaints: Complaints = attrs.field(factory=Complaints)
    _refused: Seldom = attrs.field(factory=Seldom)
    _tls: ssl.SSLContext | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tls = listener_context(self.settings.tls)

    # --- what the plane offers ----------------------------------------------------------------

    @asynccontextmanager
    async def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AsyncIterator[str]:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.serve`."""
        if path in self._acceptors:
            raise ValueError(f"the path {path!r} is already served on this plane")
        self._acceptors[path] = acceptor, annotated
        self._serve_again(path)
        try:
            yield str(TcpTarget(await self._listen(), path))
        finally:
            del self._acceptors[path]

    def withdraw(self, *addresses: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.withdraw`, in one notice."""
        paths = [p for p in map(self._own, addresses) if p is not None and p not in self._withdrawn]
        if paths:
            self._withdrawn.update(dict.fromkeys(paths))
            for link in list(self._links):
                link.drain(paths)

    def restore(self, address: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.restore`."""
        path = self._own(address)
        if path is not None:
            self._serve_again(path)

    async def wait_acknowledged(self) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.wait_acknowledged`.

        A client that broke off without a word may come back, and then knows of nothing: this
        waits until it does (it is known again by its process) and has acknowledged, or until
        something is restored.
        """
        await trio.lowlevel.checkpoint()
        while not self._all_acknowledged:
            await self._changed.park()

    @property
    def _all_acknowledged(self) -> bool:
        if self._strays or self._nameless_strays:
            return False
        return all(link.has_acknowledged for link in self._links)

    @property
    def acknowledgements(self) -> Acknowledgements:
        """As :attr:`~dynamo_trio.plane.abc.RequestPlane.acknowledgements`."""
        waiting = [link.peer for link in self._links if not link.has_acknowledged]
        waiting += [f"process {process}, which broke off" for process in self._strays]
        waiting += ["a peer that broke off"] * self._nameless_strays
        away = len(self._strays) + self._nameless_strays + len(self._left)
        return Acknowledgements(len(self._links) + away, tuple(waiting))

    @property
    def connections(self) -> int:
        """Those that stand, from clients."""
        return len(self._links)

    @property
    def places(self) -> int:
        """As :attr:`~dynamo_trio.plane.abc.RequestPlane.places`."""
        return sum(link.client.places or 0 for link in self._links)

    async def say_farewell(self) -> None:
        """Give what is finished a moment to leave, then tell every client that this goes away."""
        now = trio.current_time()
        left = max(0.0, trio.current_effective_deadline() - now)
        limit = min(self.settings.farewell_time, left)
        end = now + limit
        with trio.move_on_at(end - limit * GOODBYE_SHARE):
            for link in list(self._links):
                while link.has_last_words:
                    await link.wait_sent()
        for link in list(self._links):
            link.leave("the worker is closed")
        with trio.move_on_at(end):
            while self._links:
                await self._changed.park()

    # --- connections --------------------------------------------------------------------------

    def _own(self, address: str) -> str | None:
        """The path in an address of ours."""
        try:
            return TcpTarget.parse(address).path
        except RemoteProtocolError:
            return None

    def _serve_again(self, path: str) -> None:
        if path in self._withdrawn:
            del self._withdrawn[path]
            for link in list(self._links):
                link.serve_again([path])
            if not self._withdrawn:
                self._strays.clear()
                self._left.clear()
                self._nameless_strays = False
            self._changed.unpark_all()

    async def _listen(self) -> HostPort:
        async with self._binding:
            if self._address is None:
                bind, tell = listening_host(self.settings.host, _HOST_SETTING)
                listener = await open_listener(
                    bind, self.settings.port, _PORT_SETTING, _HOST_SETTING
                )
                self._address = HostPort(tell, listener.socket.getsockname()[1])
                logger.info("mux connections are taken at %s", self._address)
                self.nursery.start_soon(
                    accept_connections, listener, self._serve_connection, self.nursery
                )
            return self._address

    async def _serve_connection(
        self, plain: trio.SocketStream, is_ours: Callable[[], None]
    ) -> None:
        stream: trio.abc.Stream = plain
        peer = peer_of(plain)
        if self._tls is not None:
            try:
                stream = await shake_hands(plain, self._tls, self.settings.tls.handshake_time)
            except OSError as exc:
                self._complaints.closed(peer, str(exc))
                return
        await self.serve_stream(stream, peer, is_ours)

    async def serve_stream(
        self, stream: trio.abc.Stream, peer: str, is_ours: Callable[[], None] = lambda: None
    ) -> None:
        """Serve a client over any stream, until its connection ends. Closes the stream.

        ``is_ours`` is called when the client has said hello.
        """

        def established(link: ServerLink) -> None:
            is_ours()
            self._enter(link)

        link = ServerLink(
            stream,
            self.settings,
            peer,
            accept=self._accept,
            on_established=established,
            on_acknowledged=self._changed.unpark_all,
            on_arriving=self._count_arriving,
            own_process=self.process,
            complaints=self._complaints,
        )
        try:
            await link.run()
        finally:
            self._leave(link)

    def _enter(self, link: ServerLink) -> None:
        if len(self._links) >= self.settings.max_peers:
            self._complaint.log(
                *(logger, logging.WARNING, "%s is turned away: %d peers are connected"),
                *(link.peer, len(self._links)),
            )
            link.leave("too many peers are connected")
            return
        for other in self._links:
            if link.process and other.process == link.process:
                other.superseded = True
        self._links.add(link)
        self._strays.pop(link.process, None)
        self._left.discard(link.process)
        if self._withdrawn:
            link.drain(list(self._withdrawn))

    def _leave(self, link: ServerLink) -> None:
        if link in self._links:
            self._links.discard(link)
            if not self._withdrawn:
                pass
            elif not link.has_acknowledged:
                self._note_stray(link)
            elif not link.superseded and len(self._left) < MAX_STRAYS:
                self._left.add(link.process or link.peer)
        self._changed.unpark_all()

    def _note_stray(self, link: ServerLink) -> None:
        """It has broken off before it acknowledged what was withdrawn."""
        logger.info(
            "%s (process %s) broke off before it acknowledged what is withdrawn",
            *(link.peer, link.process or "unknown"),
        )
        if link.process and len(self._strays) < MAX_STRAYS:
            self._strays[link.process] = None
        else:
            self._nameless_strays = True

    def _count_arriving(self, link: ServerLink) -> None:
        """All that arrives together is bounded: who has been at it for longest makes room."""
        before = self._arrivals.get(link, 0)
        if link.arriving:
            self._arrivals[link] = link.arriving
        else:
            self._arrivals.pop(link, None)
        self._arriving += link.arriving - before
        if self._arriving > self.settings.max_arriving:
            oldest = next(iter(self._arrivals))  # which comes back here, with nothing
            oldest.cut("its message has not arrived before there were too many")

    # --- requests -----------------------------------------------------------------------------

    def _accept(self, path: str, head: RequestHead, payload: bytes, outbox: Outbox) -> AcceptedCall:
        found = self._acceptors.get(path)
        if found is None:
            self._refused.log(
                logger, logging.INFO, "refused a request for %r, which is not served here", path
            )
            raise CannotConnect("the worker does not serve this endpoint")
        acceptor, annotated = found
        if not annotated:
            head = attrs.evolve(head, annotated=False)
        try:
            return acceptor.accept(head, payload, outbox)
        except DynamoException:
            raise
        except Exception as exc:
            logger.error("a request could not be taken on", exc_info=exc)
            raise Unknown("the worker failed to take the request on") from exc
