"""Keys of the discovery store, and the two ways in which they are escaped.

Theory of operation
-------------------
A key is a path below a bucket. etcd stores ``bucket/key`` as it is; the file backend has
one directory for each bucket and one file for each key, and turns the key into a file name
by escaping *every* byte that is no ASCII letter or digit (:func:`file_name`), ``-``, ``_``
and ``.`` included. In keys of event records each segment was already escaped before it
became part of the key (:func:`escape_segment`, which keeps ``-`` and ``_``), so a file
name may hold escaped percent signs.

Ids are 64 bits without sign: lower-case hex without padding in keys and paths, decimal in
the JSON values.
"""

from __future__ import annotations

import re

from attrs import frozen

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.names import EndpointId

INSTANCES = "v1/instances"
MODELS = "v1/mdc"
EVENT_CHANNELS = "v1/event_channels"
EVENT_SOURCES = "v1/event_sources"

MAX_ID = 2**64 - 1

_ID = re.compile(r"[0-9a-f]{1,16}")
_NOT_ALPHANUMERIC = re.compile(rb"[^0-9A-Za-z]")
_NOT_IN_SEGMENT = re.compile(rb"[^0-9A-Za-z_-]")
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")


# --- ids ---------------------------------------------------------------------------------


def format_id(value: int) -> str:
    """An id as it stands in keys and paths.

    Raises:
        LocalProtocolError: it does not fit into 64 bits.
    """
    if not 0 <= value <= MAX_ID:
        raise LocalProtocolError(f"{value} is no 64-bit id")
    return f"{value:x}"


def parse_id(text: str) -> int:
    """Read an id.

    Raises:
        RemoteProtocolError: no lower-case hex of at most 64 bits.
    """
    if not _ID.fullmatch(text):
        raise RemoteProtocolError(f"no id: {text[:64]!r}")
    return int(text, 16)


def endpoint_path(instance_id: int, endpoint: str) -> str:
    """The path of a request frame for one endpoint of one instance."""
    return f"{format_id(instance_id)}/{endpoint}"


# --- escaping ----------------------------------------------------------------------------


def _escape(pattern: re.Pattern[bytes], text: str) -> str:
    raw = text.encode("utf-8", "replace")
    return pattern.sub(lambda match: b"%%%02X" % match[0][0], raw).decode("ascii")


def _unescape(text: str, forbidden: re.Pattern[bytes]) -> str:
    pieces = _ESCAPED.split(text.encode("utf-8", "replace"))
    if any(forbidden.search(piece) for piece in pieces[::2]):
        raise RemoteProtocolError(f"not escaped as it should be: {text[:256]!r}")
    pieces[1::2] = [bytes([int(piece, 16)]) for piece in pieces[1::2]]
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"not UTF-8 when unescaped: {text[:256]!r}") from None


def file_name(key: str) -> str:
    """The file backend's name for a key (relative to its bucket)."""
    return _escape(_NOT_ALPHANUMERIC, key)


def key_of_file(name: str) -> str:
    """The key that a file of the file backend holds.

    Raises:
        RemoteProtocolError: no name that :func:`file_name` makes.
    """
    return _unescape(name, _NOT_ALPHANUMERIC)


def escape_segment(text: str) -> str:
    """One segment of an event key."""
    return _escape(_NOT_IN_SEGMENT, text)


def unescape_segment(text: str) -> str:
    """What a segment of an event key stands for.

    Raises:
        RemoteProtocolError: no segment that :func:`escape_segment` makes.
    """
    return _unescape(text, _NOT_IN_SEGMENT)


# --- keys --------------------------------------------------------------------------------


@frozen
class InstanceKey:
    """Key of an Endpoint record or, with or without the slug of an adapter, of a Model record."""

    endpoint: EndpointId
    instance_id: int
    adapter: str | None = None

    def __str__(self) -> str:
        key = f"{self.endpoint.path}/{format_id(self.instance_id)}"
        return key if self.adapter is None else f"{key}/{self.adapter}"

    @classmethod
    def parse(cls, key: str) -> InstanceKey:
        """Read a key below ``v1/instances`` or ``v1/mdc``.

        Raises:
            RemoteProtocolError: no such key.
        """
        parts = key.split("/")
        if len(parts) not in (4, 5) or not all(parts):
            raise RemoteProtocolError(f"no key of an instance: {key[:256]!r}")
        return cls(EndpointId(*parts[:3]), parse_id(parts[3]), *parts[4:])


@frozen
class EventKey:
    """Key of an EventChannel or EventSource record of one endpoint."""

    endpoint: EndpointId
    topic: str
    publisher_id: int

    def __str__(self) -> str:
        names = (self.endpoint.namespace, self.endpoint.component, self.endpoint.name, self.topic)
        segments = zip(_EVENT_LABELS, map(escape_segment, names), strict=True)
        return "/".join(f"{label}/{name}" for label, name in segments) + (
            f"/{format_id(self.publisher_id)}"
        )

    @classmethod
    def parse(cls, key: str) -> EventKey:
        """Read a key below ``v1/event_channels`` or ``v1/event_sources``.

        Raises:
            RemoteProtocolError: no such key, or of another scope than an endpoint.
        """
        *parts, publisher = key.split("/")
        if tuple(parts[::2]) != _EVENT_LABELS or len(parts) != 2 * len(_EVENT_LABELS):
            raise RemoteProtocolError(f"no key of an endpoint's events: {key[:256]!r}")
        namespace, component, name, topic = map(unescape_segment, parts[1::2])
        return cls(EndpointId(namespace, component, name), topic, parse_id(publisher))


def is_of_wider_scope(key: str) -> bool:
    """Whether it is the key of events about a whole component or namespace."""
    return tuple(key.split("/")[:-1:2]) in _WIDER_LABELS


_WIDER_LABELS = (("namespace", "topic"), ("namespace", "component", "topic"))
_EVENT_LABELS = ("namespace", "component", "endpoint", "topic")
