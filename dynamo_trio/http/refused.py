"""Answers to what is no request, in the words that the app has for errors.

The protocol engine finds out, and has nothing but a status to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import (
    DynamoException,
    HeadTooLarge,
    HttpVersionNotSupported,
    InvalidArgument,
    NotSupported,
    Unknown,
)
from dynamo_trio.wire.openai.response import error_body, error_headers

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Headers

#: What h11 complains of may be as long as what it read.
MOST = 200


def error_of(status: int, complaint: str) -> DynamoException:
    """What an engine's status means; ``complaint`` is its own word for it."""
    said = complaint[:MOST]
    match status:
        case 431:
            return HeadTooLarge("The request's head is longer than the server takes.")
        case 501:
            return NotSupported(f"The server does not support this of HTTP: {said}.")
        case 505:
            return HttpVersionNotSupported("The server speaks HTTP/1.1 and HTTP/2.")
        case _ if status < 500:
            return InvalidArgument(f"The request is no good HTTP: {said}.")
    return Unknown("Internal server error.")


def refusal(error: DynamoException) -> tuple[Headers, bytes]:
    """Headers and body of the answer."""
    body = error_body(error)
    return [*error_headers(error), (b"content-length", b"%d" % len(body))], body
