"""What a client is told of an error: enough to act on it, and nothing of the server's inside.

A client's own mistakes are told word for word. What went wrong at a worker, or on the way to
it, comes from programs that nobody foresaw, and may hold anything: paths and addresses are
taken out of it, and of what nobody has named only that it happened is told. The log has the
whole of it, under the request's id.
"""

from __future__ import annotations

import re

from dynamo_trio.errors import DynamoException, InvalidArgument, Unknown

#: As Dynamo says it.
UNNAMED = "Internal server error."
#: Characters of a message.
MAX_MESSAGE = 2000
_HIDDEN = "…"

_URL = r"\b[a-z][a-z0-9+.-]{1,15}://[^\s'\")\]]+"
_ADDRESS = r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b|\[[0-9A-Fa-f:.]{2,}\](?::\d{1,5})?"
#: Two parts at least; a route of the API is no path of the server.
_PATH = r"(?<![\w/.-])(?!/v1/)~?(?:/[^\s/'\":;,()\[\]]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+"
_INSIDE = re.compile(f"{_URL}|{_ADDRESS}|{_PATH}")
_TRACE = re.compile(r'Traceback \(most recent call last\)|\bFile "')


def public_error(exc: BaseException) -> DynamoException:
    """``exc`` as a client may see it: what is not one of ours loses its text."""
    return exc if isinstance(exc, DynamoException) else Unknown(UNNAMED)


def public_message(exc: BaseException) -> str:
    """The text that a client gets of it. Never empty, one that JSON can carry, and not long."""
    error = public_error(exc)
    message = error.message
    if not isinstance(error, InvalidArgument):
        message = UNNAMED if _is_unnamed(error) else _INSIDE.sub(_HIDDEN, message)
    # It may quote input; a lone surrogate in it could not be encoded.
    return message[:MAX_MESSAGE].encode("utf-8", "replace").decode()


def _is_unnamed(error: DynamoException) -> bool:
    return isinstance(error, Unknown) or bool(_TRACE.search(error.message))
