"""The planes of one process, and which of them carries a request.

Theory of operation
-------------------
An instance says on which planes it can be reached; this process speaks some. As a client it
takes the first of its own that the instance offers too, and goes on to the next one only
where nothing was sent (:exc:`~dynamo_trio.errors.NotConnected`). Whatever else goes wrong is
the worker's word, or its silence: another plane would not change it. For the same reason an
instance counts as avoided as soon as *one* plane has seen it stop or fall silent.

Several clients may know the same instance: those of two models, or of a model that has just
gone. A plane is told of an address by the first and by the last of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import CannotConnect, NotConnected
from dynamo_trio.plane.abc import Acknowledgements, RequestPlane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from dynamo_trio.plane.abc import (
        AcceptedCall,
        Acceptor,
        ClientStream,
        ItemSink,
        Outbox,
        RequestHead,
    )

logger = logging.getLogger("dynamo_trio.client")

#: Name of a plane, and an address there.
Way = tuple[str, str]


@attrs.define(eq=False)
class Planes(Mapping[str, RequestPlane]):
    """The planes of one process by their names; the order is that in which they are tried.

    ``transports`` is everywhere an instance's: name of a plane -> address.
    """

    _planes: dict[str, RequestPlane]
    #: How many clients know the address. Invariant: no entry is 0.
    _known: Counter[Way] = attrs.field(factory=Counter)
    #: Ways that were not there when they were last tried, of which the log was told.
    _missing: set[Way] = attrs.field(factory=set)
    #: First way of an instance -> the one of its ways that carried a request last.
    _carried: dict[Way, Way] = attrs.field(factory=dict)
    #: Instances that cannot be asked, as they stand in the log -> how many clients know of them.
    _foreign: Counter[str] = attrs.field(factory=Counter)
    #: Requests that a worker has taken on, by plane: those that this process has sent, and those
    #: that it was sent.
    sent: Counter[str] = attrs.field(factory=Counter)
    taken: Counter[str] = attrs.field(factory=Counter)

    @classmethod
    def of(
        cls, planes: RequestPlane | Iterable[RequestPlane] | Mapping[str, RequestPlane]
    ) -> Planes:
        """These planes, or this one; ``planes`` itself if it is of this class already.

        Raises:
            TypeError: there is something among them that is no plane.
            ValueError: two of them have one name.
        """
        if isinstance(planes, Planes):
            return planes
        if isinstance(planes, Mapping):
            return cls(dict(planes))
        found: dict[str, RequestPlane] = {}
        for plane in [planes] if isinstance(planes, RequestPlane) else planes:
            if not isinstance(plane, RequestPlane):
                raise TypeError(f"planes: {plane!r} is no request plane")
            if plane.name in found:
                raise ValueError(f"planes: two are called {plane.name!r}")
            found[plane.name] = plane
        return cls(found)

    def __getitem__(self, name: str) -> RequestPlane:
        return self._planes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._planes)

    def __len__(self) -> int:
        return len(self._planes)

    # --- as a client ----------------------------------------------------------------------

    def found(self, transports: Mapping[str, str], who: str = "") -> None:
        """One more client knows an instance that can be reached so; ``who`` names it in the log."""
        if not self.speak(transports):
            self._tell_foreign(transports, who)
        for name, address in self.ways(transports):
            self._known[name, address] += 1
            if self._known[name, address] == 1:
                self[name].instance_found(address)

    def gone(self, transports: Mapping[str, str], who: str = "") -> None:
        """One client less knows it."""
        if not self.speak(transports):
            self._foreign[who] -= 1
            self._foreign += Counter()  # drops what is 0
        for name, address in self.ways(transports):
            self._known[name, address] -= 1
            if self._known[name, address] <= 0:
                del self._known[name, address]
                self._missing.discard((name, address))
                self._carried.pop((name, address), None)
                self[name].instance_gone(address)

    def speak(self, transports: Mapping[str, str]) -> bool:
        """Is there a plane that both sides have?"""
        return not self._planes.keys().isdisjoint(transports)

    def avoid(self, transports: Mapping[str, str]) -> bool:
        """Has a plane seen that the instance is to get no new requests?"""
        for name, plane in self._planes.items():
            if (address := transports.get(name)) is not None and plane.avoids(address):
                return True
        return False

    def open_stream(
        self,
        who: Callable[[], str],
        transports: Mapping[str, str],
        head: RequestHead,
        payload: bytes,
        sink: ItemSink,
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Send a request over the best plane there is; ``who`` names the instance for the log.

        Raises:
            CannotConnect: no plane of ours reaches the instance, or nobody answers.
            DynamoException: as :meth:`~dynamo_trio.plane.RequestPlane.open_stream`.
        """
        return _Opening(self, who, transports, head, payload, sink)

    def ways(self, transports: Mapping[str, str]) -> list[Way]:
        """Where an instance can be reached from here, the best first."""
        return [(name, transports[name]) for name in self._planes if name in transports]

    def tell_missing(self, who: str, way: Way, following: Way, exc: NotConnected) -> None:
        """Say that a way is not there, once until it has been there in between."""
        if way not in self._missing:
            self._missing.add(way)
            text = "%s is asked over %s, since over %s it is not reached: %s"
            logger.warning(text, who, following[0], way[0], exc.message)

    def note_carried(self, who: Callable[[], str], best: Way, way: Way) -> None:
        """A request has left over ``way``; the ``best`` of its instance may have been missing."""
        self._missing.discard(way)
        self.sent[way[0]] += 1
        if way == best and self._carried.get(best, best) != way:
            logger.info("%s is asked over %s again", who(), way[0])
        if best in self._known:  # else nobody would tell that it is gone
            self._carried[best] = way

    def unlike(self, transports: Mapping[str, str]) -> str:
        """What an instance offers that cannot be asked, and what to look at."""
        offers = " and ".join(sorted(transports)) or "no plane that is known here"
        return f"offers {offers}, and this process speaks {' and '.join(self)} (see DYN_TRIO_MUX)"

    def _tell_foreign(self, transports: Mapping[str, str], who: str) -> None:
        """Once, until it is gone."""
        self._foreign[who] += 1
        if who and self._foreign[who] == 1:
            text = "%s gets no requests from here: it %s"
            logger.warning(text, who, self.unlike(transports))

    # --- as a worker ----------------------------------------------------------------------

    def counting(self, name: str, acceptor: Acceptor) -> Acceptor:
        """The same acceptor; what it takes on counts as having come over this plane."""
        return _Counting(acceptor, name, self.taken)

    def withdraw(self, *instances: Mapping[str, str]) -> None:
        """Tell peers that instances of ours are to get no new requests, all in one notice."""
        for name, plane in self.items():
            if addresses := [at[name] for at in instances if name in at]:
                plane.withdraw(*addresses)

    def restore(self, transports: Mapping[str, str]) -> None:
        """Tell them that it may get some again."""
        for name, address in self.ways(transports):
            self[name].restore(address)

    async def settle(self) -> None:
        """Wait until every request that was accepted has begun to be answered."""
        for plane in self.values():
            await plane.settle()

    async def wait_acknowledged(self) -> None:
        """Wait until every peer that can say so sends nothing new to what was withdrawn."""
        for plane in self.values():
            await plane.wait_acknowledged()

    @property
    def acknowledgements(self) -> Acknowledgements:
        """How far :meth:`wait_acknowledged` is."""
        each = [plane.acknowledgements for plane in self.values()]
        waiting = tuple(who for one in each for who in one.waiting)
        return Acknowledgements(sum(one.peers for one in each), waiting)

    @property
    def has_silent_peers(self) -> bool:
        """Has a peer sent a request that cannot say that it has seen an instance leave?"""
        return any(plane.has_silent_peers for plane in self.values())

    @property
    def places(self) -> int:
        """How many of our streams the peers have said they can place on other workers."""
        return sum(plane.places for plane in self.values())


