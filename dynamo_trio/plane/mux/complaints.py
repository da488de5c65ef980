"""What the log says of peers, who may cause as much of it as they like."""

from __future__ import annotations

import logging
from typing import Final

import attrs

from dynamo_trio.console.seldom import Seldom, SeldomEach
from dynamo_trio.plane.net.sockets import COMPLAIN_EVERY

logger = logging.getLogger("dynamo_trio.plane.mux")

#: Seconds until the same is said again of one worker, to which one connects again and again,
#: and of one host that speaks no version of ours.
WORKER_EVERY: Final = 60.0
VERSION_EVERY: Final = 3600.0


@attrs.define(eq=False)
class Complaints:
    """Of all peers of one listener, or of one worker. Each line holds its reason."""

    #: Seconds between two lines of a kind.
    every: float = COMPLAIN_EVERY
    _closed: Seldom = attrs.field(init=False)
    _silent: Seldom = attrs.field(init=False)
    _given_up: Seldom = attrs.field(init=False)
    _versions: SeldomEach = attrs.field(factory=lambda: SeldomEach(VERSION_EVERY))

    def __attrs_post_init__(self) -> None:
        self._closed, self._silent = Seldom(self.every), Seldom(self.every)
        self._given_up = Seldom(self.every)

    def closed(self, peer: str, why: str) -> None:
        """A connection is closed because of what its peer did or did not do."""
        text = "the connection to %s is closed: %s"
        self._closed.log(logger, logging.WARNING, text, peer, why)

    def incompatible(self, peer: str, why: str) -> None:
        """A peer speaks no version of ours. It will come again, and is of another release."""
        host = peer.rpartition(":")[0] or peer
        text = "the connection to %s is closed: %s; its requests come over Dynamo's own plane"
        self._versions.log(host, logger, logging.WARNING, text, peer, why)

    def silent(self, peer: str) -> None:
        """A worker does not answer."""
        text = "%s is silent; it gets no new requests"
        self._silent.log(logger, logging.WARNING, text, peer)

    def given_up(self, peer: str, why: str) -> None:
        """One stream of a connection is given up because of what its peer does or does not do."""
        text = "a request between here and %s is given up: %s"
        self._given_up.log(logger, logging.WARNING, text, peer, why)
