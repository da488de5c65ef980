"""What a canary asks: a request that is marked, so that a handler can tell it from others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo_trio.errors import FileUnusable

#: Dynamo's marker. Its value is ``True`` in a canary, and in no other request.
HEALTH_CHECK_KEY = "_HEALTH_CHECK"
#: Bytes of a file that holds a payload.
MOST_BYTES = 1024 * 1024


def is_probe(request: object) -> bool:
    """Is this request a canary? Only of requests that are plain maps can it be told."""
    return isinstance(request, Mapping) and request.get(HEALTH_CHECK_KEY) is True


def marked(payload: Mapping[str, object]) -> dict[str, object]:
    """The payload with Dynamo's marker."""
    return {**payload, HEALTH_CHECK_KEY: True}


def read_payload(text: str) -> dict[str, object]:
    """The payload that a setting names (``DYN_HEALTH_CHECK_PAYLOAD``), with the marker.

    ``text`` is a JSON object, or ``@`` and the path of a file that holds one. Blocks for a file.

    Raises:
        FileUnusable: the file cannot be read, or is too long.
        ValueError: it holds something else than a JSON object.
    """
    content = _content(Path(text[1:])) if text.startswith("@") else text.encode()
    try:
        value = msgspec.json.decode(content)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(value, dict):
        raise ValueError(f"it is no JSON object: {str(value)[:80]!r}")
    return marked(value)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as exc:
        raise FileUnusable(f"{path}: {exc.strerror or exc}") from exc
    if len(content) > MOST_BYTES:
        raise FileUnusable(f"{path}: longer than {MOST_BYTES} bytes")
    return content
