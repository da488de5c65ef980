"""From the items of a worker's stream to the deltas of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import PayloadTooLarge
from dynamo_trio.frontend.answers import Answer
from dynamo_trio.http.sinks import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.frontend.realtime.outbox import Outbox
    from dynamo_trio.tokenizers import OutputProcessor

#: Of an answer that its conversation has no room for.
FULL = "The conversation has no room for the rest of this answer; delete some items."


@attrs.define(eq=False)
class TextAnswer(Answer):
    """The text of one response, piece by piece into the outbox of its session.

    Fed as :class:`~dynamo_trio.frontend.answers.Answer` is: by calls that never wait. The worker
    is held back while the client is slower.
    """

    outbox: Outbox
    #: Called before the first piece: announce the item. Returns what writes a piece's event.
    begin: Callable[[], Callable[[str], str]]
    #: May the answer become so long? (Characters.)
    may_grow: Callable[[int], bool]
    #: Nothing more is to be waited for.
    over: Wake = attrs.field(factory=Wake)
    #: Set with the first piece, and never unset.
    _write: Callable[[str], str] | None = None
    _pieces: list[str] = attrs.field(factory=list)
    _length: int = 0

    def __attrs_post_init__(self) -> None:
        self.outbox.on_low_water = self.grant

    @property
    def untouched(self) -> bool:
        return self._write is None and not self.complete

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    def restart(self, output: OutputProcessor) -> None:
        super().restart(output)
        self.over = Wake()

    @property
    def _writable(self) -> bool:
        return self.outbox.writable

    def _text(self, text: str) -> None:
        if not text or self.error is not None:
            return
        if not self.may_grow(self._length + len(text)):
            self._fail(PayloadTooLarge(FULL))
            return
        if self._write is None:
            self._write = self.begin()
        self._pieces.append(text)
        self._length += len(text)
        self.outbox.delta(self._write, text)

    def _note_end(self) -> None:
        if self.error is None:  # else its last piece had no room
            super()._note_end()

    def _end(self) -> None:
        if self._write is None:  # an answer may be empty, and is one nevertheless
            self._write = self.begin()

    def _over(self) -> None:
        self.over.set()

    def _failed(self, error: object) -> None:
        self.over.set()
