"""What a client has sent in a session that its worker may have to hear once more, elsewhere.

Theory of operation
-------------------
A worker's state is made of what its client has sent. Another worker can take the session over
if it is sent the same, and if nothing of what it then says would be new to the client only
because it comes a second time. So the frames are kept, up to :data:`MOST_KEPT`, and a session
may move while its worker has said nothing about them but ``session.updated``; of these the
next worker's are swallowed.

That would end with the first answer. In a session of the type ``transcription``, though,
no turn depends on another. When every turn has been answered, its frames are dropped, and the
session may move again, with its settings and what was sent since. In any other session the turns
are a conversation, of which only its worker knows what came of them.

All of this reads the types of events, which the API defines. What cannot be followed (an
``error``, a turn that the worker has found by itself) keeps a session where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from dynamo_trio.wire.openai.fields import Json
    from dynamo_trio.wire.openai.realtime.room import Room

MIB = 1024 * 1024
#: Bytes of frames that are kept for one session: a minute of speech.
MOST_KEPT = 4 * MIB

UPDATE = "session.update"
_COMMIT, _CLEAR = "input_audio_buffer.commit", "input_audio_buffer.clear"
_TRANSCRIPTION = "conversation.item.input_audio_transcription"
#: What ends a turn -> which event of the client has asked for it.
_ENDS = {
    f"{_TRANSCRIPTION}.completed": _COMMIT,
    f"{_TRANSCRIPTION}.failed": _COMMIT,
    "input_audio_buffer.cleared": _CLEAR,
}


@attrs.frozen
class Frame:
    """One event as it is handed on."""

    event: dict[str, Json] = attrs.field(repr=False)
    size: int  # bytes, as it came

    @property
    def type(self) -> str:
        """Empty where it has none."""
        kind = self.event.get("type")
        return kind if isinstance(kind, str) else ""


@attrs.define(eq=False)
class Kept:
    """The frames of one session that were handed on, as far as they are still of use."""

    _room: Room
    most: int = MOST_KEPT
    #: How many of the ``session.updated`` that our updates bring about the client is not to see:
    #: it has seen them, or has not asked.
    known_updates: int = 0
    #: The session as the client has set it last.
    settings: dict[str, Json] | None = None
    #: In the order in which they were sent. Invariant: every ``session.update``, and everything
    #: else since all turns were over, unless something is lost.
    _frames: list[Frame] = attrs.field(factory=list)
    #: Invariant: their bytes, which are counted in ``_room``.
    _size: int = 0
    #: Ends of turns that the worker has not answered.
    _open: list[str] = attrs.field(factory=list)
    #: The worker has said something that the client must not hear twice.
    _said: bool = False
    #: Frames were not kept: of the turn that is open, of turns before it, of the settings.
    _lost_now: bool = False
    _lost_before: bool = False
    _lost_for_ever: bool = False
    #: How many ``session.updated`` have come from the worker that has the session now.
    _updates: int = 0

    @property
    def movable(self) -> bool:
        """Can another worker take the session over, without its client noticing?"""
        return not (self._said or self._lost_now or self._lost_before or self._lost_for_ever)

    def begin(self) -> list[Frame]:
        """A worker takes the session on, and is to be sent these first."""
        self._updates = 0
        return list(self._frames)

    def sent(self, frame: Frame) -> None:
        """The worker was sent this, for the first time."""
        if frame.type == UPDATE:
            session = frame.event.get("session")
            self.settings = session if isinstance(session, dict) else self.settings
            self._lost_for_ever |= not self._keep(frame)
        else:
            self._take(frame)
            if frame.type in _ENDING:
                self._open.append(frame.type)
                self._lost_before |= self._lost_now
                self._lost_now = False

    def heard(self, kind: str) -> bool:
        """The worker has said something of this type. False: it is not for the client."""
        if kind == "session.created":
            return False  # the client was welcomed before
        if kind == "session.updated":
            return self._updated()
        self._said = True
        if (asked := _ENDS.get(kind)) in self._open:
            self._open.remove(asked)
            if not self._open and self._has_lone_turns:
                self._turns_are_over()
        return True

    def close(self) -> None:
        """Give the room back."""
        self._lost_for_ever = True
        self._replace([])

    def _updated(self) -> bool:
        self._updates += 1
        if self._updates <= self.known_updates:
            return False
        self.known_updates = self._updates
        return True

    @property
    def _has_lone_turns(self) -> bool:
        return self.settings is not None and self.settings.get("type") == "transcription"

    def _turns_are_over(self) -> None:
        """Forget all up to the last end of a turn, but for the settings."""
        ends = [number for number, frame in enumerate(self._frames, 1) if frame.type in _ENDING]
        over = ends[-1] if ends else 0
        self._replace([*_updates(self._frames[:over]), *self._frames[over:]])
        self._said = self._lost_before = False

    def _take(self, frame: Frame) -> None:
        if not self._lost_now and not self._keep(frame):
            self._lost_now, self._lost_before = True, self._lost_before or bool(self._open)
            self._replace(_updates(self._frames))

    def _keep(self, frame: Frame) -> bool:
        room = min(self.most - self._size, self._room.left)
        if frame.size > room:
            return False
        self._frames.append(frame)
        self._size += frame.size
        self._room.used += frame.size
        return True

    def _replace(self, frames: list[Frame]) -> None:
        size = sum(frame.size for frame in frames)
        self._room.used += size - self._size
        self._frames, self._size = frames, size


_ENDING = frozenset(_ENDS.values())


def _updates(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.type == UPDATE]
