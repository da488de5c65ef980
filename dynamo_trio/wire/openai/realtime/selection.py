"""Which model a session is for: Dynamo's selection loop, as far as it is about events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.wire.openai.fields import NotJson, decode_object

if TYPE_CHECKING:
    from dynamo_trio.wire.openai.fields import Json

#: The client event that selects.
UPDATE = "session.update"


def decode_event(frame: str | bytes) -> dict[str, Json]:
    """The event in a frame: a JSON object.

    Raises:
        InvalidArgument: it is binary, no JSON, or JSON that cannot be taken: why, it says.
    """
    if isinstance(frame, bytes):
        raise InvalidArgument("binary frames not supported")
    try:
        return decode_object(frame.encode())
    except (NotJson, UnicodeEncodeError):
        raise InvalidArgument("malformed JSON frame") from None
    except InvalidArgument as exc:
        raise type(exc)(exc.message.replace("The body", "The event", 1)) from None


def event_id_of(event: dict[str, Json]) -> str | None:
    """The id that the client gave its event, if any: errors refer to it."""
    given = event.get("event_id")
    return given[:512] if isinstance(given, str) else None


def selected_model(event: dict[str, Json]) -> str:
    """The model that the event names.

    It is ``session.model`` or, in a session that transcribes,
    ``session.audio.input.transcription.model``.

    Raises:
        InvalidArgument: it is no ``session.update``, or names none.
    """
    if event.get("type") != UPDATE:
        raise InvalidArgument("expected session.update before engine is selected", param=UPDATE)
    for path in (("model",), ("audio", "input", "transcription", "model")):
        name = _at(event.get("session"), path)
        if isinstance(name, str) and name:
            return name
    raise InvalidArgument("session.model required", param="session.model")


def _at(value: Json, path: tuple[str, ...]) -> Json:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
