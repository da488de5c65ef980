"""The requests of an engine, from their entering to their last delta, and what each still gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dynamo_trio.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dynamo_trio.engines.protocol import Delta, Request

    Sink = Callable[[Delta], None]


@define(eq=False)
class OpenRequest:
    """One of them."""

    sink: Sink
    #: Tokens that it may still get.
    left: int
    #: Tokens of its prompt, while it has not had any of its own.
    prompt: int
    #: It has had some.
    begun: bool = False


@define(eq=False)
class OpenRequests:
    """All of them."""

    #: Tokens of the prompts that are still to be computed. Invariant: the sum over the entries.
    prompt_tokens: int = 0
    _entries: dict[str, OpenRequest] = field(factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def enter(self, request: Request, sink: Sink) -> OpenRequest:
        """A request comes in; its id is free."""
        entry = OpenRequest(sink, request.limit, len(request.token_ids))
        self._entries[request.request_id] = entry
        self.prompt_tokens += entry.prompt
        return entry

    def leave(self, request_id: str, entry: OpenRequest) -> bool:
        """It wants nothing more. False: it has had its last delta already."""
        if self._entries.get(request_id) is not entry:
            return False
        del self._entries[request_id]
        self._note_computed(entry)
        return True

    def take(self, delta: Delta) -> OpenRequest | None:
        """Note what a request gets; None if it is not here any more.

        Raises:
            EngineDead: it is more than was asked for.
        """
        entry = self._entries.get(delta.request_id)
        if entry is None:
            return None
        if entry.prompt:
            self._note_computed(entry)  # whatever comes, it comes after the prompt
        entry.left -= len(delta.token_ids)
        entry.begun = entry.begun or bool(delta.token_ids)
        if entry.left < 0:
            raise EngineDead("the engine generated more tokens than were asked for")
        if delta.finish_reason is not None:
            del self._entries[delta.request_id]
        return entry

    def pop_all(self) -> list[tuple[str, OpenRequest]]:
        """Those that are here, with their ids; none is from now on."""
        left = list(self._entries.items())
        self._entries.clear()
        for _, entry in left:
            self._note_computed(entry)
        return left

    def later_tokens(self, deltas: Iterable[Delta]) -> list[int]:
        """How many tokens each request gets that has had some before."""
        return [
            len(delta.token_ids)
            for delta in deltas
            if delta.token_ids
            and (entry := self._entries.get(delta.request_id)) is not None
            and entry.begun
        ]

    def any_begun(self) -> bool:
        """Has any of them had tokens, and waits for more?"""
        return any(entry.begun for entry in self._entries.values())

    def _note_computed(self, entry: OpenRequest) -> None:
        """Its prompt is computed, or no longer wanted."""
        self.prompt_tokens -= entry.prompt
        entry.prompt = 0
