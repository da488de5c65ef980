"""W3C Trace Context: what is read, what is passed on, and what is as good as not there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.wire.trace import (
    MAX_STATE,
    TraceContext,
    into_metadata,
    new_span_id,
    out_of_metadata,
    picked,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_work_that_was_asked_for_is_a_new_span_of_the_same_trace() -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=b,c=d", "x-request-id": "mine-1"}
    context = TraceContext.following(headers)
    assert (context.trace_id, context.parent_id, context.flags) == (TRACE, SPAN, "01")
    assert context.span_id != SPAN
    assert context.headers() == {
        "traceparent": f"00-{TRACE}-{context.span_id}-01",
        "tracestate": "a=b,c=d",
        "x-request-id": "mine-1",
    }


def test_what_is_not_recorded_stays_unrecorded() -> None:
    context = TraceContext.following({"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert context.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        PARENT.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"{PARENT}-more",  # version 00 has no more
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"{PARENT},{PARENT}",
        PARENT.replace("7", "\u0667"),
        f"{PARENT}\n",
    ],
)
def test_a_parent_that_cannot_be_read_begins_a_new_trace_without_its_state(text: str) -> None:
    context = TraceContext.following({"traceparent": text, "tracestate": "a=b"})
    assert context.trace_id != TRACE
    assert (context.parent_id, context.state) == ("", "")


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    context = TraceContext.following({"traceparent": f"cc-{TRACE}-{SPAN}-ff-what-else"})
    assert context.parent_id == SPAN
    assert context.traceparent == f"00-{TRACE}-{context.span_id}-01"


@pytest.mark.parametrize("state", ["x" * (MAX_STATE + 1), "a=\x1b[2J", "a=\u00e9", "\n"])
def test_a_state_that_could_do_harm_is_left_out(state: str) -> None:
    context = TraceContext.following({"traceparent": PARENT, "tracestate": state})
    assert (context.parent_id, context.state) == (SPAN, "")


@pytest.mark.parametrize("name", ["x" * 129, "two words", "\x1b", "a\nb", ""])
def test_a_request_id_that_could_do_harm_is_left_out(name: str) -> None:
    assert TraceContext.following({"x-request-id": name}).request_id == ""


@given(st.dictionaries(st.sampled_from(["traceparent", "tracestate", "x-request-id"]), st.text()))
def test_whatever_comes_what_goes_on_is_well_formed(headers: dict[str, str]) -> None:
    sent = TraceContext.following(headers).headers()
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", sent["traceparent"])
    assert all(text.isascii() and text.isprintable() for text in sent.values())


def test_span_ids_differ() -> None:
    ids = {new_span_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{16}", one) for one in ids)


def test_what_rides_on_the_metadata_is_taken_out_again() -> None:
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    metadata = {"traceparent": "the user's own", "a": "b"}
    carried = into_metadata({**headers, "other": "left out"}, metadata)
    assert out_of_metadata(carried) == (headers, metadata)
    assert into_metadata({}, metadata) is metadata
    assert out_of_metadata(metadata) == ({}, metadata)
    assert picked({"request-id": "1", **headers}) == headers