@attrs.define(eq=False)
class _Opening:
    """See :meth:`Planes.open_stream`. A class, and no generator, since it is for every request."""

    _planes: Planes
    _who: Callable[[], str]
    _transports: Mapping[str, str]
    _head: RequestHead
    _payload: bytes
    _sink: ItemSink
    #: On the plane that carries it, once one does.
    _inner: AbstractAsyncContextManager[ClientStream] = attrs.field(init=False)

    async def __aenter__(self) -> ClientStream:
        planes = self._planes
        ways = planes.ways(self._transports)
        if not ways:
            raise CannotConnect(f"the worker {planes.unlike(self._transports)}")
        for way, following in zip(ways, [*ways[1:], None], strict=True):
            plane = planes[way[0]]
            self._inner = plane.open_stream(way[1], self._head, self._payload, self._sink)
            try:
                stream = await self._inner.__aenter__()
            except NotConnected as exc:
                if following is None:
                    raise
                planes.tell_missing(self._who(), way, following, exc)
            else:
                planes.note_carried(self._who, ways[0], way)
                return stream
        raise AssertionError("the last way either carries it or raises")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, value, trace)


@attrs.frozen(eq=False)
class _Counting:
    """An acceptor that counts."""

    _acceptor: Acceptor
    _name: str
    _counts: Counter[str]

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> AcceptedCall:
        call = self._acceptor.accept(head, payload, outbox)
        self._counts[self._name] += 1
        return call
