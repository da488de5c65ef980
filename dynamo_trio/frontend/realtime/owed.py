"""What the worker of a pass-through still owes its client, by the types of events.

A client that leaves in good order while nothing is owed has had what it wanted. An event of a type
that the API does not define asks for nothing, as far as we know.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from dynamo_trio.frontend.realtime.kept import Frame

_TRANSCRIPTION = "conversation.item.input_audio_transcription"
_COMMIT = "input_audio_buffer.commit"
#: What a client asks for -> what settles that.
_ASKS = {
    "response.create": "response.created",
    "input_audio_buffer.clear": "input_audio_buffer.cleared",
    _COMMIT: "input_audio_buffer.committed",
}
#: A response that was begun has an end, whoever has begun it.
_BEGUN, _DONE = "response.created", "response.done"
#: A turn of a session that transcribes ends with its transcript, or without.
_TURN, _TURN_FAILED = f"{_TRANSCRIPTION}.completed", f"{_TRANSCRIPTION}.failed"


@attrs.define(eq=False)
class Owed:
    """Of one session."""

    _transcribes: bool = False
    #: The type of event that is to come -> how often. Invariant: never 0.
    _open: Counter[str] = attrs.field(factory=Counter)

    @property
    def nothing(self) -> bool:
        """Is everything answered?"""
        return not self._open

    def sent(self, frame: Frame) -> None:
        """The worker was sent this."""
        session = frame.event.get("session")
        if frame.type == "session.update" and isinstance(session, dict):
            self._transcribes = session.get("type") == "transcription"
        elif frame.type == _COMMIT and self._transcribes:
            self._open[_TURN] += 1
        elif frame.type in _ASKS:
            self._open[_ASKS[frame.type]] += 1

    def heard(self, kind: str) -> None:
        """The worker has said something of this type."""
        if kind == "error":  # what was not begun never will be
            self._open = +Counter({_DONE: self._open[_DONE]})
            return
        self._settle(_TURN if kind == _TURN_FAILED else kind)
        if kind == _BEGUN:
            self._open[_DONE] += 1

    def _settle(self, kind: str) -> None:
        if kind in self._open:
            self._open[kind] -= 1
            self._open = +self._open
