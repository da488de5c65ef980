"""An event plane that loses messages, or spoils them, when it is told to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.events import EventPlane, Outlet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from dynamo_trio.events import Inlet


@attrs.define(eq=False)
class LossyEvents(EventPlane):
    """Another plane, with what ``lose`` and ``garble`` say on the way to everybody."""

    plane: EventPlane
    lose: bool = False
    garble: bool = False
    #: Bytes of every message that was sent.
    sizes: list[int] = attrs.field(factory=list)

    @contextmanager
    def open_outlet(self) -> Iterator[Outlet]:
        with self.plane.open_outlet() as outlet:
            yield _Lossy(outlet, self)

    def open_inlet(self, address: str, topic: str) -> AbstractContextManager[Inlet]:
        return self.plane.open_inlet(address, topic)


@attrs.frozen(eq=False)
class _Lossy:
    outlet: Outlet
    how: LossyEvents

    @property
    def address(self) -> str:
        return self.outlet.address

    def send(self, frames: Sequence[bytes]) -> None:
        self.how.sizes.append(sum(map(len, frames)))
        if self.how.garble:
            frames = [*frames[:3], frames[3][:-3] + b"\xc1\xc1\xc1"]
        if not self.how.lose:
            self.outlet.send(frames)
