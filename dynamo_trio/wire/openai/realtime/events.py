"""Server events of the Realtime API: each one JSON object, sent as one text frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.openai.public import public_error, public_message
from dynamo_trio.wire.openai.response import json_string

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_trio.errors import DynamoException
    from dynamo_trio.wire.openai.fields import Json

#: Not OpenAI's: the session is about to end here, and may go on at any other frontend.
DRAINING = "dynamo_trio.session.draining"

_encode = msgspec.json.Encoder().encode


@attrs.define(eq=False)
class ServerEvents:
    """Writes the events of one session, each with an id of its own."""

    #: Of the session, and unlike that of any other: it makes all ids unique.
    token: str
    _count: int = 0

    def new_id(self, prefix: str) -> str:
        """A fresh id: ``event_...``, ``item_...``, ``resp_...``."""
        self._count += 1
        return f"{prefix}_{self.token}{self._count:04x}"

    def event(self, type: str, /, **fields: Json) -> str:
        """An event as the text of its frame."""
        event = {"type": type, "event_id": self.new_id("event"), **fields}
        return _encode(event).decode()

    def error(
        self, exc: BaseException, event_id: str | None = None, *, code: str | None = None
    ) -> str:
        """An ``error`` event; the session goes on.

        Args:
            event_id: of the client's event that is to blame, if it had one.
            code: what OpenAI calls it, where that is more precise than the error's reason.
        """
        param = exc.param if isinstance(exc, InvalidArgument) else None
        fields = error_object(exc)
        fields = {**fields, "code": code or fields["code"], "param": param, "event_id": event_id}
        return self.event("error", error=fields)

    def draining(
        self, reason: str, deadline: float, session: Mapping[str, Json], items: Sequence[Json]
    ) -> str:
        """The notice of a session that has to end here.

        Args:
            reason: ``draining``, or why it was cut.
            deadline: seconds until it is closed with 1012; 0: now.
            session: what to send elsewhere in a ``session.update``.
            items: what to send there in one ``conversation.item.create`` each, in this order.
        """
        seconds = round(deadline, 3)
        return self.event(DRAINING, reason=reason, deadline=seconds, session=session, items=items)

    def text_delta(self, **fields: Json) -> Callable[[str], str]:
        """What writes a ``response.output_text.delta`` out of its text; ``fields`` say of what."""
        ids = _encode({"type": "response.output_text.delta", **fields})[:-1].decode()

        def write(delta: str) -> str:
            text = json_string(delta).decode()
            return f'{ids},"event_id":"{self.new_id("event")}","delta":{text}}}'

        return write


def error_object(exc: BaseException) -> dict[str, Json]:
    """``exc`` in the words of OpenAI's ``error`` object, as a client may see it."""
    error: DynamoException = public_error(exc)
    message = public_message(error)
    kind = error.kind if error.status < 500 else "server_error"
    return {"type": kind, "code": error.reason, "message": message}
