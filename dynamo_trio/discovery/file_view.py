"""What a watch of the file backend tells, and what the expiry deletes: judgement without I/O.

Theory of operation
-------------------
*The view.* A watch looks at its directory now and then; :class:`BucketView` compares each
look with what it told so far. What appeared or changed is told at once. What is missing is
told at the second look in a row, a moment later, so that a directory that is being deleted
as a whole does not pass for its files leaving one by one. A directory that is missing or
cannot be read is an outage, and so is one that was replaced by another: nothing is told, and
what is missing when it is back is held for a full time-to-live, as its owners, who also lost
it, need a moment to put it back.

*Expiry.* Dynamo's processes delete, whoever owns it, each file that nobody has touched for
a time-to-live, and nobody else would delete those of a process that died. So do we. But what
a time stamp says is the clock of whoever wrote it: compared with ours it makes every file old
if ours is ahead, and keeps the dead for ever if theirs was. So it only matters whether it
changes: a file is deleted after this process has seen the same time stamp over three whole
rounds, which take a time-to-live by our own clock. All rounds are in vain, and are counted
from none again, if the owners may have been unable to touch: this process was frozen (they
may have been, too), or the store took no touches, or took its time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery.store import StoreChange, StorePut, StoreRemoved
from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.dynamo.keys import key_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_trio.discovery.files import Content, Look

#: Rounds over which a file must have been untouched before it is deleted; a time-to-live.
ROUNDS = 3
#: A round that comes later than this was not ours to choose, in seconds: we were frozen. One
#: that takes longer was the store's.
LATE = 1.0


def _is_key(name: str) -> bool:
    try:
        key_of_file(name)
    except RemoteProtocolError:  # somebody else's file
        return False
    return True


@attrs.define(eq=False)
class BucketView:
    """What was told of one directory. Times are seconds on one clock that never goes back."""

    ttl: float
    #: Invariant: exactly what was told, by file name.
    files: dict[str, Content] = attrs.field(factory=dict)
    _identity: tuple[int, int] | None = None
    #: Missing at the last look.
    doubtful: set[str] = attrs.field(factory=set)
    #: Missing since an outage; to be told at ``_held_until``.
    _held: set[str] = attrs.field(factory=set)
    _held_until: float = -math.inf

    @property
    def values(self) -> dict[str, bytes]:
        """What was told, by key."""
        return {key_of_file(name): content.value for name, content in self.files.items()}

    def away(self) -> None:
        """The directory is gone, or cannot be read."""
        self._identity = None

    def update(self, look: Look, now: float) -> list[StoreChange]:
        """Compare, and return what is to be told."""
        if look.identity != self._identity:
            self._back(look, now)
        seen = {name: content for name, content in look.files.items() if _is_key(name)}
        return [*self._removed(seen, now), *self._put(seen)]

    def _back(self, look: Look, now: float) -> None:
        self._identity = look.identity
        self._held, self._held_until = set(self.files), now + self.ttl
        self.doubtful.clear()

    def _put(self, seen: Mapping[str, Content]) -> Iterator[StoreChange]:
        for name, content in seen.items():
            before = self.files.get(name)
            self.files[name] = content
            if before is None or before.value != content.value:
                yield StorePut(key_of_file(name), content.value)

    def _removed(self, seen: Mapping[str, Content], now: float) -> list[StoreChange]:
        missing = self.files.keys() - seen.keys()
        self._held = self._held & missing if now < self._held_until else set()
        sure = (missing & self.doubtful) - self._held
        self.doubtful = missing - self._held - sure
        for name in sure:
            del self.files[name]
        return [StoreRemoved(key_of_file(name)) for name in sure]


@attrs.define(eq=False)
class Expiry:
    """Which files of one directory nobody keeps alive any more."""

    #: By file name: time of modification, and over how many rounds it has been the same.
    _seen: dict[str, tuple[int, int]] = attrs.field(factory=dict)

    def forget(self) -> None:
        """What was seen counts no more."""
        self._seen.clear()

    def judge(self, times: Mapping[str, int]) -> dict[str, int]:
        """One round: those to delete, with their times of modification.

        ``times``: of modification, in nanoseconds by file name.
        """
        self._seen = {
            name: (time, self._rounds(name, time)) for name, time in times.items() if _is_key(name)
        }
        return {name: time for name, (time, rounds) in self._seen.items() if rounds >= ROUNDS}

    def _rounds(self, name: str, time: int) -> int:
        before, rounds = self._seen.get(name, (time, -1))
        return rounds + 1 if before == time else 0


@attrs.define(eq=False)
class Rounds:
    """Notices that this process was frozen, or its clock set, between two rounds."""

    every: float  # seconds
    _last: tuple[float, float] | None = None

    def begin(self, monotonic: float, wall: float) -> bool:
        """A round begins. True if it comes so late that what was seen before counts no more."""
        last, self._last = self._last, (monotonic, wall)
        if last is None:
            return False
        return max(monotonic - last[0], wall - last[1]) > self.every + LATE
