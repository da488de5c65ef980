"""A session over a chat model: text in, text out.

Every event of the client is handled in one call that never waits: it changes the conversation
or the settings, and puts what the client is told into the outbox. Only a response has a task,
and there is one at a time. Before the next event is read, the client must have taken enough
of what was said: who only talks is held back by its own connection.

Nothing of a session is kept anywhere else. A worker that goes away is no matter of it: the
next response carries the whole conversation to another one. When this process stops, the
client gets what it has to repeat at another frontend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.errors import DynamoException, InvalidArgument
from dynamo_trio.frontend.realtime.response import Response
from dynamo_trio.frontend.realtime.socket import LEFT, Close
from dynamo_trio.lifecycle import CutReason
from dynamo_trio.wire.openai.fields import Fields, shown, text
from dynamo_trio.wire.openai.realtime.conversation import (
    MAX_TEXT,
    Conversation,
    item_id,
    parse_item,
)
from dynamo_trio.wire.openai.realtime.selection import UPDATE, decode_event, event_id_of
from dynamo_trio.wire.openai.realtime.settings import Settings, response_options, updated

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.frontend.catalog import ServedModel
    from dynamo_trio.frontend.realtime.session import Session
    from dynamo_trio.wire.openai.fields import Json

#: Characters of one event: all of a conversation's text, every second of them escaped.
MAX_EVENT = 2 * MAX_TEXT

#: What OpenAI has, and a session of text has no use for.
AUDIO = (
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "output_audio_buffer.clear",
    "conversation.item.truncate",
)


@attrs.define(eq=False)
class TextSession:
    """Answers out of a chat model. ``run`` is called once."""

    _session: Session
    _model: ServedModel
    _conversation: Conversation = attrs.field(init=False)
    _settings: Settings = attrs.field(factory=Settings)
    #: Invariant: in here from ``response.create`` until after ``response.done``.
    _running: Response | None = None
    _handlers: dict[str, Callable[[dict[str, Json]], None]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        conversation_id = self._session.events.new_id("conv")
        self._conversation = Conversation(conversation_id, self._session.frontend.conversations)
        self._handlers = {
            UPDATE: self._update,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    async def run(self, first: str | None) -> Close:
        """Serve until the client leaves. ``first``: the frame that selected the model."""
        session = self._session
        session.on_drain, session.on_end, session.replay = self._drain, self._end, self._replay
        if first is None:
            session.send("session.created", session=self._session_json())
        else:
            self._handle(first)
        while (frame := await session.socket.receive()) is not None:
            self._handle(frame)
            frame = None  # it may be large, and the next one may be long in coming
            await session.outbox.wait_room()
        return LEFT

    def close(self) -> None:
        """Nothing of it is wanted any more."""
        self._conversation.close()

    # --- the client's events ------------------------------------------------------------

    def _handle(self, frame: str | bytes) -> None:
        event_id = None
        if self._running is None:
            self._session.set_idle()  # but only since now
        try:
            if len(frame) > MAX_EVENT:
                raise InvalidArgument(f"An event must have at most {MAX_EVENT} characters.")
            event = decode_event(frame)
            event_id = event_id_of(event)
            self._handler(event)(event)
        except DynamoException as exc:
            self._session.error(exc, event_id)

    def _handler(self, event: dict[str, Json]) -> Callable[[dict[str, Json]], None]:
        kind = event.get("type")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is not None:
            return handler
        if kind in AUDIO:
            why = f"'{kind}' is not supported by this model: it takes and gives text only."
            raise InvalidArgument(why, param="type")
        known = ", ".join(self._handlers)
        why = f"'type' must be one of {known}, not {shown(kind)}."
        raise InvalidArgument(why, param="type")

    def _update(self, event: dict[str, Json]) -> None:
        settings = updated(self._settings, event, self._model.name)
        self._conversation.keep_beside(settings.instructions)
        self._settings = settings
        self._session.send("session.updated", session=self._session_json())

    def _create_item(self, event: dict[str, Json]) -> None:
        fields = _fields(event, "item", "previous_item_id")
        fresh_id = self._session.events.new_id("item")
        item = fields.required("item", lambda value, name: parse_item(value, name, fresh_id))
        after = fields.optional("previous_item_id", text)
        told = {"previous_item_id": self._conversation.insert(item, after), "item": item.to_json()}
        self._session.send("conversation.item.added", **told)
        self._session.send("conversation.item.done", **told)

    def _retrieve_item(self, event: dict[str, Json]) -> None:
        item = self._conversation.get(_fields(event, "item_id").required("item_id", item_id))
        self._session.send("conversation.item.retrieved", item=item.to_json())

    def _delete_item(self, event: dict[str, Json]) -> None:
        id = _fields(event, "item_id").required("item_id", item_id)
        self._conversation.delete(id)
        self._session.send("conversation.item.deleted", item_id=id)

    def _create_response(self, event: dict[str, Json]) -> None:
        if self._running is not None:
            why = f"{self._running.id} is still running; wait for its response.done, or cancel it."
            code = "conversation_already_has_active_response"
            self._session.error(InvalidArgument(why), event_id_of(event), code=code)
            return
        fresh_id = self._session.events.new_id("item")
        options = response_options(self._settings, event, self._conversation, fresh_id)
        if not (options.settings.instructions or options.input or self._conversation.items()):
            raise InvalidArgument("There is nothing to respond to: the conversation is empty.")
        if options.in_conversation:
            self._conversation.reserve()
        self._session.set_busy()
        self._running = Response(
            *(self._session, self._model.name, self._conversation, options),
            *(event_id_of(event), self._over),
        )
        self._session.tasks.start_soon(self._running.run)

    def _cancel_response(self, event: dict[str, Json]) -> None:
        id = _fields(event, "response_id").optional("response_id", text)
        if self._running is None or id not in (None, self._running.id):
            why = "There is no such response running." if id else "There is no response running."
            code = "response_cancel_not_active"
            self._session.error(InvalidArgument(why), event_id_of(event), code=code)
            return
        self._running.cut(CutReason.CLIENT_LEFT)

    # --- the end ------------------------------------------------------------------------

    def _over(self) -> None:
        self._running = None
        self._conversation.free_reserve()
        self._session.set_idle()
        if self._session.frontend.lifecycle.stopping:
            reason = self._session.admission.reason
            self._session.restart("draining" if reason is None else reason.value)

    def _drain(self) -> None:
        if self._running is None:
            self._session.restart()
        else:
            self._session.tell_draining()

    def _end(self) -> None:
        if self._running is not None:
            self._session.admission.cut(CutReason.CLIENT_LEFT)  # unless it was cut
            self._running.cut(self._session.admission.reason or CutReason.CLIENT_LEFT)

    def _replay(self) -> tuple[dict[str, Json], list[Json]]:
        items = [i for i in self._conversation.items() if i.status != "in_progress"]
        return self._settings.to_json(self._model.name), [item.to_json() for item in items]

    def _session_json(self) -> dict[str, Json]:
        own = {"id": self._session.id, "object": "realtime.session"}
        return {**own, **self._settings.to_json(self._model.name)}


def _fields(event: dict[str, Json], *names: str) -> Fields:
    fields = Fields(event)
    fields.forbid_unknown(("type", "event_id"), names)
    return fields
