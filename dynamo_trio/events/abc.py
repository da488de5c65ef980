"""The event plane: one process tells, any number of others listen.

Nothing is promised but order: a message that a subscriber has no room for, or that was sent
before it had connected, never reaches it. Whoever needs all of them counts them, and asks
for what is missing by other means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class Outlet(Protocol):
    """The end that tells."""

    @property
    def address(self) -> str:
        """What subscribers connect to."""
        ...

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message to every subscriber that has room for it. Never blocks."""
        ...


class Inlet(Protocol):
    """The end that listens to one publisher. One reader."""

    async def receive(self) -> list[bytes]:
        """The next message, as its frames. A cancel loses none."""
        ...


class EventPlane(ABC):
    """One way to carry events."""

    @abstractmethod
    def open_outlet(self) -> AbstractContextManager[Outlet]:
        """A place of its own to publish from. Leaving the block takes no time.

        Raises:
            PortInUse: there is no such place on this machine.
        """

    @abstractmethod
    def open_inlet(self, address: str, topic: str) -> AbstractContextManager[Inlet]:
        """Listen to the publisher at ``address``, from as soon as it is there.

        What arrives has a first frame that begins with ``topic``.

        Raises:
            ValueError: no address of this plane.
        """
