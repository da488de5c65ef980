"""The ``response`` object of the Realtime API's events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dynamo_trio.errors import Cancelled, DynamoException, RequestCut
from dynamo_trio.wire.openai.realtime.events import error_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.llm import CompletionUsage
    from dynamo_trio.wire.openai.fields import Json
    from dynamo_trio.wire.openai.realtime.settings import ResponseOptions

Status = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


def done_status(
    finish: str | None, error: DynamoException | None
) -> tuple[Status, dict[str, Json] | None]:
    """How a response ended, as its ``status`` and ``status_details``.

    Args:
        finish: OpenAI's finish reason, of an answer that is whole.
        error: what ended it, if it is not.
    """
    if isinstance(error, Cancelled):
        return "cancelled", {"type": "cancelled", "reason": "client_cancelled"}
    if isinstance(error, RequestCut):
        return "incomplete", {"type": "incomplete", "reason": "cut", "error": error_object(error)}
    if error is not None:
        return "failed", {"type": "failed", "error": error_object(error)}
    if finish == "length":
        return "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
    return "completed", None


def response_json(
    id: str,
    status: str,
    options: ResponseOptions,
    conversation_id: str,
    *,
    details: dict[str, Json] | None = None,
    output: Sequence[Json] = (),
    usage: dict[str, Json] | None = None,
) -> dict[str, Json]:
    """The object in ``response.created`` and ``response.done``."""
    most = options.settings.max_output_tokens
    return {
        "object": "realtime.response",
        "id": id,
        "status": status,
        "status_details": details,
        "output": list(output),
        "conversation_id": conversation_id if options.in_conversation else None,
        "output_modalities": ["text"],
        "max_output_tokens": "inf" if most is None else most,
        "usage": usage,
        "metadata": options.metadata,
    }


def usage_json(usage: CompletionUsage) -> dict[str, Json]:
    """The tokens of a response."""
    asked, answered = usage.prompt_tokens, usage.completion_tokens
    return {
        "total_tokens": asked + answered,
        "input_tokens": asked,
        "output_tokens": answered,
        "input_token_details": {"text_tokens": asked, "audio_tokens": 0, "cached_tokens": 0},
        "output_token_details": {"text_tokens": answered, "audio_tokens": 0},
    }
