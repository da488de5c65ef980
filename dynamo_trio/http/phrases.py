"""The words behind the status in the first line of an HTTP/1 answer.

They may be missing (RFC 9112, 4), and some clients then take any answer for a failed one.
"""

from __future__ import annotations

from http import HTTPStatus

#: For a status that nobody has registered, as an operator may choose one: its class (RFC 9110, 15).
CLASSES = {1: "Informational", 2: "Success", 3: "Redirection", 4: "Client Error", 5: "Server Error"}
#: Of every status that there may be.
PHRASES = {
    **{status: CLASSES.get(status // 100, "").encode() for status in range(100, 1000)},
    529: b"Overloaded",
    **{status.value: status.phrase.encode() for status in HTTPStatus},
}
