"""The trace that a request belongs to: W3C Trace Context, and the request id of its client.

It travels in three headers: ``traceparent`` and ``tracestate`` (https://www.w3.org/TR/trace-context)
and ``x-request-id``. Dynamo has them among the headers of a frame of its request plane; a plane
without headers has them in the request's metadata, under names of our own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import frozen

from dynamo_trio.wire.ids import new_digits

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
X_REQUEST_ID = "x-request-id"
HEADERS = (TRACEPARENT, TRACESTATE, X_REQUEST_ID)

#: What a header is called among the metadata of a request.
_IN_METADATA = {name: f"dynamo_trio_{name.replace('-', '_')}" for name in HEADERS}

#: Characters of the longest ``tracestate`` that is passed on; the specification asks for 512.
MAX_STATE = 512

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE = re.compile(r"[ -~]+", re.ASCII)
_REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@frozen
class TraceContext:
    """Where a piece of work stands in its trace. Ids are lower-case hex."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits: of the work itself
    parent_id: str = ""  # of the work that asked for it; empty if it begins the trace
    flags: str = "01"  # 2 digits; 01: its spans are recorded, as far as is known
    state: str = ""  # what tracing systems add, passed on as it came
    request_id: str = ""  # the client's x-request-id

    @classmethod
    def following(cls, headers: Mapping[str, str]) -> TraceContext:
        """The context of work that was asked for with these headers.

        It has a new span, and a new trace if they name none. What cannot be read is as good as
        not there.
        """
        request_id = headers.get(X_REQUEST_ID, "")
        request_id = request_id if _REQUEST_ID.fullmatch(request_id) else ""
        parent = _parent(headers.get(TRACEPARENT, ""))
        if parent is None:
            digits = new_digits(48)
            return cls(digits[:32], digits[32:], request_id=request_id)
        trace_id, parent_id, flags = parent
        state = _state(headers.get(TRACESTATE, ""))
        return cls(trace_id, new_span_id(), parent_id, flags, state, request_id)

    @property
    def traceparent(self) -> str:
        """This span, as the parent of others."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def headers(self) -> dict[str, str]:
        """What goes with a request that belongs to this work."""
        found = {TRACEPARENT: self.traceparent}
        if self.state:
            found[TRACESTATE] = self.state
        if self.request_id:
            found[X_REQUEST_ID] = self.request_id
        return found


def new_span_id() -> str:
    """16 random hex digits."""
    return new_digits(16)


def _parent(text: str) -> tuple[str, str, str] | None:
    match = _PARENT.fullmatch(text.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return trace_id, span_id, flags if version == "00" else f"{int(flags, 16) & 1:02x}"


def _state(text: str) -> str:
    text = text.strip(" \t")
    return text if len(text) <= MAX_STATE and _STATE.fullmatch(text) else ""


# --- with a request ---------------------------------------------------------------------


def picked(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a frame's headers that are of a trace."""
    return {name: headers[name] for name in HEADERS if name in headers}


def into_metadata(headers: Mapping[str, str], metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The metadata of a request, with the headers of its trace."""
    if not headers:
        return metadata
    more = {_IN_METADATA[name]: headers[name] for name in HEADERS if name in headers}
    return {**metadata, **more}


def out_of_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What :func:`into_metadata` was given."""
    rest = dict(metadata)
    headers = {name: rest.pop(key) for name, key in _IN_METADATA.items() if key in rest}
    return headers, rest
